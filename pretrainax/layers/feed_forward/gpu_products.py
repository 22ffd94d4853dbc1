"""Grouped matmuls on a GPU, which multiply rows that are sorted by expert by the matrix of each row's expert.

These Pallas kernels for Triton follow the design of MegaBlocks (Gale et al. 2022, arXiv 2211.15841, section 5).

Each program of a kernel computes one tile of the result. The rows of each expert are split into blocks, the last of
which may be partly empty. Each program reads its block's first row, last row and expert.
"""

import functools
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_OUTER = 128  # rows and columns of a tile
_INNER_BYTES = 128  # size of a step along the summed axis, such as 64 bfloat16 numbers


class Blocks(NamedTuple):
    """The row range and the expert of each block, [J] each."""

    first: jax.Array
    last: jax.Array  # index of the last row + 1; equal to `first` for an empty block
    expert: jax.Array  # E (the number of experts) for a block of rows without an expert


def blocks_of(sizes: jax.Array, rows: int) -> Blocks:
    """Splits `rows` rows into blocks that each contain rows of one expert.

    Args:
      sizes: [E], the number of rows of each expert, in order. Any further rows have no expert.
    """
    ends = jnp.append(jnp.cumsum(sizes), rows)
    starts = jnp.append(0, ends[:-1])
    blocks_end = jnp.cumsum(-(-(ends - starts) // _OUTER))
    block = jnp.arange(rows // _OUTER + len(ends))  # maximum number of blocks
    expert = jnp.searchsorted(blocks_end, block, side="right").clip(max=len(sizes))
    earlier = jnp.append(0, blocks_end)[expert]  # blocks of earlier experts
    first = (starts[expert] + (block - earlier) * _OUTER).clip(max=rows)
    return Blocks(first, jnp.maximum(jnp.minimum(first + _OUTER, ends[expert]), first), expert)


def product(
    x: jax.Array,
    kernel: jax.Array,
    sizes: jax.Array,
    transposed: bool = False,
    dtype: Optional[jax.typing.DTypeLike] = None,
) -> jax.Array:
    """Multiplies each row of x [S, D] by its expert's matrix, and returns [S, F] in `dtype`, by default x's.

    Args:
      kernel: [E, D, F], or [E, F, D] if `transposed`.
      sizes: [E], the number of rows of each expert, in order. Any further rows have no expert, and their result is 0.
    """
    rows, columns = len(x), kernel.shape[1 if transposed else 2]
    blocks = blocks_of(sizes, rows)
    multiply_tile = functools.partial(_multiply_tile, transposed)
    grid = (len(blocks.first), pl.cdiv(columns, _OUTER))
    return _call_kernel(multiply_tile, "grouped_matmul", grid, (rows, columns), dtype or x.dtype)(*blocks, x, kernel)


def summed_over_rows(
    x: jax.Array, gradient: jax.Array, sizes: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """Computes the gradient of the kernel of `product`, [E, D, F] in `dtype`.

    For each expert, the gradient is the sum of the outer products of x [S, D] and gradient [S, F] over the expert's
    rows.
    """
    ends = jnp.cumsum(sizes)
    shape = (len(sizes), x.shape[1], gradient.shape[1])
    grid = (pl.cdiv(shape[1], _OUTER), pl.cdiv(shape[2], _OUTER), shape[0])
    return _call_kernel(_sum_tile, "grouped_matmul_of_rows", grid, shape, dtype)(ends - sizes, ends, x, gradient)


def _call_kernel(kernel, name: str, grid: tuple[int, ...], shape: tuple[int, ...], dtype: jnp.dtype):
    settings = triton.CompilerParams(num_warps=8, num_stages=3)
    result = jax.ShapeDtypeStruct(shape, dtype)
    return pl.pallas_call(kernel, grid=grid, out_shape=result, name=name, compiler_params=settings)


def _multiply_tile(transposed, first, last, expert, x, kernel, y):
    """Computes one tile of y [S, F], which covers some of the columns in one block of rows."""
    block, tile = pl.program_id(0), pl.program_id(1)
    start, end, owner = first[block], last[block], expert[block]
    step = _INNER_BYTES // x.dtype.itemsize
    rows, columns = pl.ds(start, _OUTER), pl.ds(tile * _OUTER, _OUTER)
    is_row = start + jnp.arange(_OUTER) < end
    is_column = tile * _OUTER + jnp.arange(_OUTER) < y.shape[1]

    def add(k, total):
        inner, is_inner = pl.ds(k * step, step), k * step + jnp.arange(step) < x.shape[1]
        a = _load(x.at[rows, inner], is_row, is_inner)
        if transposed:
            return total + triton.dot(a, _load(kernel.at[owner, columns, inner], is_column, is_inner), trans_b=True)
        return total + triton.dot(a, _load(kernel.at[owner, inner, columns], is_inner, is_column))

    has_rows = (owner < kernel.shape[0]) & (start < end)
    steps = jnp.where(has_rows, jnp.int32(pl.cdiv(x.shape[1], step)), 0)
    total = jax.lax.fori_loop(0, steps, add, _no_sum(x))
    triton.store(y.at[rows, columns], total.astype(y.dtype), mask=is_row[:, None] & is_column[None])


def _sum_tile(starts, ends, x, gradient, total):
    """Computes one tile of total [E, D, F], within the matrix of one expert."""
    outer, tile, expert = (pl.program_id(i) for i in range(3))
    start, end = starts[expert], ends[expert]
    step = _INNER_BYTES // x.dtype.itemsize
    inputs, columns = pl.ds(outer * _OUTER, _OUTER), pl.ds(tile * _OUTER, _OUTER)
    is_input = outer * _OUTER + jnp.arange(_OUTER) < x.shape[1]
    is_column = tile * _OUTER + jnp.arange(_OUTER) < gradient.shape[1]

    def add(k, total):
        rows, is_row = pl.ds(start + k * step, step), start + k * step + jnp.arange(step) < end
        a, b = _load(x.at[rows, inputs], is_row, is_input), _load(gradient.at[rows, columns], is_row, is_column)
        return total + triton.dot(a, b, trans_a=True)

    tile_total = jax.lax.fori_loop(0, pl.cdiv(end - start, step), add, _no_sum(x))
    triton.store(
        total.at[expert, inputs, columns], tile_total.astype(total.dtype), mask=is_input[:, None] & is_column[None]
    )


def _no_sum(operand) -> jax.Array:
    """Returns a tile of zeros, to which products of the operand are added."""
    return jnp.zeros((_OUTER, _OUTER), jnp.int32 if jnp.issubdtype(operand.dtype, jnp.integer) else jnp.float32)


def _load(ref, is_row, is_column):
    """Loads a tile of an array; elements outside the array are 0."""
    return triton.load(ref, mask=is_row[:, None] & is_column[None], other=jnp.zeros((), ref.dtype))
