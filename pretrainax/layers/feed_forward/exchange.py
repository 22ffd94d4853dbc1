"""Exchanges tokens between devices that hold different experts, with two all-to-alls along the mesh axis `expert`.

Source: GShard (Lepikhin et al. 2020, arXiv 2006.16668, section 3.2).

With a fixed number of rows per expert, devices exchange blocks of equal size. Otherwise, the number of tokens for each
device is known only at run time, and devices use a ragged all-to-all. Its output buffer is sized for the worst case, in
which all tokens of all devices go to one device. XLA for CPUs has no ragged all-to-all, so an all-to-all of equal
blocks replaces it there.
"""

import functools
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.layers.feed_forward.slots import gather_rows
from pretrainax.sharding.axes import EXPERT_AXIS
from pretrainax.sharding.mesh import axis_size, platform


class Route(NamedTuple):
    """The row ranges that one device sends to and receives from each of P devices, [P] each."""

    starts: jax.Array  # index of the first row to send to each device
    sizes: jax.Array  # number of rows to send to each device
    remote_starts: jax.Array  # index, on each receiving device, of the first row from this device
    receive_sizes: jax.Array  # number of rows to receive from each device


class Exchange:
    """Sends this device's rows to the devices that hold their experts, and brings the processed rows back.

    `sizes` is the number of rows received for each of this device's experts. `capacity` is the same number if it is
    fixed, and None otherwise.
    """

    def __init__(self, sizes: jax.Array, rows: int, room: Optional[int]):
        """Computes the routes of the rows; must be called inside a `jax.shard_map`.

        Args:
          sizes: [E], the number of rows that this device has for each of the E experts.
          rows: number of rows of this device, including empty rows.
          room: fixed number of rows per expert. If None, the experts' rows are contiguous, with `sizes` rows for each
            expert.
        """
        self.parts, self._rows, self._rows_per_expert = axis_size(EXPERT_AXIS), rows, room
        local_experts = len(sizes) // self.parts  # experts per device
        if room is not None:
            self.capacity, self.sizes = self.parts * room, jnp.full(local_experts, self.parts * room)
            return
        self.capacity = None
        # [source, E] -> [source, device, device's experts]
        counts = jax.lax.all_gather(sizes, EXPERT_AXIS).reshape(self.parts, self.parts, local_experts)
        device_counts, device = counts.sum(axis=2), jax.lax.axis_index(EXPERT_AXIS)
        starts, remote_starts = _exclusive_cumsum(device_counts, 1), _exclusive_cumsum(device_counts, 0)
        self._dispatch_route = Route(
            starts[device], device_counts[device], remote_starts[device], device_counts[:, device]
        )
        self._combine_route = Route(
            remote_starts[:, device], device_counts[:, device], starts[:, device], device_counts[device]
        )
        received = counts[:, device]  # [source, local experts]
        self.sizes = received.sum(axis=0)
        # Received rows are sorted by source device, then by expert: [P · rows]. Empty rows get the expert index
        # `local_experts`.
        group = jnp.searchsorted(jnp.cumsum(received.reshape(-1)), jnp.arange(self.parts * rows), side="right")
        expert = jnp.where(group < received.size, group % local_experts, local_experts)
        self._order = jnp.argsort(expert, stable=True)
        self._inverse = jnp.argsort(self._order)

    def dispatch(self, rows: jax.Array) -> jax.Array:
        """Sends this device's rows [S, D] to the devices that hold their experts.

        Returns the rows [S', D] received for this device's experts, sorted by expert.
        """
        if self._rows_per_expert is None:
            received = _ragged_exchange(self._dispatch_route, self._combine_route, self.parts * self._rows, rows)
            return gather_rows(received, self._order, self._inverse)
        # [device, its experts, room, D] -> [source, local experts, room, D] -> [local experts, source, room, D]
        blocks = _all_to_all(rows.reshape(self.parts, -1, self._rows_per_expert, rows.shape[1]))
        return blocks.swapaxes(0, 1).reshape(-1, rows.shape[1])

    def combine(self, rows: jax.Array) -> jax.Array:
        """Sends processed rows [S', D] back to where they came from, and returns this device's own rows [S, D]."""
        if self._rows_per_expert is None:
            return _ragged_exchange(
                self._combine_route, self._dispatch_route, self._rows, gather_rows(rows, self._inverse, self._order)
            )
        blocks = rows.reshape(-1, self.parts, self._rows_per_expert, rows.shape[1]).swapaxes(0, 1)
        return _all_to_all(blocks).reshape(-1, rows.shape[1])


def _all_to_all(blocks: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(blocks, EXPERT_AXIS, split_axis=0, concat_axis=0, tiled=True)


def _exclusive_cumsum(sizes: jax.Array, axis: int) -> jax.Array:
    """Computes the exclusive cumulative sum along an axis: for each element, the sum of the preceding elements."""
    return jnp.cumsum(sizes, axis) - sizes


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ragged_exchange(route: Route, reverse: Route, count: int, rows: jax.Array) -> jax.Array:
    """Sends rows along `route` and returns the rows that this device receives, [count, D]; empty rows are 0.

    Args:
      route: the route of the rows.
      reverse: the reverse route, which the backward uses.
      count: number of rows in the result.
    """
    return _send(route, count, rows)


def _ragged_exchange_forward(route, reverse, count, rows):
    return _send(route, count, rows), (route, reverse, jnp.zeros((len(rows), 0)))


def _ragged_exchange_backward(count, residuals, gradient):
    _, reverse, rows = residuals
    return None, None, _send(reverse, len(rows), gradient)


_ragged_exchange.defvjp(_ragged_exchange_forward, _ragged_exchange_backward)


def _send(route: Route, count: int, rows: jax.Array) -> jax.Array:
    """Sends rows along a route and returns the received rows [count, D]; empty rows are 0."""
    if platform() != "cpu":
        buffer = jnp.zeros((count, rows.shape[1]), rows.dtype)
        sizes = (x.astype(jnp.int32) for x in route)
        return jax.lax.ragged_all_to_all(rows, buffer, *sizes, axis_name=EXPERT_AXIS)
    # Each device gets one block that has space for all its rows: [P, R, D]. R is the maximum number of rows that a
    # device can receive from one device.
    block_size = min(len(rows), count)
    offset = jnp.arange(block_size)[None]
    index = jnp.where(offset < route.sizes[:, None], route.starts[:, None] + offset, len(rows))
    blocks = _all_to_all(rows.at[index].get(mode="fill", fill_value=0))
    row = jnp.arange(count)
    source = jnp.searchsorted(jnp.cumsum(route.receive_sizes), row, side="right")
    start = _exclusive_cumsum(route.receive_sizes, 0).at[source].get(mode="clip")
    position = jnp.where(
        source < len(route.receive_sizes), source * block_size + row - start, blocks.shape[0] * block_size
    )
    return blocks.reshape(-1, rows.shape[1]).at[position].get(mode="fill", fill_value=0)
