"""Assigns tokens to rows of experts (slots), and moves the vectors of tokens to the slots and back.

An assignment is one of the k experts of a token: assignment n · k + i is the i-th expert of token n. A slot is a row
that an expert processes. Each assignment has one slot, or none if its expert is full. Because of this, both moves and
both of their gradients are gathers. Nothing is scattered, and sums are bitwise reproducible.
"""

import math
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp


class Slots(NamedTuple):
    """The mapping between assignments and slots, in both directions. Slots are sorted by expert."""

    of_assignment: jax.Array  # [N · k], slot of each assignment; S (the number of slots) if it has none
    assignment: jax.Array  # [S], assignment in each slot; N · k in an empty slot
    sizes: jax.Array  # [E], number of assignments of each expert, with and without a slot


def assign(chosen: jax.Array, num_experts: int, room: Optional[int]) -> Slots:
    """Returns the slots of the assignments.

    First choices get slots before second choices (Lepikhin et al. 2020, section 2.2).

    Args:
      chosen: [N, k], the experts of each token, the first choice first.
      room: slots per expert; an expert with more assignments drops the last ones. None: N · k slots, one for each
        assignment.
    """
    tokens, choices = chosen.shape
    count = chosen.size
    # [N, k] -> [k · N], all first choices before all second choices; a stable sort keeps this order for each expert
    order = jnp.argsort(chosen.T.reshape(-1), stable=True)
    order = (order % tokens) * choices + order // tokens
    rank = jnp.zeros(count, jnp.int32).at[order].set(jnp.arange(count, dtype=jnp.int32), unique_indices=True)
    sizes = (chosen.reshape(-1, 1) == jnp.arange(num_experts)[None]).sum(axis=0, dtype=jnp.int32)
    if room is None:
        return Slots(rank, order, sizes)
    starts = jnp.cumsum(sizes) - sizes
    expert = chosen.reshape(-1)
    within = rank - starts[expert]
    of_assignment = jnp.where(within < room, expert * room + within, num_experts * room)
    slot = jnp.arange(room)[None]
    # [E, room] -> [S]
    source = (starts[:, None] + slot, slot < sizes[:, None])
    assignment = jnp.where(source[1], order.at[source[0]].get(mode="clip"), count).reshape(-1)
    return Slots(of_assignment, assignment, sizes)


def slots_per_expert(capacity: float, assignments: int, num_experts: int) -> int:
    """Returns the number of slots per expert: `capacity` times an even share of the assignments, rounded up."""
    return math.ceil(capacity * assignments / num_experts)


def to_slots(x: jax.Array, slots: Slots) -> jax.Array:
    """Returns the vector of x [N, D] for the token in each slot, [S, D]; empty slots are 0."""
    return gather_rows(_repeated(x, len(slots.of_assignment) // len(x)), slots.assignment, slots.of_assignment)


def from_slots(y: jax.Array, slots: Slots, weights: jax.Array) -> jax.Array:
    """Returns for each token the weighted sum of the rows y [S, D] of its slots, [N, D] float32.

    Args:
      weights: [N, k], the weights of the experts of each token. An assignment without a slot adds 0.
    """
    rows = gather_rows(y, slots.of_assignment, slots.assignment).reshape(*weights.shape, -1)
    # [N, k, D] -> [N, D]
    return jnp.einsum("NKD,NK->ND", rows, weights.astype(rows.dtype), preferred_element_type=jnp.float32)


def _repeated(x: jax.Array, times: int) -> jax.Array:
    # [N, D] -> [N · k, D]
    return jnp.broadcast_to(x[:, None], (len(x), times, x.shape[1])).reshape(-1, x.shape[1])


@jax.custom_vjp
def gather_rows(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """Returns the rows of x at the indices `index`, with 0 where an index is out of range.

    Args:
      index: indices of rows; no row occurs twice.
      back: the inverse of `index`, which the backward uses.
    """
    return x.at[index].get(mode="fill", fill_value=0)


gather_rows.defvjp(
    lambda x, index, back: (gather_rows(x, index, back), back),
    lambda back, gradient: (gradient.at[back].get(mode="fill", fill_value=0), None, None),
)
