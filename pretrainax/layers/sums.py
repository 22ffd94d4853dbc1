"""Sums with their counts: added over layers, micro-batches and devices, and divided once."""

import jax
import jax.numpy as jnp

Sums = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count), float32 scalars


def added(one: Sums, other: Sums) -> Sums:
    """Returns the sums of both, those of one name added up."""
    both = {name: jax.tree.map(jnp.add, one[name], other[name]) for name in one.keys() & other.keys()}
    return {**one, **other, **both}
