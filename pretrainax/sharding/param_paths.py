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


def parts_of_stack(tree: PyTree) -> list[PyTree]:
    """Returns the parts of what is of a stack that have "blocks": the first layers', where they are apart, the rest."""
    return [tree["dense"], tree] if "dense" in tree else [tree]


def numbers_of_layers(tree: PyTree) -> dict[str, tuple[range, int]]:
    """Returns, for each stack of `stack_of`, the numbers of its layers among those of its side, and how many that has:
    the first layers of "decoder" may be a stack of their own, "decoder/dense/blocks", before "decoder/blocks"."""
    leaves = zip(parameter_names(tree), jax.tree.leaves(tree), strict=True)
    sizes = {stack: x.shape[0] for path, x in leaves if (stack := stack_of(path))}
    found = {}
    for stack in sizes:
        side = stack.removesuffix("/blocks").removesuffix("/dense")
        first, rest = sizes.get(f"{side}/dense/blocks", 0), sizes.get(f"{side}/blocks", 0)
        is_first = stack == f"{side}/dense/blocks"
        found[stack] = (range(first) if is_first else range(first, first + rest), first + rest)
    return found


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
