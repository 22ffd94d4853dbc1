"""Parameters by name: the path of each leaf of a tree, the stack it lies in, and tables of expressions over paths."""

import re
from collections.abc import Sequence
from typing import Any, Optional, TypeAlias

import jax

# A tree of arrays, shapes or specs as JAX has it: nested dicts, tuples, dataclasses. Python has no type for it.
PyTree: TypeAlias = Any


def parameter_names(tree: PyTree) -> list[str]:
    """Returns the path of each leaf in tree order: ["decoder/blocks/mlp/down/kernel", …]."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def stack_of(path: str) -> Optional[str]:
    """Returns the stack of layers that a path leads into: "encoder/blocks" for "encoder/blocks/mlp/up/kernel", None for
    a path into none. A parameter of a stack is one array, whose first axis is that of the layers."""
    names = path.split("/")
    return "/".join(names[: names.index("blocks") + 1]) if "blocks" in names else None


def is_stacked(path: str) -> bool:
    """Returns whether the first axis of a parameter is that of the layers of a stack."""
    return stack_of(path) is not None


def match_rules(table: Sequence[tuple[str, Any]], tree: PyTree, table_name: str) -> PyTree:
    """Returns `tree` with the value of the first row whose expression matches the end of a leaf's path for each leaf.

    An expression matches whole components: "bias" matches "a/bias" and not "a/b_bias".

    Raises:
      ValueError: a leaf matches no row; names all such leaves.
    """
    rows = [(re.compile(rf"(?:^|/)(?:{pattern})$"), value) for pattern, value in table]
    names = parameter_names(tree)
    found = [next((value for pattern, value in rows if pattern.search(name)), None) for name in names]
    missing = [name for name, value in zip(names, found, strict=True) if value is None]
    if missing:
        raise ValueError(f"no row of {table_name} matches {', '.join(missing)}")
    return jax.tree.unflatten(jax.tree.structure(tree), found)
