"""The way of tokens to experts of other devices, and back: two all-to-alls along the mesh axis `expert` (GShard:
Lepikhin et al. 2020, arXiv 2006.16668, section 3.2).

With room for as many tokens for each expert, devices send each other blocks of one size. Without, each sends what the
other's experts are asked for, which is known only as the step runs: a ragged all-to-all, whose result has room for the
worst, that all tokens of all devices go to one. On a CPU, which has none, it is made of one of blocks.
"""

import functools
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.layers.feed_forward.slots import gathered
from pretrainax.sharding.axes import EXPERT_AXIS
from pretrainax.sharding.mesh import axis_size, platform


class Route(NamedTuple):
    """Says what goes where, of the rows of one device; each [P], of P devices."""

    starts: jax.Array  # where the rows for each device begin
    sizes: jax.Array  # how many they are
    starts_there: jax.Array  # where they begin in the result of each device
    sizes_here: jax.Array  # how many come from each device


class Exchange:
    """The rows that other devices have for the experts of this one."""

    def __init__(self, sizes: jax.Array, rows: int, room: Optional[int]):
        """Says what goes where.

        Args:
          sizes: [E], rows that this device has for each expert, of all.
          rows: how many rows it has, with those that are empty.
          room: rows of each expert; None: they lie one after the other, as many as `sizes` says.
        """
        self.parts, self._rows, self._room = axis_size(EXPERT_AXIS), rows, room
        own = len(sizes) // self.parts  # experts of a device
        if room is not None:
            self.room, self.sizes = self.parts * room, jnp.full(own, self.parts * room)
            return
        self.room = None
        # [source, E] -> [source, device, its experts]
        table = jax.lax.all_gather(sizes, EXPERT_AXIS).reshape(self.parts, self.parts, own)
        between, me = table.sum(axis=2), jax.lax.axis_index(EXPERT_AXIS)
        starts, starts_there = _before(between, 1), _before(between, 0)
        self._there = Route(starts[me], between[me], starts_there[me], between[:, me])
        self._back = Route(starts_there[:, me], between[:, me], starts[:, me], between[me])
        mine = table[:, me]  # [source, own]
        self.sizes = mine.sum(axis=0)
        # what came lies source by source, each expert by expert: [P · rows], `own` for what is empty
        group = jnp.searchsorted(jnp.cumsum(mine.reshape(-1)), jnp.arange(self.parts * rows), side="right")
        expert = jnp.where(group < mine.size, group % own, own)
        self._order = jnp.argsort(expert, stable=True)
        self._place = jnp.argsort(self._order)

    def there(self, rows: jax.Array) -> jax.Array:
        """Returns the rows [S', D] for the experts of this device, expert by expert; rows [S, D] of all experts."""
        if self._room is None:
            came = _ragged(self._there, self._back, self.parts * self._rows, rows)
            return gathered(came, self._order, self._place)
        # [device, its experts, room, D] -> [source, own experts, room, D] -> [own experts, source, room, D]
        blocks = _all_to_all(rows.reshape(self.parts, -1, self._room, rows.shape[1]))
        return blocks.swapaxes(0, 1).reshape(-1, rows.shape[1])

    def back(self, rows: jax.Array) -> jax.Array:
        """Returns to each device what became of its rows, [S', D] -> [S, D]."""
        if self._room is None:
            return _ragged(self._back, self._there, self._rows, gathered(rows, self._place, self._order))
        blocks = rows.reshape(-1, self.parts, self._room, rows.shape[1]).swapaxes(0, 1)
        return _all_to_all(blocks).reshape(-1, rows.shape[1])


def _all_to_all(blocks: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(blocks, EXPERT_AXIS, split_axis=0, concat_axis=0, tiled=True)


def _before(sizes: jax.Array, axis: int) -> jax.Array:
    """Returns the sums of what is before each number along an axis."""
    return jnp.cumsum(sizes, axis) - sizes


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ragged(there: Route, back: Route, count: int, rows: jax.Array) -> jax.Array:
    """Returns what the devices send to this one, [count, D], one after the other; 0 in what is empty."""
    return _sent(there, count, rows)


def _ragged_forward(there, back, count, rows):
    return _sent(there, count, rows), (there, back, jnp.zeros((len(rows), 0)))


def _ragged_backward(count, residuals, gradient):
    _, back, rows = residuals
    return None, None, _sent(back, len(rows), gradient)


_ragged.defvjp(_ragged_forward, _ragged_backward)


def _sent(route: Route, count: int, rows: jax.Array) -> jax.Array:
    if platform() != "cpu":
        empty = jnp.zeros((count, rows.shape[1]), rows.dtype)
        sizes = (x.astype(jnp.int32) for x in route)
        return jax.lax.ragged_all_to_all(rows, empty, *sizes, axis_name=EXPERT_AXIS)
    # a block for each device, large enough for all rows: [P, R, D], R the most that one can have of another
    most = min(len(rows), count)
    within = jnp.arange(most)[None]
    index = jnp.where(within < route.sizes[:, None], route.starts[:, None] + within, len(rows))
    blocks = _all_to_all(rows.at[index].get(mode="fill", fill_value=0))
    place = jnp.arange(count)
    source = jnp.searchsorted(jnp.cumsum(route.sizes_here), place, side="right")
    start = _before(route.sizes_here, 0).at[source].get(mode="clip")
    found = jnp.where(source < len(route.sizes_here), source * most + place - start, blocks.shape[0] * most)
    return blocks.reshape(-1, rows.shape[1]).at[found].get(mode="fill", fill_value=0)
