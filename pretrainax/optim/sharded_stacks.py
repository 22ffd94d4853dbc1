"""Applies a function to all matrices of a model, an equal number of them on each device.

A function of whole matrices, such as a Newton-Schulz iteration, cannot use the shards that a device holds. If the
compiler partitioned it, each device would gather all matrices and repeat the work of all others. Here, matrices of
equal size and sharding form one stack [n, rows, columns], an all-to-all gives each device n / devices whole matrices,
and a second all-to-all returns the shards of the results. The function itself needs no communication.

NOTE Along a mesh axis that does not split the matrices, such as `data`, each device holds all of them. It then selects
its matrices without communication, and a gather after the function returns the others. Between TPU slices, this gather
may take longer than the work that it saves.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.sharding.axes import AXES, axes_of_entry, logical_spec


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """The axes of an array that form the rows and the columns of its matrices; all other axes stack matrices."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    names: tuple[Optional[str], ...]  # logical name of each array axis, a key of AXIS_RULES

    @property
    def stacked(self) -> tuple[int, ...]:
        """Returns the axes that stack matrices."""
        return tuple(i for i in range(len(self.names)) if i not in (*self.rows, *self.columns))

    def sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Returns the numbers of matrices, rows and columns in an array of the given shape."""
        stacked, rows, columns = (math.prod(shape[i] for i in axes) for axes in (self.stacked, self.rows, self.columns))
        return stacked, rows, columns

    def transposed(self) -> "MatrixAxes":
        """Returns the axes with rows and columns exchanged."""
        return MatrixAxes(self.columns, self.rows, self.names)

    def split_by(self, axes: Sequence[int], mesh_sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the mesh axes larger than 1 that split the given array axes."""
        spec = logical_spec(*self.names)
        return tuple(name for i in axes for name in axes_of_entry(spec[i]) if mesh_sizes[name] > 1)


class Transfer(NamedTuple):
    """A collective that moves the matrices of a stack."""

    kind: str  # all-to-all | all-gather
    axes: tuple[str, ...]  # mesh axes
    elements: int  # elements that a device holds before an all-to-all or after an all-gather, with padding
    count: int  # executions: an all-to-all before the function and one after it


class Stack(NamedTuple):
    """The matrices of equal size and sharding."""

    rows: int
    columns: int  # at least `rows`
    row_axes: tuple[str, ...]  # mesh axes that split the rows
    column_axes: tuple[str, ...]  # mesh axes that split the columns
    copy_axes: tuple[str, ...]  # mesh axes along which all devices hold the same matrices
    matrices: int  # matrices that one device processes, including padding

    def transfers(self, mesh_sizes: Mapping[str, int]) -> Iterator[Transfer]:
        """Yields the collectives of a function with one argument."""
        elements = self.matrices * self.rows * self.columns
        for axes in filter(None, (self.column_axes, self.row_axes)):
            yield Transfer("all-to-all", axes, elements, 2)
        if self.copy_axes:
            yield Transfer("all-gather", self.copy_axes, elements * _devices(self.copy_axes, mesh_sizes), 1)


class MatrixWork(NamedTuple):
    """The work of one device on the matrices of a stack, in one update."""

    stack: Stack
    flops: float  # FLOPs of the matrix multiplications
    operands: float  # elements that the matrix multiplications read and write
    itemsize: int = 4  # bytes of an element: 4 for float32, 2 for bfloat16


class _Key(NamedTuple):
    """The fields of a `Stack` that its arrays share."""

    rows: int
    columns: int
    row_axes: tuple[str, ...]
    column_axes: tuple[str, ...]
    copy_axes: tuple[str, ...]


