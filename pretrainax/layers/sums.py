"""Sums with their counts: added over layers, micro-batches and devices, and divided once."""

import jax
import jax.numpy as jnp

from pretrainax.layers.by_layer import BY_LAYER

Sums = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count), float32 scalars


def added(one: Sums, other: Sums) -> Sums:
    """Returns the sums of both, those of one name added up."""
    both = {name: jax.tree.map(jnp.add, one[name], other[name]) for name in one.keys() & other.keys()}
    return {**one, **other, **both}


def over_layers(sums: Sums, stack: str, numbers: range) -> Sums:
    """Returns the sums of a stack, of those of its layers of these numbers, [l, …]; what is BY_LAYER keeps its layers,
    and gets the name of the stack, and which they are, by the first and the step: layers/decoder/0:1/expert_tokens."""
    apart = {name: pair for name, pair in sums.items() if name.startswith(BY_LAYER)}
    together = {name: pair for name, pair in sums.items() if name not in apart}
    place = f"{BY_LAYER}{stack}/{numbers.start}:{numbers.step}/"
    named = {name.replace(BY_LAYER, place, 1): pair for name, pair in apart.items()}
    return jax.tree.map(lambda s: s.sum(axis=0), together) | named
