"""Grouped matmuls, which multiply rows that are sorted by expert by the matrix of each row's expert.

If each expert has the same fixed number of rows, this is one batched matmul. Otherwise, the method depends on the
platform:

- TPUs use `jax.lax.ragged_dot`. On other platforms, XLA would compute `ragged_dot` by multiplying all rows by all
  matrices.
- GPUs use one kernel (`gpu_products`).
- CPUs, and GPUs too old for Triton, multiply blocks of rows one after the other, each by the matrix of its expert. An
  expert's last block is padded. On a GPU, this loop copies each matrix and each result once more and launches four
  kernels per block: a step of one OLMoE layer moved 125 GB for 8,192 tokens.

The matrices may be sharded along the mesh axis `fsdp`.

With 8-bit operands (`eight_bit`), "int8" has one scale for each column of the result, for the matrices of all experts,
so that no scale depends on the expert of a row. Each device computes the scales of its rows.
"""

import functools
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.layers import eight_bit
from pretrainax.layers.rematerialization import cast_kernel, saved_residual
from pretrainax.sharding.axes import FSDP_AXIS
from pretrainax.sharding.mesh import GPUS, TRITON_CAPABILITY, axis_size, gpu_capability, platform

_BLOCK = 64  # rows per block; smaller blocks multiply more slowly, larger blocks have more padding
_SUM_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


class Layout(NamedTuple):
    """The layout of the experts' rows, and of the device's shard of the kernel."""

    capacity: Optional[int]  # fixed number of rows per expert; None: `sizes` contains the numbers
    split: int  # the axis of the kernel [E, D, F] that is sharded along `fsdp`
    products: str = ""  # format of the operands, a key of `eight_bit.FORMATS`; "": dtype of the rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def expert_product(layout: Layout, x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies each row of x [S, D] by its expert's matrix: [S, F] in x's dtype. Rows without an expert become 0.

    The backward is written explicitly for two reasons. First, if the kernel is sharded along `fsdp`, the backward
    gathers it a second time, so that the gathered kernel is not saved. Second, the backward sums the kernel gradient in
    float32.

    Args:
      kernel: [E, D, F] float32, or this device's shard of it.
      sizes: [E], number of rows of each expert, in order. Any further rows have no expert.
    """
    return _grouped_matmul(layout, x, _gather_kernel(layout, kernel, x.dtype), sizes)


def _forward(layout, x, kernel, sizes):
    kernel = cast_kernel(kernel, x.dtype)
    return expert_product(layout, x, kernel, sizes), (x, kernel, sizes)


def _backward(layout, residuals, gradient):
    x, kernel, sizes = residuals
    dx = _grouped_matmul(layout, gradient, _gather_kernel(layout, kernel, x.dtype), sizes, transposed=True)
    dkernel = _kernel_gradient(layout, x, gradient, sizes)
    if axis_size(FSDP_AXIS) > 1:
        dkernel = jax.lax.psum_scatter(dkernel, FSDP_AXIS, scatter_dimension=layout.split, tiled=True)
    return dx, dkernel, None


expert_product.defvjp(_forward, _backward)


def _gather_kernel(layout: Layout, kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Casts a kernel to `dtype` and all-gathers its shards along `fsdp`."""
    kernel = kernel.astype(dtype)
    if axis_size(FSDP_AXIS) == 1:
        return kernel
    return jax.lax.all_gather(kernel, FSDP_AXIS, axis=layout.split, tiled=True)


def _grouped_matmul(
    layout: Layout, x: jax.Array, kernel: jax.Array, sizes: jax.Array, transposed: bool = False
) -> jax.Array:
    """Multiplies each row of x [S, D] by its expert's matrix in `kernel` [E, D, F], and returns [S, F].

    If `transposed`, multiplies by the transposed matrices: x is a gradient [S, F] and the result is [S, D].
    """
    if not layout.products:
        return _multiply_rows(layout, x, kernel, sizes, transposed, x.dtype)
    a = eight_bit.quantize(x, layout.products, (1,), is_gradient=transposed)
    b = eight_bit.quantize(kernel, layout.products, (0, 2 if transposed else 1))
    values, total = eight_bit.operands((a.values, b.values), x.dtype)
    result = _multiply_rows(layout, *values, sizes, transposed, total)
    result = (result.astype(jnp.float32) * a.scale * b.scale.reshape(1, -1)).astype(x.dtype)
    return saved_residual(result) if total == jnp.int32 else result


