"""Sums of losses and metrics with their counts, added up over layers, microbatches and devices, then divided once."""

import jax
import jax.numpy as jnp

from pretrainax.layers.by_layer import BY_LAYER

Sums = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count), float32 scalars


def add_sums(one: Sums, other: Sums) -> Sums:
    """Merges two dictionaries of sums, adding the entries that have the same name."""
    common = {name: jax.tree.map(jnp.add, one[name], other[name]) for name in one.keys() & other.keys()}
    return {**one, **other, **common}


def sum_over_layers(sums: Sums, stack: str, numbers: range) -> Sums:
    """Adds up sums [l, …] over the layers of a stack, except for BY_LAYER sums, which keep their layer axis.

    The name of a BY_LAYER sum then also contains the stack, the first layer and the layer stride, for example
    layers/decoder/0:1/expert_tokens.

    Args:
      stack: name of the stack.
      numbers: indices of these layers in the stack.
    """
    per_layer = {name: pair for name, pair in sums.items() if name.startswith(BY_LAYER)}
    to_add = {name: pair for name, pair in sums.items() if name not in per_layer}
    prefix = f"{BY_LAYER}{stack}/{numbers.start}:{numbers.step}/"
    renamed = {name.replace(BY_LAYER, prefix, 1): pair for name, pair in per_layer.items()}
    return jax.tree.map(lambda s: s.sum(axis=0), to_add) | renamed
