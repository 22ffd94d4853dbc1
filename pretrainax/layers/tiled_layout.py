"""Describes how the kernels of `tiled` attention access arrays: whole arrays on a GPU, blocks in VMEM on a TPU.

Kernels index all arrays as [rows, heads, tokens, …]. On a GPU, arrays stay in main memory, and queries, keys and values
keep the layout of the model, [rows, tokens, heads, …] (`HeadsLast`). A TPU computes from VMEM only. There, a program
sees the whole row of one head (`_Block`), which stays in VMEM from tile to tile, and scalars are in SMEM.
"""

from collections.abc import Callable
from typing import TypeAlias, Union

import flax.struct
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pretrainax.sharding.mesh import platform
from pretrainax.sharding.param_paths import PyTree

VMEM_BYTES = 56 * 2**20  # of the 64 MiB of v5p and tpu7x; v5e and v6e have 128 MiB


@flax.struct.dataclass
class HeadsLast:
    """An array [rows, tokens, heads, features] that is indexed as [rows, heads, tokens, features]."""

    array: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        rows, tokens, heads, features = self.array.shape
        return rows, heads, tokens, features

    @property
    def dtype(self):
        return self.array.dtype

    def __getitem__(self, index):
        row, head, tokens, features = index
        return self.array[row, tokens, head, features]

    def __setitem__(self, index, value):
        row, head, tokens, features = index
        self.array[row, tokens, head, features] = value


Operand: TypeAlias = Union[jax.Array, HeadsLast]  # indexed as [rows, heads, tokens, features]


def to_operand(x: jax.Array) -> Operand:
    """Converts queries, keys or values [B, T, H, K] to the layout of the kernels on this platform."""
    return x.swapaxes(1, 2) if platform() == "tpu" else HeadsLast(x)


def to_array(x: Operand) -> jax.Array:
    """Converts the result of `to_operand` back to [B, T, H, K]."""
    return x.array if isinstance(x, HeadsLast) else x.swapaxes(1, 2)


def call(
    kernel: Callable[..., None], name: str, grid: dict[str, int], shapes: PyTree, args: tuple, is_large: bool
) -> PyTree:
    """Runs a Pallas kernel.

    Args:
      kernel: a function of the program's index in each dimension of the grid, {name: [] int32}, and of references to
        `args` and to the results.
      grid: the size of each dimension, the fastest first. A TPU has the dimensions `row` and `head`.
      shapes: a tree of `jax.ShapeDtypeStruct`, the results.
      is_large: whether the tiles of a GPU need 8 warps.

    Returns:
      A tree of arrays, as `shapes`.
    """
    if platform() == "tpu":
        return _call_on_tpu(kernel, name, grid, shapes, args)

    def run(*refs):
        kernel({dimension: pl.program_id(i) for i, dimension in enumerate(grid)}, *refs)

    return pl.pallas_call(
        run,
        grid=tuple(grid.values()),
        out_shape=shapes,
        name=name,
        interpret=platform() == "cpu",
        compiler_params=triton.CompilerParams(num_warps=8 if is_large else 4, num_stages=2),
    )(*args)


class _Block:
    """A reference to the block of an array that a program of a TPU sees, indexed as the whole array."""

    def __init__(self, ref, shape: tuple[int, ...]):
        self.ref, self.shape, self.dtype = ref, shape, ref.dtype

    def __getitem__(self, index):
        return self.ref[index[-2:]]

    def __setitem__(self, index, value):
        self.ref[index[-2:]] = value


def _call_on_tpu(kernel, name: str, grid: dict[str, int], shapes: PyTree, args: tuple) -> PyTree:
    """Runs `call` on a TPU: arrays with at least 3 axes become blocks in VMEM, the others are scalars in SMEM."""
    from jax.experimental.pallas import tpu

    order = list(grid)[::-1]  # a TPU runs the last dimension first

    def spec(x):
        """Describes the block of an array that a program sees: the row of its head."""
        if len(x.shape) < 3:
            return pl.BlockSpec(memory_space=tpu.SMEM)

        def index(*ids):
            row, head = ids[order.index("row")], ids[order.index("head")]
            heads = (head // (grid["head"] // x.shape[1]),) if len(x.shape) == 4 else ()
            return (row if x.shape[0] > 1 else 0, *heads, 0, 0)

        return pl.BlockSpec((*(None for _ in x.shape[:-2]), *x.shape[-2:]), index)

    def run(*refs):
        program = {dimension: pl.program_id(i) for i, dimension in enumerate(order)}
        kernel(program, *jax.tree.map(lambda x, ref: ref if len(x.shape) < 3 else _Block(ref, x.shape), operands, refs))

    operands = *args, *(shapes if isinstance(shapes, tuple) else (shapes,))
    return pl.pallas_call(
        run,
        grid=tuple(grid[dimension] for dimension in order),
        in_specs=jax.tree.map(spec, args),
        out_specs=jax.tree.map(spec, shapes),
        out_shape=shapes,
        name=name,
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("arbitrary",) * len(order), vmem_limit_bytes=VMEM_BYTES
        ),
    )(*args)