def _multiply_rows(
    layout: Layout, x: jax.Array, kernel: jax.Array, sizes: jax.Array, transposed: bool, dtype: jnp.dtype
) -> jax.Array:
    """Multiplies operands of one dtype as in `_grouped_matmul`; the result has the given dtype."""
    if layout.capacity is None and _has_triton():
        from pretrainax.layers.feed_forward import gpu_products  # imports Pallas, which only this branch needs

        return gpu_products.product(x, kernel, sizes, transposed, dtype)
    kernel = kernel.swapaxes(1, 2) if transposed else kernel
    if layout.capacity is not None:
        # [S, D] -> [E, room, D] -> [E, room, F] -> [S, F]
        by_expert = x.reshape(len(kernel), layout.capacity, -1)
        return jnp.matmul(by_expert, kernel, preferred_element_type=dtype).reshape(len(x), -1)
    if platform() == "tpu":
        return jax.lax.ragged_dot(x, kernel, sizes, preferred_element_type=dtype)
    source, position, expert, count = _blocks(sizes, len(x))
    # [S, D] -> [J, block, D] -> [J, block, F] -> [S, F]
    products = jnp.zeros((*source.shape, kernel.shape[2]), dtype)
    multiply = lambda j, products: products.at[j].set(_take_rows(x, source[j]) @ kernel[expert[j]])  # noqa: E731
    products = jax.lax.fori_loop(0, count, multiply, products)
    return _take_rows(products.reshape(-1, kernel.shape[2]), position)


def _kernel_gradient(layout: Layout, x: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes the gradient of the kernel of `expert_product`, [E, D, F] float32.

    For each expert, the gradient is the sum of the outer products of x and gradient over the rows of the expert.
    """
    if not layout.products:
        return _sum_rows(layout, x, gradient, sizes, jnp.float32)
    a = eight_bit.quantize(x, layout.products, (0,))
    b = eight_bit.quantize(gradient, layout.products, (0,), is_gradient=True)
    values, total = eight_bit.operands((a.values, b.values), jnp.float32)
    return _sum_rows(layout, *values, sizes, total).astype(jnp.float32) * a.scale.reshape(1, -1, 1) * b.scale[None]


def _sum_rows(
    layout: Layout, x: jax.Array, gradient: jax.Array, sizes: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Sums the outer products of operands of one dtype as in `_kernel_gradient`; the result has the given dtype."""
    if layout.capacity is not None:
        by_expert = (a.reshape(len(sizes), layout.capacity, -1) for a in (x, gradient))
        return jnp.einsum("ECD,ECF->EDF", *by_expert, preferred_element_type=dtype)
    if platform() == "tpu":
        return jax.lax.ragged_dot_general(x, gradient, sizes, _SUM_OVER_ROWS, preferred_element_type=dtype)
    if _has_triton():
        from pretrainax.layers.feed_forward import gpu_products

        return gpu_products.summed_over_rows(x, gradient, sizes, dtype)
    source, _, expert, count = _blocks(sizes, len(x))

    def add(j, total):
        inputs, gradients = _take_rows(x, source[j]), _take_rows(gradient, source[j])
        return total.at[expert[j]].add(jnp.matmul(inputs.T, gradients, preferred_element_type=jnp.float32))

    return jax.lax.fori_loop(0, count, add, jnp.zeros((len(sizes), x.shape[1], gradient.shape[1]), jnp.float32))


def _has_triton() -> bool:
    return platform() in GPUS and gpu_capability() >= TRITON_CAPABILITY


def _take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the rows of x at the indices `index`, and 0 where an index is out of range."""
    return x.at[index].get(mode="fill", fill_value=0)


def _blocks(sizes: jax.Array, rows: int) -> tuple[jax.Array, ...]:
    """Arranges rows that are sorted by expert into blocks, each of which contains rows of a single expert.

    Args:
      sizes: [E], number of rows of each expert.
      rows: total number of rows.

    Returns:
      The row at each position of the blocks [J, block] (`rows` at empty positions); the position of each row in the
        flattened blocks [rows]; the expert of each block [J]; the number of blocks in use.
    """
    experts, count = len(sizes), rows // _BLOCK + len(sizes)  # maximum number of blocks for any sizes
    ends, blocks = jnp.cumsum(sizes), -(-sizes // _BLOCK)
    starts, block_starts = ends - sizes, jnp.cumsum(blocks) - blocks
    expert = jnp.searchsorted(jnp.cumsum(blocks), jnp.arange(count), side="right").clip(max=experts - 1)
    # Index of the row within the rows of its expert
    offset = (jnp.arange(count) - block_starts[expert])[:, None] * _BLOCK + jnp.arange(_BLOCK)[None]
    source = jnp.where(offset < sizes[expert][:, None], starts[expert][:, None] + offset, rows)
    row = jnp.arange(rows)
    owner = jnp.searchsorted(ends, row, side="right").clip(max=experts - 1)
    position = jnp.where(row < ends[-1], block_starts[owner] * _BLOCK + row - starts[owner], count * _BLOCK)
    return source, position, expert, blocks.sum()
