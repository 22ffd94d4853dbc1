"""Sums of losses and metrics with their counts: added up over layers, microbatches and devices, and divided once."""

import jax
import jax.numpy as jnp

from pretrainax.layers.by_layer import BY_LAYER

Sums = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count), float32 scalars


def add_sums(one: Sums, other: Sums) -> Sums:
    """Returns the entries of both dictionaries; entries with the same name are added."""
    both = {name: jax.tree.map(jnp.add, one[name], other[name]) for name in one.keys() & other.keys()}
    return {**one, **other, **both}


def sum_over_layers(sums: Sums, stack: str, numbers: range) -> Sums:
    """Returns the sums [l, …] of a stack's layers, added up over the layers; BY_LAYER sums keep their layer axis.

    The stack, the first layer and the step are inserted into the name of a BY_LAYER sum:
    layers/decoder/0:1/expert_tokens.

    Args:
      stack: name of the stack.
      numbers: indices of these layers in the stack.
    """
    layered = {name: pair for name, pair in sums.items() if name.startswith(BY_LAYER)}
    others = {name: pair for name, pair in sums.items() if name not in layered}
    prefix = f"{BY_LAYER}{stack}/{numbers.start}:{numbers.step}/"
    named = {name.replace(BY_LAYER, prefix, 1): pair for name, pair in layered.items()}
    return jax.tree.map(lambda s: s.sum(axis=0), others) | named
