"""Parameters by name: the path of each leaf of a tree, and tables of regular expressions over those paths."""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

# A tree of arrays, shapes or specs as JAX has it: nested dicts, tuples, dataclasses. Python has no type for it.
PyTree: TypeAlias = Any


def parameter_names(tree: PyTree) -> list[str]:
    """The path of each leaf in tree order: ["decoder/blocks/mlp/down/kernel", …]."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def match_rules(table: Sequence[tuple[str, Any]], tree: PyTree, table_name: str) -> PyTree:
    """`tree` with each leaf replaced by the value of the first row whose expression matches the end of its path.

    An expression matches whole components: "bias" matches "a/bias" and not "a/b_bias". Moments of an optimizer end in
    the path of their parameter, so that they find its row.

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
