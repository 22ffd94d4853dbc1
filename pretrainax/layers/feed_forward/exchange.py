"""Exchanges tokens between devices that have different experts, by two all-to-alls along the mesh axis `expert`.

Source: GShard (Lepikhin et al. 2020, arXiv 2006.16668, section 3.2).

With a fixed number of rows per expert, devices exchange blocks of equal size. Otherwise, the number of tokens for each
device is known only at run time, and devices use a ragged all-to-all. The result of the ragged all-to-all has room for
the worst case, in which all tokens of all devices go to one device. XLA for CPUs has no ragged all-to-all and uses an
all-to-all of blocks.
"""

import functools
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.layers.feed_forward.slots import gather_rows
from pretrainax.sharding.axes import EXPERT_AXIS
from pretrainax.sharding.mesh import axis_size, platform


class Route(NamedTuple):
    """The rows that one device sends to and receives from each of P devices, [P] each."""

    starts: jax.Array  # index of the first row for each device
    sizes: jax.Array  # number of rows that are sent to each device
    starts_there: jax.Array  # index of this device's first row in the result of each device
    sizes_here: jax.Array  # number of rows that are received from each device


class Exchange:
    """Sends the rows of this device to the devices that have the rows' experts, and returns the processed rows.

    `sizes` and `capacity` describe the rows that this device receives: the number of rows for each of its own experts,
    and the fixed number of rows per expert, or None.
    """

    def __init__(self, sizes: jax.Array, rows: int, room: Optional[int]):
        """Computes the routes of the rows; must be called inside a `jax.shard_map`.

        Args:
          sizes: [E], the number of rows that this device has for each of the E experts.
          rows: number of rows of this device, with empty rows.
          room: fixed number of rows per expert; None: rows are contiguous, and an expert has as many rows as `sizes`
            states.
        """
        self.parts, self._rows, self._room = axis_size(EXPERT_AXIS), rows, room
        own = len(sizes) // self.parts  # experts per device
        if room is not None:
            self.capacity, self.sizes = self.parts * room, jnp.full(own, self.parts * room)
            return
        self.capacity = None
        # [source, E] -> [source, device, its experts]
        table = jax.lax.all_gather(sizes, EXPERT_AXIS).reshape(self.parts, self.parts, own)
        between, device = table.sum(axis=2), jax.lax.axis_index(EXPERT_AXIS)
        starts, starts_there = _before(between, 1), _before(between, 0)
        self._route_there = Route(starts[device], between[device], starts_there[device], between[:, device])
        self._route_back = Route(starts_there[:, device], between[:, device], starts[:, device], between[device])
        received = table[:, device]  # [source, own]
        self.sizes = received.sum(axis=0)
        # Received rows are sorted by source device, then by expert: [P · rows]. Empty rows get the expert number `own`.
        group = jnp.searchsorted(jnp.cumsum(received.reshape(-1)), jnp.arange(self.parts * rows), side="right")
        expert = jnp.where(group < received.size, group % own, own)
        self._order = jnp.argsort(expert, stable=True)
        self._inverse = jnp.argsort(self._order)

    def dispatch(self, rows: jax.Array) -> jax.Array:
        """Sends this device's rows [S, D], and returns the rows [S', D] for this device's experts, sorted by expert."""
        if self._room is None:
            received = _ragged(self._route_there, self._route_back, self.parts * self._rows, rows)
            return gather_rows(received, self._order, self._inverse)
        # [device, its experts, room, D] -> [source, own experts, room, D] -> [own experts, source, room, D]
        blocks = _all_to_all(rows.reshape(self.parts, -1, self._room, rows.shape[1]))
        return blocks.swapaxes(0, 1).reshape(-1, rows.shape[1])

    def combine(self, rows: jax.Array) -> jax.Array:
        """Sends processed rows [S', D] back to the devices they came from, and returns this device's rows [S, D]."""
        if self._room is None:
            return _ragged(
                self._route_back, self._route_there, self._rows, gather_rows(rows, self._inverse, self._order)
            )
        blocks = rows.reshape(-1, self.parts, self._room, rows.shape[1]).swapaxes(0, 1)
        return _all_to_all(blocks).reshape(-1, rows.shape[1])


def _all_to_all(blocks: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(blocks, EXPERT_AXIS, split_axis=0, concat_axis=0, tiled=True)


def _before(sizes: jax.Array, axis: int) -> jax.Array:
    """Returns the exclusive cumulative sum along an axis: for each element, the sum of the elements before it."""
    return jnp.cumsum(sizes, axis) - sizes


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ragged(there: Route, back: Route, count: int, rows: jax.Array) -> jax.Array:
    """Returns the rows that all devices send to this device, concatenated: [count, D]; empty rows are 0.

    Args:
      there: the route of the rows.
      back: the reverse route, which the backward uses.
    """
    return _send(there, count, rows)


def _ragged_forward(there, back, count, rows):
    return _send(there, count, rows), (there, back, jnp.zeros((len(rows), 0)))


def _ragged_backward(count, residuals, gradient):
    _, back, rows = residuals
    return None, None, _send(back, len(rows), gradient)


_ragged.defvjp(_ragged_forward, _ragged_backward)


def _send(route: Route, count: int, rows: jax.Array) -> jax.Array:
    if platform() != "cpu":
        empty = jnp.zeros((count, rows.shape[1]), rows.dtype)
        sizes = (x.astype(jnp.int32) for x in route)
        return jax.lax.ragged_all_to_all(rows, empty, *sizes, axis_name=EXPERT_AXIS)
    # Each device gets one block, which is large enough for all rows: [P, R, D]. R is the maximum number of rows that a
    # device can receive from one device.
    most = min(len(rows), count)
    within = jnp.arange(most)[None]
    index = jnp.where(within < route.sizes[:, None], route.starts[:, None] + within, len(rows))
    blocks = _all_to_all(rows.at[index].get(mode="fill", fill_value=0))
    row = jnp.arange(count)
    source = jnp.searchsorted(jnp.cumsum(route.sizes_here), row, side="right")
    start = _before(route.sizes_here, 0).at[source].get(mode="clip")
    position = jnp.where(source < len(route.sizes_here), source * most + row - start, blocks.shape[0] * most)
    return blocks.reshape(-1, rows.shape[1]).at[position].get(mode="fill", fill_value=0)
