"""Says which row of which expert a token goes to, and takes it there and back.

An assignment is one of the k experts of a token: number n · k + i is the i-th of token n. A slot is a row that an
expert works on. Each assignment has one slot, or none where there is no room; so the way there is a gather, and so is
the way back, and both gradients: nothing is scattered, and sums come out the same bit by bit.
"""

import math
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp


class Slots(NamedTuple):
    """Says which assignment is in which slot. Slots lie expert by expert."""

    of_assignment: jax.Array  # [N · k], the slot; the number of slots where there is none
    assignment: jax.Array  # [S], what is in a slot; N · k in an empty one
    sizes: jax.Array  # [E], how many assignments each expert has, with those that have no slot


def assign(chosen: jax.Array, num_experts: int, room: Optional[int]) -> Slots:
    """Gives the assignments their slots, of first choices before second ones (Lepikhin et al. 2020, section 2.2).

    Args:
      chosen: [N, k], the experts of each token.
      room: slots of each expert; None: there are N · k, and an expert has as many as it is asked for.
    """
    tokens, choices = chosen.shape
    count = chosen.size
    # [N, k] -> [k · N], where all first choices are before the second ones, and sorting keeps that order
    order = jnp.argsort(chosen.T.reshape(-1), stable=True)
    order = (order % tokens) * choices + order // tokens
    place = jnp.zeros(count, jnp.int32).at[order].set(jnp.arange(count, dtype=jnp.int32), unique_indices=True)
    sizes = (chosen.reshape(-1, 1) == jnp.arange(num_experts)[None]).sum(axis=0, dtype=jnp.int32)
    if room is None:
        return Slots(place, order, sizes)
    starts = jnp.cumsum(sizes) - sizes
    expert = chosen.reshape(-1)
    within = place - starts[expert]
    of_assignment = jnp.where(within < room, expert * room + within, num_experts * room)
    slot = jnp.arange(room)[None]
    # [E, room] -> [S]
    taken = (starts[:, None] + slot, slot < sizes[:, None])
    assignment = jnp.where(taken[1], order.at[taken[0]].get(mode="clip"), count).reshape(-1)
    return Slots(of_assignment, assignment, sizes)


def room_of(capacity: float, assignments: int, num_experts: int) -> int:
    """Returns the slots of each expert: `capacity` times an even share, rounded up."""
    return math.ceil(capacity * assignments / num_experts)


def to_slots(x: jax.Array, slots: Slots) -> jax.Array:
    """Returns the rows of x [N, D] as they lie in the slots, [S, D]; 0 in an empty one."""
    return gathered(_repeated(x, len(slots.of_assignment) // len(x)), slots.assignment, slots.of_assignment)


def from_slots(y: jax.Array, slots: Slots, weights: jax.Array) -> jax.Array:
    """Returns the sum over each token's slots of y [S, D] by `weights` [N, k], [N, D] in float32."""
    rows = gathered(y, slots.of_assignment, slots.assignment).reshape(*weights.shape, -1)
    # [N, k, D] -> [N, D]
    return jnp.einsum("NKD,NK->ND", rows, weights.astype(rows.dtype), preferred_element_type=jnp.float32)


def _repeated(x: jax.Array, times: int) -> jax.Array:
    # [N, D] -> [N · k, D]
    return jnp.broadcast_to(x[:, None], (len(x), times, x.shape[1])).reshape(-1, x.shape[1])


@jax.custom_vjp
def gathered(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """Returns x[index], 0 where `index` is past the end; `back` is the same the other way: no index is there twice."""
    return x.at[index].get(mode="fill", fill_value=0)


gathered.defvjp(
    lambda x, index, back: (gathered(x, index, back), back),
    lambda back, gradient: (gradient.at[back].get(mode="fill", fill_value=0), None, None),
)
