"""The product of rows that lie expert by expert with the matrix of each, and where those matrices come from.

Where experts have as much room each, it is one batched product. Where each has as many rows as it is asked for, it is
`jax.lax.ragged_dot` on TPUs. On others XLA multiplies all rows by all matrices for that. On GPUs it is one kernel
(`gpu_products`). On CPUs blocks of rows are multiplied one after the other, each by the matrix of its expert; rows of a
group that fill no block are padded. A GPU would copy each matrix and each result once more for that, and start four
kernels a block: a step of one layer of OLMoE moved 125 GB so, for 8,192 tokens.
"""

import functools
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.layers.made_again import converted
from pretrainax.sharding.axes import FSDP_AXIS
from pretrainax.sharding.mesh import GPUS, axis_size, platform

_BLOCK = 64  # rows; smaller ones are slower products, larger ones more padding
_SUM_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


class Layout(NamedTuple):
    """Says how the rows of experts lie, and what a device has of a kernel."""

    room: Optional[int]  # rows of each expert; None: as many as `sizes` says
    split: int  # the axis of the kernel [E, D, F] that `fsdp` splits


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def expert_product(layout: Layout, x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns [S, F] in x's dtype: each row of x [S, D] times the matrix of its expert. Rows of none give 0.

    The backward is written out to gather what `fsdp` splits once more, instead of keeping it; and to sum the gradient
    of the kernel in float32.

    Args:
      kernel: [E, D, F] float32, of which a device may have a part.
      sizes: [E], rows of each expert, in order.
    """
    return _product(layout, x, _whole(layout, kernel, x.dtype), sizes)


def _forward(layout, x, kernel, sizes):
    kernel = converted(kernel, x.dtype)
    return expert_product(layout, x, kernel, sizes), (x, kernel, sizes)


def _backward(layout, residuals, gradient):
    x, kernel, sizes = residuals
    dx = _product(layout, gradient, _whole(layout, kernel, x.dtype), sizes, transposed=True)
    dkernel = _summed_over_rows(layout, x, gradient, sizes)
    if axis_size(FSDP_AXIS) > 1:
        dkernel = jax.lax.psum_scatter(dkernel, FSDP_AXIS, scatter_dimension=layout.split, tiled=True)
    return dx, dkernel, None


expert_product.defvjp(_forward, _backward)


def _whole(layout: Layout, kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns a kernel in the dtype of the products, with what other devices have of it."""
    kernel = kernel.astype(dtype)
    if axis_size(FSDP_AXIS) == 1:
        return kernel
    return jax.lax.all_gather(kernel, FSDP_AXIS, axis=layout.split, tiled=True)


def _product(layout: Layout, x: jax.Array, kernel: jax.Array, sizes: jax.Array, transposed: bool = False) -> jax.Array:
    """Returns [S, F] of x [S, D] and a kernel [E, D, F], or [S, D] of x [S, F] and, transposed, that kernel."""
    if layout.room is None and platform() in GPUS:
        from pretrainax.layers.feed_forward import gpu_products  # with Pallas, which nothing else needs

        return gpu_products.product(x, kernel, sizes, transposed)
    kernel = kernel.swapaxes(1, 2) if transposed else kernel
    if layout.room is not None:
        # [S, D] -> [E, room, D] -> [E, room, F] -> [S, F]
        return (x.reshape(len(kernel), layout.room, -1) @ kernel).reshape(len(x), -1)
    if platform() == "tpu":
        return jax.lax.ragged_dot(x, kernel, sizes)
    source, place, expert, count = _blocks(sizes, len(x))
    # [S, D] -> [J, block, D] -> [J, block, F] -> [S, F]
    products = jnp.zeros((*source.shape, kernel.shape[2]), x.dtype)
    multiply = lambda j, products: products.at[j].set(_rows(x, source[j]) @ kernel[expert[j]])  # noqa: E731
    products = jax.lax.fori_loop(0, count, multiply, products)
    return _rows(products.reshape(-1, kernel.shape[2]), place)


def _summed_over_rows(layout: Layout, x: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns the gradient of the kernel, [E, D, F] float32: of each expert the sum of outer products of its rows."""
    if layout.room is not None:
        of_experts = (a.reshape(len(sizes), layout.room, -1) for a in (x, gradient))
        return jnp.einsum("ECD,ECF->EDF", *of_experts, preferred_element_type=jnp.float32)
    if platform() == "tpu":
        return jax.lax.ragged_dot_general(x, gradient, sizes, _SUM_OVER_ROWS, preferred_element_type=jnp.float32)
    if platform() in GPUS:
        from pretrainax.layers.feed_forward import gpu_products

        return gpu_products.summed_over_rows(x, gradient, sizes)
    source, _, expert, count = _blocks(sizes, len(x))

    def add(j, total):
        rows, of_rows = _rows(x, source[j]), _rows(gradient, source[j])
        return total.at[expert[j]].add(jnp.matmul(rows.T, of_rows, preferred_element_type=jnp.float32))

    return jax.lax.fori_loop(0, count, add, jnp.zeros((len(sizes), x.shape[1], gradient.shape[1]), jnp.float32))


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the rows of x at `index`, 0 where it is past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


def _blocks(sizes: jax.Array, rows: int) -> tuple[jax.Array, ...]:
    """Lays groups of rows out in blocks of one expert each.

    Returns the row that is at each place of the blocks [J, block] (`rows` where there is none), the place of each row
    [rows], the expert of each block [J], and how many of them there are.
    """
    experts, count = len(sizes), rows // _BLOCK + len(sizes)  # blocks, whatever the sizes
    ends, blocks = jnp.cumsum(sizes), -(-sizes // _BLOCK)
    starts, block_starts = ends - sizes, jnp.cumsum(blocks) - blocks
    expert = jnp.searchsorted(jnp.cumsum(blocks), jnp.arange(count), side="right").clip(max=experts - 1)
    within = (jnp.arange(count) - block_starts[expert])[:, None] * _BLOCK + jnp.arange(_BLOCK)[None]  # its group
    source = jnp.where(within < sizes[expert][:, None], starts[expert][:, None] + within, rows)
    row = jnp.arange(rows)
    owner = jnp.searchsorted(ends, row, side="right").clip(max=experts - 1)
    place = jnp.where(row < ends[-1], block_starts[owner] * _BLOCK + row - starts[owner], count * _BLOCK)
    return source, place, expert, blocks.sum()
