"""Handles parameter paths such as "decoder/blocks/mlp/up/kernel": paths of leaves, stacks of layers, and path rules."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeAlias

import jax
import jax.numpy as jnp
from flax import traverse_util

# A JAX pytree of arrays, shapes or specs: nested dicts, tuples, dataclasses. Python has no type for pytrees.
PyTree: TypeAlias = Any
Flat: TypeAlias = dict[str, PyTree]  # path -> parameter

# In a model with experts, the layers without experts are in separate "blocks" below one of these names: the first
# layers ("dense"), or the layers between the layers with experts ("between").
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
    """Returns the stack of layers in a path: "encoder/blocks" for "encoder/blocks/mlp/up/kernel"; None: no stack.

    The layers of a stack are stored in one array per parameter, whose first axis is the layer.
    """
    names = path.split("/")
    return "/".join(names[: names.index("blocks") + 1]) if "blocks" in names else None


def part_of(stack: str) -> tuple[str, str]:
    """Returns the side and the part of a stack path.

    "decoder/dense/blocks" -> ("decoder", "dense"), and "decoder/blocks" -> ("decoder", "").
    """
    match = re.fullmatch(rf"(?:(.*?)/)?(?:({FIRST}|{BETWEEN})/)?blocks", stack)
    assert match is not None
    return match[1] or "", match[2] or ""


def layer_indices(tree: PyTree) -> dict[str, tuple[Sequence[int], int]]:
    """Returns {stack: (indices of the layers in the stack, number of layers of the side)}; stacks as in `stack_of`.

    A side, such as "decoder", may have two stacks: some of its layers may be in "decoder/dense/blocks" or
    "decoder/between/blocks" instead of "decoder/blocks".
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
    """Returns the indices of the layers without experts, which have a separate stack, and of the layers with experts.

    Args:
      layers: the number of layers.
      first: the first layers have no experts.
      every: after these, every `every`-th layer has experts.
    """
    rest = range(first + every - 1, layers, every)
    return [i for i in range(layers) if i not in rest], rest


def map_parts(tree: PyTree, found: Callable[[PyTree], jax.Array]) -> jax.Array:
    """Applies `found` to the "blocks" of each part of a side, and returns the results in layer order, [L, …].

    Args:
      tree: the subtree of a side, such as "decoder".
      found: returns an array [l, …] for the l layers of one part.
    """
    rest = found(tree["blocks"])
    if FIRST in tree:
        return jnp.concatenate([found(tree[FIRST]["blocks"]), rest])
    if BETWEEN in tree:
        # [n (k - 1), …] and [n, …] -> [n, k, …] -> [L, …]
        groups = [x.reshape(len(rest), -1, *rest.shape[1:]) for x in (found(tree[BETWEEN]["blocks"]), rest)]
        return jnp.concatenate(groups, axis=1).reshape(-1, *rest.shape[1:])
    return rest


def is_stacked(path: str) -> bool:
    """Returns True if the parameter at this path belongs to a stack, so that its first axis is the layer."""
    return stack_of(path) is not None


def match_rules(table: Sequence[tuple[str, Any]], tree: PyTree, table_name: str) -> PyTree:
    """Returns a tree like `tree` with the value of the first row whose expression matches the end of the leaf's path.

    An expression matches whole path components: "bias" matches "a/bias" and not "a/b_bias".

    Args:
      table: rows (regular expression, value); no value is None.
      table_name: the name of the table in the error message.

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