def stacks_of(matrices: Sequence[tuple[Sequence[int], MatrixAxes]], mesh_sizes: Mapping[str, int]) -> list[Stack]:
    """Returns the stacks that `map_stacks` forms, with the matrices that one device processes.

    Args:
      matrices: global shape and matrix axes of each array.
      mesh_sizes: size of each mesh axis.
    """
    counts: dict[_Key, int] = {}
    for shape, axes in matrices:
        _, key = _oriented(shape, axes, mesh_sizes)
        shards = _devices(axes.split_by(axes.stacked, mesh_sizes), mesh_sizes)
        counts[key] = counts.get(key, 0) + axes.sizes(shape)[0] // shards
    return [Stack(*key, -(-n // _shares(key, mesh_sizes))) for key, n in counts.items()]


def map_stacks(
    function: Callable[..., jax.Array], arrays: Sequence[tuple[jax.Array, ...]], axes: Sequence[MatrixAxes]
) -> list[jax.Array]:
    """Applies `function` to the matrices in arrays; each device of the mesh set by `jax.set_mesh` processes a share.

    Without a mesh or with one device, the matrices of each array are one stack.

    Args:
      function: maps k stacks [n, rows, columns] to one such stack, matrix by matrix. It may receive the transposes of
        all matrices, and then returns the transposed result.
      arrays: k arrays of equal shape for each parameter, sharded as the names of their axes.
      axes: matrix axes of each parameter.
    """
    mesh_sizes = jax.sharding.get_abstract_mesh().shape
    if math.prod(mesh_sizes.values()) == 1:
        results = (function(*(_stacked(x, a) for x in xs)) for xs, a in zip(arrays, axes, strict=True))
        return [_unstacked(y, xs[0].shape, a) for y, xs, a in zip(results, arrays, axes, strict=True)]
    oriented = [_oriented(xs[0].shape, a, mesh_sizes) for xs, a in zip(arrays, axes, strict=True)]

    def map_shards(shards: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
        results: dict[int, jax.Array] = {}
        for key in dict.fromkeys(key for _, key in oriented):
            members = [i for i, (_, other) in enumerate(oriented) if other == key]
            stacks = [[_stacked(x, oriented[i][0]) for x in shards[i]] for i in members]
            arguments = (_distribute(jnp.concatenate(parts), key, mesh_sizes) for parts in zip(*stacks, strict=True))
            result, start = _collect(function(*arguments), key), 0
            for i, (x, *_) in zip(members, stacks, strict=True):
                results[i] = _unstacked(result[start : start + len(x)], shards[i][0].shape, oriented[i][0])
                start += len(x)
        return [results[i] for i in range(len(shards))]

    specs = [logical_spec(*a.names) for a in axes]
    arguments = [(spec,) * len(xs) for spec, xs in zip(specs, arrays, strict=True)]
    # check_vma: a gather along `copy_axes` makes the results equal there, which JAX cannot infer.
    return jax.shard_map(map_shards, in_specs=(arguments,), out_specs=specs, check_vma=False)(list(arrays))


def _oriented(shape: Sequence[int], axes: MatrixAxes, mesh_sizes: Mapping[str, int]) -> tuple[MatrixAxes, _Key]:
    """Returns the matrix axes, exchanged if there are more rows than columns, and the key of the array's stack.

    The rows of a square matrix are the dimension that the outer mesh axis splits, so that all square matrices of equal
    size form one stack: [D, H · K] of queries and [H · K, D] of attention outputs.
    """
    _, *sizes = axes.sizes(shape)
    row_axes, column_axes = (axes.split_by(x, mesh_sizes) for x in (axes.rows, axes.columns))
    order = lambda size, split: (size, not split, [AXES.index(name) for name in split])  # noqa: E731
    if order(sizes[0], row_axes) > order(sizes[1], column_axes):
        return _oriented(shape, axes.transposed(), mesh_sizes)
    used = {*row_axes, *column_axes, *axes.split_by(axes.stacked, mesh_sizes)}
    copy_axes = tuple(name for name, size in mesh_sizes.items() if size > 1 and name not in used)
    return axes, _Key(*sizes, row_axes, column_axes, copy_axes)


def _devices(axes: Sequence[str], mesh_sizes: Mapping[str, int]) -> int:
    return math.prod(mesh_sizes[name] for name in axes)


def _shares(key: _Key, mesh_sizes: Mapping[str, int]) -> int:
    """Returns the number of devices that share the matrices of a stack."""
    return _devices((*key.row_axes, *key.column_axes, *key.copy_axes), mesh_sizes)


def _stacked(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    """Returns the matrices of an array as one stack [n, rows, columns]."""
    return x.transpose(*axes.stacked, *axes.rows, *axes.columns).reshape(axes.sizes(x.shape))


def _unstacked(stack: jax.Array, shape: Sequence[int], axes: MatrixAxes) -> jax.Array:
    """Inverts `_stacked` for an array of the given shape."""
    order = (*axes.stacked, *axes.rows, *axes.columns)
    return stack.reshape([shape[i] for i in order]).transpose([order.index(i) for i in range(len(order))])


def _distribute(x: jax.Array, key: _Key, mesh_sizes: Mapping[str, int]) -> jax.Array:
    """Exchanges shards of all matrices for whole matrices, padded with zeros: [n, r, c] -> [m, rows, columns]."""
    x = jnp.pad(x, ((0, -len(x) % _shares(key, mesh_sizes)), (0, 0), (0, 0)))
    if key.copy_axes:
        x = x.reshape(_devices(key.copy_axes, mesh_sizes), -1, *x.shape[1:])
        x = jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(key.copy_axes), keepdims=False)
    for dimension, axes in ((1, key.row_axes), (2, key.column_axes)):
        x = _exchange(x, axes, 0, dimension) if axes else x
    return x


def _collect(x: jax.Array, key: _Key) -> jax.Array:
    """Inverts `_distribute`, except for the padding: [m, rows, columns] -> [padded n, r, c]."""
    for dimension, axes in ((2, key.column_axes), (1, key.row_axes)):
        x = _exchange(x, axes, dimension, 0) if axes else x
    return jax.lax.all_gather(x, key.copy_axes, tiled=True) if key.copy_axes else x


def _exchange(x: jax.Array, axes: tuple[str, ...], split: int, joined: int) -> jax.Array:
    """Exchanges parts of the dimension `split` for the whole dimension `joined`, one of which is 0.

    The all-to-all has the parts in the leading dimension. NOTE With a tiled `jax.lax.all_to_all`, XLA's CPU compiler
    (jax 0.10) may assign different layouts to the parts, and then refuses the program.
    """
    devices = jax.lax.axis_size(axes)
    # split 0: [n, …] -> [devices, m, …] -> [m, …, devices, …] -> [m, rows, …], and otherwise back
    shape = list(x.shape)
    shape[split : split + 1] = [devices, shape[split] // devices]
    parts = jax.lax.all_to_all(jnp.moveaxis(x.reshape(shape), split, 0), axes, 0, 0)
    joined_shape = [
        size // (devices if i == split else 1) * (devices if i == joined else 1) for i, size in enumerate(x.shape)
    ]
    return jnp.moveaxis(parts, 0, joined).reshape(joined_shape)
