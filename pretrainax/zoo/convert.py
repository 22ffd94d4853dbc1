"""Converts weights between files of Hugging Face transformers and our parameter tree, with a family's name table.

A name table is a list of `NameRow`. Each row names one of our parameters and its published tensors, i.e. the tensors in
transformers' files. `as_ours` returns a view of a published tensor in our shape. An import copies from this view, and
an export copies into this view. Both directions therefore use the same mapping and preserve all bits.
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

# (name of a published tensor, index of the tensor in our stacked array). The index is (layer, expert), (layer,) or ()
# for an array that is not stacked.
TensorLocation: TypeAlias = tuple[str, tuple[int, ...]]
_STACKED_AXES = ("layer", "expert")  # outermost first
# Path of a parameter -> (its row of the name table, its shape).
Rows: TypeAlias = Mapping[str, tuple[NameRow, tuple[int, ...]]]


def rows_of(table: Sequence[NameRow], tree: PyTree) -> Rows:
    """Maps the path of each parameter in a tree to the parameter's name-table row and shape.

    Raises:
      ValueError: the table and the tree have different parameters.
    """
    rows, names = {row.path: row for row in table}, parameter_names(tree)
    if rows.keys() != set(names):
        raise ValueError(f"the name table and the model differ in {sorted(rows.keys() ^ set(names))}")
    return {name: (rows[name], x.shape) for name, x in zip(names, jax.tree.leaves(tree), strict=True)}


def tensor_locations(row: NameRow, shape: tuple[int, ...]) -> Iterator[TensorLocation]:
    """Yields the name of each published tensor of a parameter, and the tensor's index in our stacked array.

    A parameter has one published tensor per layer and expert, one tensor per layer, or a single tensor.

    Args:
      row: the row of the parameter in the name table.
      shape: the shape of our parameter, with its stacked axes.
    """
    for index in np.ndindex(shape[: stacked_axes(row)]):
        first_name = row.first if index[:1] == (0,) else None
        indices = dict(zip(_STACKED_AXES, index, strict=False))
        if row.layers is not None:
            indices["layer"] = row.layers[index[0]]
        yield first_name or row.name.format(**indices), index


def stacked_axes(row: NameRow) -> int:
    """Counts our array's stacked axes: leading axes along which transformers' files store separate tensors."""
    return sum(f"{{{name}}}" in row.name for name in _STACKED_AXES)


def their_shape(row: NameRow, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Computes the shape of a published tensor from the shape of our parameter.

    Args:
      row: the row of the parameter in the name table.
      shape: the shape of our parameter without its stacked axes.
    """
    if _contains_all_experts(row):  # one published tensor for all experts, possibly with fused matrices
        return *shape[:-1], row.part.fused_size(shape[-1])
    if row.path.endswith("/kernel") and (row.transposed or len(shape) != 2 or row.part.pieces > 1):
        if _is_convolution(row):  # ours: [width, in, out]; theirs: [out, in, width]
            return shape[::-1]
        num_input_axes = _num_input_axes(row)
        matrix = math.prod(shape[:num_input_axes]), row.part.fused_size(math.prod(shape[num_input_axes:]))
        return matrix[::-1] if row.transposed else matrix
    if row.path.endswith("/bias"):
        return (row.part.fused_size(math.prod(shape)),)
    return shape


def as_ours(row: NameRow, theirs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a view of a published tensor in our shape; writing to the view changes the published tensor.

    Args:
      row: the row of the parameter in the name table.
      theirs: the published tensor.
      shape: the shape of our parameter without its stacked axes.
    """
    if _is_convolution(row):
        return theirs.T
    if not row.transposed:
        return theirs[..., row.part.our_slice(theirs.shape[-1])].reshape(shape, copy=False)
    num_input_axes = _num_input_axes(row)
    # [out, in] -> [out axes, in axes] -> [in axes, out axes]
    ours = theirs[row.part.our_slice(theirs.shape[0])].reshape(
        shape[num_input_axes:] + shape[:num_input_axes], copy=False
    )
    return np.moveaxis(ours, range(len(shape) - num_input_axes), range(num_input_axes, len(shape)))


def _is_convolution(row: NameRow) -> bool:
    return row.path.endswith("convolution/kernel")


def _contains_all_experts(row: NameRow) -> bool:
    return "/experts_" in row.path and "{expert}" not in row.name


def _has_heads(row: NameRow) -> bool:
    return re.search(r"_attention/(query|key|value|out|query_up|key_value_up)/kernel$", row.path) is not None


def _num_input_axes(row: NameRow) -> int:
    """Returns the number of input axes of our kernel: 2 (heads, width) for the attention output, otherwise 1."""
    return 2 if _has_heads(row) and row.path.endswith("out/kernel") else 1


def from_huggingface(table: Sequence[NameRow], state: Mapping[str, np.ndarray], config: ModelConfig) -> PyTree:
    """Converts a Hugging Face state dict to the parameters of `config`, as float32 NumPy arrays.

    Raises:
      UserError: tensors are missing from `state` or have the wrong shape. The message lists all these tensors.
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
            our_slice = ours[index]
            our_slice[...] = as_ours(row, np.asarray(state[name]), our_slice.shape)
        leaves.append(ours)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def to_huggingface(table: Sequence[NameRow], params: PyTree) -> dict[str, np.ndarray]:
    """Converts our parameters to a Hugging Face state dict; the inverse of `from_huggingface`.

    A tied tensor appears once, under its name in the table.

    Raises:
      ValueError: the table and `params` have different parameters.
    """
    state = {}
    for (row, shape), x in zip(rows_of(table, params).values(), jax.tree.leaves(params), strict=True):
        for name, index in tensor_locations(row, shape):
            our_slice = np.asarray(x[index])
            theirs = state.setdefault(name, np.empty(their_shape(row, our_slice.shape), our_slice.dtype))
            as_ours(row, theirs, our_slice.shape)[...] = our_slice
    return state


def shape_problems(rows: Rows, found: Mapping[str, tuple[int, ...]], unknown: Sequence[str] = ()) -> list[str]:
    """Returns an error message for each published tensor that is missing, is unknown, or has the wrong shape.

    Args:
      rows: the expected parameters, from `rows_of`.
      found: name -> shape of each tensor in the file.
      unknown: names of tensors in the file that are not in the name table.
    """
    problems = {name: f"{name} is unknown" for name in unknown}
    for row, shape in rows.values():
        for name, index in tensor_locations(row, shape):
            expected_shape = their_shape(row, shape[len(index) :])
            if name not in found:
                problems[name] = f"{name} {list(expected_shape)} is missing"
            elif tuple(found[name]) != expected_shape:
                problems[name] = f"{name} is {list(found[name])}, expected {list(expected_shape)}"
    return list(problems.values())
