"""Lists the tunable matrices of a model's blocks, and defines how added parameters are sharded."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax

from pretrainax import models  # noqa: F401  its modules add rules to PARTITION_RULES
from pretrainax.adapt.patterns import match_patterns
from pretrainax.config import UserError, nearest
from pretrainax.sharding.param_paths import PyTree, is_stacked, parameter_names
from pretrainax.sharding.rules import PARTITION_RULES, add_partition_rules, axes_of_leaves

_KERNEL, _ROUTER = "/kernel", "/router/"


class Matrix(NamedTuple):
    """The kernels of one linear layer in all L layers of a stack, [L, inputs…, outputs…]."""

    path: str  # path of the linear layer: "encoder/blocks/self_attention/query"
    layers: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Returns the largest rank that the matrix of one layer can have: the smaller of its input and output sizes."""
        return min(self.size)

    @property
    def size(self) -> tuple[int, int]:
        """Returns the numbers of inputs and outputs of one layer."""
        return math.prod(self.inputs), math.prod(self.outputs)


def matrices_of(params: PyTree) -> list[Matrix]:
    """Lists the matrices of the linear layers in a model's blocks; `params` are the model's parameters or their shapes.

    Experts and routers of a mixture of experts are excluded: no `Linear` computes them, so an update would change the
    merged model but not the model in training.
    """
    matrices = []
    for name, x, axes in zip(parameter_names(params), jax.tree.leaves(params), axes_of_leaves(params), strict=True):
        if is_stacked(name) and name.endswith(_KERNEL) and "experts" not in axes and _ROUTER not in name:
            split = 1 + _num_input_axes(axes[1:])
            matrices.append(Matrix(name.removesuffix(_KERNEL), x.shape[0], x.shape[1:split], x.shape[split:]))
    return matrices


def matching(matrices: Sequence[Matrix], patterns: Iterable[str]) -> list[Matrix]:
    """Returns the matrices whose path ends with a match for one of the patterns.

    A match covers whole path components. Example patterns: "query", "mlp/(up|down)".

    Raises:
      UserError: a pattern is not a valid regular expression, or matching it takes too long.
    """
    patterns, paths = tuple(patterns), tuple(matrix.path for matrix in matrices)
    try:
        matches = _search(patterns, paths)
    except (UserError, ValueError) as e:
        raise UserError(f"config.tuning.targets is {patterns}, which {e}") from e
    return [matrix for matrix, *is_match in zip(matrices, *matches, strict=True) if any(is_match)]


def _search(patterns: tuple[str, ...], paths: tuple[str, ...]) -> list[list[bool]]:
    """Returns one list per pattern, with a bool per path: True if the pattern matches the end of the path."""
    return match_patterns(tuple(rf"(?:^|/)(?:{pattern})$" for pattern in patterns), paths)


def pattern_problem(pattern: str, matrices: Sequence[Matrix]) -> str:
    """Explains why a pattern matches no matrix and suggests similar names; returns "" if it matches a matrix."""
    try:
        if any(_search((pattern,), tuple(matrix.path for matrix in matrices))[0]):
            return ""
    except (UserError, ValueError) as e:
        return f"which {e}"
    names = dict.fromkeys(matrix.path.rpartition("/")[2] for matrix in matrices)
    if "/" in pattern:
        names = dict.fromkeys(matrix.path for matrix in matrices)
    return f"but no matrix of the model's blocks matches it, {nearest(pattern, names)}"


def _num_input_axes(axes: Sequence[str]) -> int:
    """Returns the number of input axes of a kernel, given its axis names without the layer axis."""
    return 2 if axes[0] in ("num_heads", "num_kv_heads") else 1


def _partition_rules() -> Iterable[tuple[str, str]]:
    """Yields partition rules for the added parameters; each axis is sharded like the same axis of the matrix."""
    for pattern, names in PARTITION_RULES:
        if pattern.startswith("blocks/") and pattern.endswith(_KERNEL) and "layers experts" not in names:
            layers, *axes = names.split()
            split, path = _num_input_axes(axes), pattern.removesuffix("kernel")
            inputs, outputs = " ".join(axes[:split]), " ".join(axes[split:])
            yield f"{path}lora_a", f"{layers} {inputs} rank"
            yield f"{path}lora_b", f"{layers} rank {outputs}"
            yield f"{path}magnitude", f"{layers} {outputs}"
            yield f"{path}ia3", f"{layers} {inputs if path.endswith('down/') else outputs}"
            yield f"{path}prefix", f"{layers} rows {outputs}"


def add_tuning_rules() -> None:
    """Adds the partition rules of the added parameters, also for matrices that other packages have registered since."""
    add_partition_rules([row for row in _partition_rules() if row not in PARTITION_RULES])


add_tuning_rules()
