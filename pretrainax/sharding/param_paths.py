"""Paths of parameters: the path of each leaf, its stack of layers, and tables of regular expressions over paths."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeAlias

import jax
import jax.numpy as jnp
from flax import traverse_util

# A JAX pytree of arrays, shapes or specs: nested dicts, tuples, dataclasses. Python has no type for it.
PyTree: TypeAlias = Any
Flat: TypeAlias = dict[str, PyTree]  # path -> parameter

# Parts of a stack that hold the layers without experts in separate "blocks": the first layers, or the layers between
# those with experts.
FIRST, BETWEEN = "dense", "between"


def parameter_names(tree: PyTree) -> list[str]:
    """Returns the path of each leaf in tree order: ["decoder/blocks/mlp/down/kernel", …]."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def flat(params: PyTree) -> Flat:
    """Returns a nested dict as a flat dict {path: leaf}."""
    return traverse_util.flatten_dict(params, sep="/")


def nested(params: Flat) -> PyTree:
    """Returns the nested dict of a flat dict, the inverse of `flat`."""
    return traverse_util.unflatten_dict(params, sep="/")


def stack_of(path: str) -> Optional[str]:
    """Returns the stack of a path, "encoder/blocks" for "encoder/blocks/mlp/up/kernel"; None outside of stacks.

    A parameter of a stack is one array, whose first axis is the layers.
    """
    names = path.split("/")
    return "/".join(names[: names.index("blocks") + 1]) if "blocks" in names else None


def part_of(stack: str) -> tuple[str, str]:
    """Returns (side, part) of a stack: ("decoder", "dense") for "decoder/dense/blocks", ("decoder", "") for
    "decoder/blocks"."""
    match = re.fullmatch(rf"(?:(.*?)/)?(?:({FIRST}|{BETWEEN})/)?blocks", stack)
    assert match is not None
    return match[1] or "", match[2] or ""


def layer_indices(tree: PyTree) -> dict[str, tuple[Sequence[int], int]]:
    """Returns {stack: (layer indices, number of layers of its side)} for each stack of `stack_of`.

    A side may have several stacks: some layers of "decoder" may be in "decoder/dense/blocks" or
    "decoder/between/blocks".
    """
    leaves = zip(parameter_names(tree), jax.tree.leaves(tree), strict=True)
    sizes = {stack: x.shape[0] for path, x in leaves if (stack := stack_of(path))}
    by_part = {part_of(stack): size for stack, size in sizes.items()}
    numbers = {}
    for stack in sizes:
        side, part = part_of(stack)
        main, first, between = (by_part.get((side, name), 0) for name in ("", FIRST, BETWEEN))
        total = main + first + between
        separate, rest = split_layers(total, first, between // max(main, 1) + 1)
        numbers[stack] = (separate if part else rest, total)
    return numbers


def split_layers(layers: int, first: int, every: int) -> tuple[Sequence[int], range]:
    """Returns the indices of the layers in a separate part, and of the rest: every `every`-th layer after `first`."""
    rest = range(first + every - 1, layers, every)
    return [i for i in range(layers) if i not in rest], rest


def map_parts(tree: PyTree, found: Callable[[PyTree], jax.Array]) -> jax.Array:
    """Returns the results [l, …] of `found` for the "blocks" of each part of a stack, in layer order, [L, …]."""
    rest = found(tree["blocks"])
    if FIRST in tree:
        return jnp.concatenate([found(tree[FIRST]["blocks"]), rest])
    if BETWEEN in tree:
        # [n (k - 1), …] and [n, …] -> [n, k, …] -> [L, …]
        groups = [x.reshape(len(rest), -1, *rest.shape[1:]) for x in (found(tree[BETWEEN]["blocks"]), rest)]
        return jnp.concatenate(groups, axis=1).reshape(-1, *rest.shape[1:])
    return rest


def is_stacked(path: str) -> bool:
    """Returns True if the first axis of a parameter is the layers of a stack."""
    return stack_of(path) is not None


def match_rules(table: Sequence[tuple[str, Any]], tree: PyTree, table_name: str) -> PyTree:
    """Returns a tree with a value for each leaf, from the first row whose expression matches the end of its path.

    An expression matches whole components: "bias" matches "a/bias" and not "a/b_bias".

    Raises:
      ValueError: a leaf matches no row; the message lists all such leaves.
    """
    rows = [(re.compile(rf"(?:^|/)(?:{pattern})$"), value) for pattern, value in table]
    names = parameter_names(tree)
    values = [next((value for pattern, value in rows if pattern.search(name)), None) for name in names]
    missing = [name for name, value in zip(names, values, strict=True) if value is None]
    if missing:
        raise ValueError(f"no row of {table_name} matches {', '.join(missing)}")
    return jax.tree.unflatten(jax.tree.structure(tree), values)
