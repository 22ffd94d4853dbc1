"""Converts weights between files of Hugging Face transformers and our parameter tree, with a family's name table.

A name table is a list of `NameRow`. Each names one of our parameters and its published tensors: the tensors in files of
transformers. `as_ours` returns a published tensor as a view in our shape. Reading a file copies from this view, and
writing a file copies into this view. Both directions therefore use the same mapping and preserve all bits.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np

from pretrainax import models
from pretrainax.config import ModelConfig, UserError
from pretrainax.sharding.param_paths import PyTree, parameter_names
from pretrainax.zoo.family import NameRow

# The name of a published tensor, and its index in our array: (layer, expert), (layer,), or () if our array is not
# stacked.
Place: TypeAlias = tuple[str, tuple[int, ...]]
_STACKED = ("layer", "expert")  # outermost first
# Path of each of our parameters -> (row of the name table, shape of our parameter).
Rows: TypeAlias = Mapping[str, tuple[NameRow, tuple[int, ...]]]


def rows_of(table: Sequence[NameRow], tree: PyTree) -> Rows:
    """Returns, for each leaf of a parameter tree, its row of the name table and its shape.

    Raises:
      ValueError: the table and the tree have different parameters.
    """
    rows, names = {row.path: row for row in table}, parameter_names(tree)
    if rows.keys() != set(names):
        raise ValueError(f"the name table and the model differ in {sorted(rows.keys() ^ set(names))}")
    return {name: (rows[name], x.shape) for name, x in zip(names, jax.tree.leaves(tree), strict=True)}


def tensor_locations(row: NameRow, shape: tuple[int, ...]) -> Iterator[Place]:
    """Yields the name and index of each published tensor of a PretrainAX parameter.

    A parameter has one tensor per expert, one per layer, or a single tensor.

    Args:
      shape: the shape of our parameter, with its stacked axes.
    """
    for index in np.ndindex(shape[: stacked_axes(row)]):
        first = row.first if index[:1] == (0,) else None
        numbers = dict(zip(_STACKED, index, strict=False))
        if row.layers is not None:
            numbers["layer"] = row.layers[index[0]]
        yield first or row.name.format(**numbers), index


def stacked_axes(row: NameRow) -> int:
    """Returns the number of stacked axes of our array: leading axes with a separate published tensor per index."""
    return sum(f"{{{name}}}" in row.name for name in _STACKED)


def their_shape(row: NameRow, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a published tensor.

    Args:
      shape: the shape of our parameter without its stacked axes.
    """
    if _holds_all_experts(row):  # the published tensor contains all experts, and possibly several matrices side by side
        return *shape[:-1], row.part.whole(shape[-1])
    if row.path.endswith("/kernel") and (row.transposed or len(shape) != 2 or row.part.pieces > 1):
        if _is_convolution(row):  # ours is [width, in, out], theirs is [out, in, width]
            return shape[::-1]
        inputs = _inputs(row)
        matrix = math.prod(shape[:inputs]), row.part.whole(math.prod(shape[inputs:]))
        return matrix[::-1] if row.transposed else matrix
    if row.path.endswith("/bias"):
        return (row.part.whole(math.prod(shape)),)
    return shape


def as_ours(row: NameRow, theirs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a view of a published tensor in our shape, so that writes to the view change the published tensor.

    Args:
      theirs: the published tensor.
      shape: the shape of our parameter without its stacked axes.
    """
    if _is_convolution(row):
        return theirs.T
    if not row.transposed:
        return theirs[..., row.part.of(theirs.shape[-1])].reshape(shape, copy=False)
    inputs = _inputs(row)
    # [out, in] -> [out axes, in axes] -> [in axes, out axes]
    ours = theirs[row.part.of(theirs.shape[0])].reshape(shape[inputs:] + shape[:inputs], copy=False)
    return np.moveaxis(ours, range(len(shape) - inputs), range(inputs, len(shape)))


def _is_convolution(row: NameRow) -> bool:
    return row.path.endswith("convolution/kernel")


def _holds_all_experts(row: NameRow) -> bool:
    return "/experts_" in row.path and "{expert}" not in row.name


def _has_heads(row: NameRow) -> bool:
    return re.search(r"_attention/(query|key|value|out|query_up|key_value_up)/kernel$", row.path) is not None


def _inputs(row: NameRow) -> int:
    """Returns the number of input axes of our kernel: 2 (heads, width) for attention's output projection, else 1."""
    return 2 if _has_heads(row) and row.path.endswith("out/kernel") else 1


def from_huggingface(table: Sequence[NameRow], state: Mapping[str, np.ndarray], config: ModelConfig) -> PyTree:
    """Returns the parameters of `config` as float32 NumPy arrays, from a Hugging Face state dict.

    Raises:
      UserError: tensors are missing from `state`, or have a wrong shape. The message lists all of them.
      ValueError: the table and the model have different parameters.
    """
    shapes = models.abstract_params(config)
    rows = rows_of(table, shapes)
    if problems := shape_problems(rows, {name: np.shape(x) for name, x in state.items()}):
        raise UserError(f"the weights do not match config.model: {'; '.join(problems)}")
    leaves = []
    for row, shape in rows.values():
        ours = np.empty(shape, np.float32)
        for name, index in tensor_locations(row, shape):
            part = ours[index]
            part[...] = as_ours(row, np.asarray(state[name]), part.shape)
        leaves.append(ours)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def to_huggingface(table: Sequence[NameRow], params: PyTree) -> dict[str, np.ndarray]:
    """Returns the Hugging Face state dict of our parameters (the inverse of `from_huggingface`).

    The state dict contains tied tensors only once, under the name in the table.
    """
    state = {}
    for (row, shape), x in zip(rows_of(table, params).values(), jax.tree.leaves(params), strict=True):
        for name, index in tensor_locations(row, shape):
            part = np.asarray(x[index])
            theirs = state.setdefault(name, np.empty(their_shape(row, part.shape), part.dtype))
            as_ours(row, theirs, part.shape)[...] = part
    return state


def shape_problems(rows: Rows, found: Mapping[str, tuple[int, ...]], unknown: Sequence[str] = ()) -> list[str]:
    """Returns one error message for each published tensor that is missing, is unknown or has the wrong shape.

    Args:
      found: name -> shape of each tensor in the file.
      unknown: names of the tensors in the file that the table does not contain.
    """
    problems = {name: f"{name} is unknown" for name in unknown}
    for row, shape in rows.values():
        for name, index in tensor_locations(row, shape):
            wanted = their_shape(row, shape[len(index) :])
            if name not in found:
                problems[name] = f"{name} {list(wanted)} is missing"
            elif tuple(found[name]) != wanted:
                problems[name] = f"{name} is {list(found[name])}, expected {list(wanted)}"
    return list(problems.values())
