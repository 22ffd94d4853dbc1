"""Published weights into our tree of parameters, by a name table.

A family's table is a list of `Row`s, one a parameter. It says everything that the way back needs too.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import jax
import numpy as np

from pretrainax import models
from pretrainax.config import ModelConfig, UserError
from pretrainax.paths import parameter_names


class Row(NamedTuple):
    """Where one of our parameters is in a Hugging Face state dict."""

    path: str  # ours
    name: str  # theirs; "{layer}" where ours stacks all layers on its first axis
    transposed: bool = False  # theirs is torch.nn.Linear's [out, in]; ours is [in, out], each perhaps cut into heads
    part: Optional[tuple[int, int]] = None  # ours is part i of n of their last axis (GPT-2's query | key | value)


def linear(path: str, name: str, bias: bool) -> list[Row]:
    """The rows of a linear map that theirs is a torch.nn.Linear of."""
    rows = [Row(f"{path}/kernel", f"{name}.weight", transposed=True)]
    return rows + [Row(f"{path}/bias", f"{name}.bias")] if bias else rows


def layer_norm(path: str, name: str) -> list[Row]:
    return [Row(f"{path}/scale", f"{name}.weight"), Row(f"{path}/bias", f"{name}.bias")]


def from_huggingface(table: Sequence[Row], state: Mapping[str, np.ndarray], config: ModelConfig) -> Any:
    """The parameters of `config` as float32 NumPy arrays, from a Hugging Face state dict.

    Raises:
      UserError: `state` lacks a tensor, or has it in another shape.
      ValueError: the table and the model do not have the same parameters.
    """
    shapes = models.abstract_params(config)
    rows = {row.path: row for row in table}
    names = parameter_names(shapes)
    if rows.keys() != set(names):
        raise ValueError(f"the name table and the model differ in {sorted(rows.keys() ^ set(names))}")
    leaves = [_parameter(rows[name], x.shape, state) for name, x in zip(names, jax.tree.leaves(shapes), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _parameter(row: Row, shape: tuple[int, ...], state: Mapping[str, np.ndarray]) -> np.ndarray:
    if "{layer}" not in row.name:
        return _tensor(row, row.name, shape, state)
    return np.stack([_tensor(row, row.name.format(layer=i), shape[1:], state) for i in range(shape[0])])


def _tensor(row: Row, name: str, shape: tuple[int, ...], state: Mapping[str, np.ndarray]) -> np.ndarray:
    if name not in state:
        raise UserError(f"the checkpoint has no tensor {name!r}, which {row.path} comes from")
    theirs = np.asarray(state[name], np.float32)
    x = theirs.T if row.transposed else theirs
    if row.part is not None:
        i, n = row.part
        x = np.split(x, n, axis=-1)[i]
    if x.size != np.prod(shape):
        raise UserError(
            f"{name!r} has shape {theirs.shape}, which does not fit {row.path} {shape}: not this config.model"
        )
    return x.reshape(shape)
