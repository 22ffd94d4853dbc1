"""Parameters by name: the path of each leaf of a tree, the stack it lies in, and tables of expressions over paths."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeAlias

import jax
import jax.numpy as jnp
from flax import traverse_util

# A tree of arrays, shapes or specs as JAX has it: nested dicts, tuples, dataclasses. Python has no type for it.
PyTree: TypeAlias = Any
Flat: TypeAlias = dict[str, PyTree]  # parameters by their paths

# Parts of a stack with "blocks" of their own, where these have no experts and others of the stack have: its first
# layers, or all that are between those with experts.
FIRST, BETWEEN = "dense", "between"


def parameter_names(tree: PyTree) -> list[str]:
    """Returns the path of each leaf in tree order: ["decoder/blocks/mlp/down/kernel", …]."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def flat(params: PyTree) -> Flat:
    """Returns a nested dict as one dict of paths."""
    return traverse_util.flatten_dict(params, sep="/")


def nested(params: Flat) -> PyTree:
    """Returns the nested dict of a dict of paths, as `flat` was given it."""
    return traverse_util.unflatten_dict(params, sep="/")


def stack_of(path: str) -> Optional[str]:
    """Returns the stack of layers that a path leads into: "encoder/blocks" for "encoder/blocks/mlp/up/kernel", None for
    a path into none. A parameter of a stack is one array, whose first axis is that of the layers."""
    names = path.split("/")
    return "/".join(names[: names.index("blocks") + 1]) if "blocks" in names else None


def part_of(stack: str) -> tuple[str, str]:
    """Returns the side of a stack and the part of it: ("decoder", "dense") for "decoder/dense/blocks", ("decoder", "")
    for "decoder/blocks"."""
    found = re.fullmatch(rf"(?:(.*?)/)?(?:({FIRST}|{BETWEEN})/)?blocks", stack)
    assert found is not None
    return found[1] or "", found[2] or ""


def numbers_of_layers(tree: PyTree) -> dict[str, tuple[Sequence[int], int]]:
    """Returns, for each stack of `stack_of`, the numbers of its layers among those of its side, and how many that has:
    some layers of "decoder" may be a stack of their own, "decoder/dense/blocks" or "decoder/between/blocks"."""
    leaves = zip(parameter_names(tree), jax.tree.leaves(tree), strict=True)
    sizes = {stack: x.shape[0] for path, x in leaves if (stack := stack_of(path))}
    by_part = {part_of(stack): size for stack, size in sizes.items()}
    found = {}
    for stack in sizes:
        side, part = part_of(stack)
        own, first, between = (by_part.get((side, name), 0) for name in ("", FIRST, BETWEEN))
        total = own + first + between
        others, rest = divided(total, first, between // max(own, 1) + 1)
        found[stack] = (others if part else rest, total)
    return found


def divided(layers: int, first: int, every: int) -> tuple[Sequence[int], range]:
    """Returns the numbers of the layers that are apart, and of the others: every so many-th, after the `first`."""
    own = range(first + every - 1, layers, every)
    return [i for i in range(layers) if i not in own], own


def over_parts(tree: PyTree, found: Callable[[PyTree], jax.Array]) -> jax.Array:
    """Returns [L, …], layer by layer, of what `found` makes of the "blocks" of each part of a stack, [l, …]."""
    own = found(tree["blocks"])
    if FIRST in tree:
        return jnp.concatenate([found(tree[FIRST]["blocks"]), own])
    if BETWEEN in tree:
        # [n (k - 1), …] and [n, …] -> [n, k, …] -> [L, …]
        turns = [x.reshape(len(own), -1, *own.shape[1:]) for x in (found(tree[BETWEEN]["blocks"]), own)]
        return jnp.concatenate(turns, axis=1).reshape(-1, *own.shape[1:])
    return own


def is_stacked(path: str) -> bool:
    """Returns True if the first axis of a parameter is that of the layers of a stack."""
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
