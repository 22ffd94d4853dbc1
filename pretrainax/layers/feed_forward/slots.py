"""Assigns tokens to rows of experts (slots), and moves token vectors to the slots and back.

An assignment is one of the k experts of a token: assignment n · k + i is the i-th expert of token n. A slot is a row
that an expert processes. Each assignment has one slot, or none if its expert is full. Moving vectors in either
direction is therefore a gather, and so is its gradient. Nothing is scattered, and sums are bitwise reproducible.
"""

import math
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp


class Slots(NamedTuple):
    """The mapping between assignments and slots, in both directions. Slots are sorted by expert."""

    slot_of_assignment: jax.Array  # [N · k], slot of each assignment; S (the number of slots): no slot
    assignment: jax.Array  # [S], assignment in each slot; N · k in an empty slot
    sizes: jax.Array  # [E], number of real tokens assigned to each expert, including those without a slot


def assign(chosen: jax.Array, num_experts: int, room: Optional[int], real: jax.Array) -> Slots:
    """Gives each of the N · k assignments a slot of its expert, if the expert has a free slot.

    First choices get slots before second choices (Lepikhin et al. 2020, section 2.2). Padding tokens get no slot of an
    expert.

    Args:
      chosen: [N, k], the experts of each token, the first choice first.
      room: number of slots per expert; an expert with more assignments drops the last ones. If None, there are N · k
        slots, one for each assignment; padding has the last slots, after all experts.
      real: [N] bool, False at padding.
    """
    chosen = jnp.where(real[:, None], chosen, num_experts)  # sorts padding after all experts
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
    rank_in_expert = rank - starts.at[expert].get(mode="clip")
    has_slot = (expert < num_experts) & (rank_in_expert < room)
    slot_of_assignment = jnp.where(has_slot, expert * room + rank_in_expert, num_experts * room)
    slot = jnp.arange(room)[None]
    # [E, room] -> [S]
    source_and_mask = (starts[:, None] + slot, slot < sizes[:, None])
    assignment = jnp.where(source_and_mask[1], order.at[source_and_mask[0]].get(mode="clip"), count).reshape(-1)
    return Slots(slot_of_assignment, assignment, sizes)


def slots_per_expert(capacity: float, assignments: int, num_experts: int) -> int:
    """Returns the number of slots per expert: `capacity` times the mean assignments per expert, rounded up."""
    return math.ceil(capacity * assignments / num_experts)


def to_slots(x: jax.Array, slots: Slots) -> jax.Array:
    """Copies the token vectors x [N, D] to the tokens' slots, [S, D]; empty slots are 0."""
    return gather_rows(
        _repeat_tokens(x, len(slots.slot_of_assignment) // len(x)), slots.assignment, slots.slot_of_assignment
    )


def from_slots(y: jax.Array, slots: Slots, weights: jax.Array) -> jax.Array:
    """Sums the rows of y [S, D] in each token's slots, weighted by `weights`, and returns [N, D] float32.

    Args:
      weights: [N, k], the weights of each token's experts. An assignment without a slot adds 0.
    """
    rows = gather_rows(y, slots.slot_of_assignment, slots.assignment).reshape(*weights.shape, -1)
    # [N, k, D] -> [N, D]
    return jnp.einsum("NKD,NK->ND", rows, weights.astype(rows.dtype), preferred_element_type=jnp.float32)


def _repeat_tokens(x: jax.Array, times: int) -> jax.Array:
    # [N, D] -> [N · k, D]
    return jnp.broadcast_to(x[:, None], (len(x), times, x.shape[1])).reshape(-1, x.shape[1])


@jax.custom_vjp
def gather_rows(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """Returns the rows of x at the indices `index`, and 0 where an index is out of range.

    Args:
      index: row indices; no row occurs twice.
      back: the inverse of `index`, which the backward uses.
    """
    return x.at[index].get(mode="fill", fill_value=0)


gather_rows.defvjp(
    lambda x, index, back: (gather_rows(x, index, back), back),
    lambda back, gradient: (gradient.at[back].get(mode="fill", fill_value=0), None, None),
)
