"""Published weights into our tree of parameters and back, by a name table.

A family's table is a list of `Row`s, one a parameter.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pretrainax import models
from pretrainax.config import ModelConfig, UserError
from pretrainax.paths import parameter_names
from pretrainax.zoo.family import Row


def from_huggingface(table: Sequence[Row], state: Mapping[str, np.ndarray], config: ModelConfig) -> Any:
    """The parameters of `config` as float32 NumPy arrays, from a Hugging Face state dict.

    Raises:
      UserError: `state` lacks a tensor, or has it in another shape.
      ValueError: the table and the model do not have the same parameters.
    """
    shapes = models.abstract_params(config)
    rows = _rows(table, shapes)
    leaves = [_parameter(row, x.shape, state) for row, x in zip(rows, jax.tree.leaves(shapes), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def to_huggingface(table: Sequence[Row], params: Any, config: ModelConfig) -> dict[str, np.ndarray]:
    """The inverse of `from_huggingface`, without copies of tied tensors."""
    del config
    found: dict[str, tuple[Row, dict[int, np.ndarray]]] = {}  # theirs -> a row of it, and its parts
    for row, x in zip(_rows(table, params), jax.tree.leaves(params), strict=True):
        for name, index in _names(row, x.shape):
            one = _matrix(row, np.asarray(x) if index is None else np.asarray(x[index]))
            found.setdefault(name, (row, {}))[1][row.part[0] if row.part else 0] = one
    state = {}
    for name, (row, parts) in found.items():
        whole = np.concatenate([parts[i] for i in sorted(parts)], axis=-1)
        state[name] = np.ascontiguousarray(whole.T if row.transposed else whole)
    return state


def _matrix(row: Row, x: np.ndarray) -> np.ndarray:
    """Heads and their width as one axis: [D, H, K] -> [D, H · K], [H, K, D] -> [H · K, D], [H, K] -> [H · K]."""
    *_, map_name, kind = row.path.split("/")
    if kind == "bias":
        return x.reshape(-1)
    if kind != "kernel" or x.ndim < 3 or not re.search("attention", row.path):
        return x
    return x.reshape(-1, x.shape[-1]) if map_name == "out" else x.reshape(x.shape[0], -1)


def _rows(table: Sequence[Row], tree: Any) -> list[Row]:
    """The row of each leaf of the tree."""
    rows, names = {row.path: row for row in table}, parameter_names(tree)
    if rows.keys() != set(names):
        raise ValueError(f"the name table and the model differ in {sorted(rows.keys() ^ set(names))}")
    return [rows[name] for name in names]


def _names(row: Row, shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Their name of each layer, and its index in ours; (name, None) where layers are not stacked."""
    if "{layer}" not in row.name:
        yield row.name, None
        return
    for i in range(shape[0]):
        yield (row.first if i == 0 and row.first else row.name.format(layer=i)), i


def _parameter(row: Row, shape: tuple[int, ...], state: Mapping[str, np.ndarray]) -> np.ndarray:
    if "{layer}" not in row.name:
        return _tensor(row, row.name, shape, state)
    return np.stack([_tensor(row, name, shape[1:], state) for name, _ in _names(row, shape)])


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
