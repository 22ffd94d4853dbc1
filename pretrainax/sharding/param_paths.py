"""Handles parameter paths ("decoder/blocks/mlp/up/kernel"): paths of leaves, stacks of layers, and path rules."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeAlias

import jax
import jax.numpy as jnp
from flax import traverse_util

# A JAX pytree of arrays, shapes or specs: nested dicts, tuples, dataclasses. Python has no type for pytrees.
PyTree: TypeAlias = Any
Flat: TypeAlias = dict[str, PyTree]  # path -> parameter

# In a model with experts, the layers without experts form a separate stack below one of these names: "dense" if they
# are the first layers, or "between" if they alternate with the layers that have experts.
FIRST, BETWEEN = "dense", "between"


def parameter_names(tree: PyTree) -> list[str]:
    """Returns the paths of a tree's leaves, in tree order: ["decoder/blocks/mlp/down/kernel", …]."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def flat(params: PyTree) -> Flat:
    """Flattens a nested dict to a dict {path: leaf}."""
    return traverse_util.flatten_dict(params, sep="/")


def nested(params: Flat) -> PyTree:
    """Converts a flat dict {path: leaf} to a nested dict, which is the inverse of `flat`."""
    return traverse_util.unflatten_dict(params, sep="/")


def stack_of(path: str) -> Optional[str]:
    """Returns the path of the stack that contains a parameter, or None if it is not part of a stack.

    The stack of "encoder/blocks/mlp/up/kernel" is "encoder/blocks". A stack stores each parameter of all its layers as
    one array, whose first axis is the layer.
    """
    names = path.split("/")
    return "/".join(names[: names.index("blocks") + 1]) if "blocks" in names else None


def split_stack_path(stack: str) -> tuple[str, str]:
    """Splits a stack's path into the path of its encoder or decoder and the name of its group of layers.

    "decoder/dense/blocks" -> ("decoder", "dense"), and "decoder/blocks" -> ("decoder", ""). The group name is
    "" for the main stack.
    """
    match = re.fullmatch(rf"(?:(.*?)/)?(?:({FIRST}|{BETWEEN})/)?blocks", stack)
    assert match is not None
    return match[1] or "", match[2] or ""


def layer_indices(tree: PyTree) -> dict[str, tuple[Sequence[int], int]]:
    """Maps each stack's path to its layer indices and the total number of layers in its encoder or decoder.

    The paths are as in `stack_of`. An encoder or decoder may have two stacks: in a model with experts, some layers may
    be in "decoder/dense/blocks" or "decoder/between/blocks" instead of "decoder/blocks".
    """
    leaves = zip(parameter_names(tree), jax.tree.leaves(tree), strict=True)
    sizes = {stack: x.shape[0] for path, x in leaves if (stack := stack_of(path))}
    size_of = {split_stack_path(stack): size for stack, size in sizes.items()}
    indices = {}
    for stack in sizes:
        prefix, group = split_stack_path(stack)
        main, first, between = (size_of.get((prefix, name), 0) for name in ("", FIRST, BETWEEN))
        total = main + first + between
        separate, with_experts = split_layers(total, first, between // max(main, 1) + 1)
        indices[stack] = (separate if group else with_experts, total)
    return indices


def split_layers(layers: int, first: int, every: int) -> tuple[Sequence[int], range]:
    """Returns the indices of the layers without experts, which form a separate stack, and of the layers with experts.

    Args:
      layers: the total number of layers.
      first: the number of layers without experts at the beginning.
      every: after these, every `every`-th layer has experts.
    """
    with_experts = range(first + every - 1, layers, every)
    return [i for i in range(layers) if i not in with_experts], with_experts


def map_stacks(tree: PyTree, found: Callable[[PyTree], jax.Array]) -> jax.Array:
    """Applies a function to each stack in an encoder or decoder; returns the results in layer order, [L, …].

    Args:
      tree: the subtree of the encoder or decoder.
      found: maps the "blocks" of one stack with l layers to an array [l, …].
    """
    main = found(tree["blocks"])
    if FIRST in tree:
        return jnp.concatenate([found(tree[FIRST]["blocks"]), main])
    if BETWEEN in tree:
        # [n (k - 1), …] and [n, …] -> [n, k, …] -> [L, …]
        groups = [x.reshape(len(main), -1, *main.shape[1:]) for x in (found(tree[BETWEEN]["blocks"]), main)]
        return jnp.concatenate(groups, axis=1).reshape(-1, *main.shape[1:])
    return main


def is_stacked(path: str) -> bool:
    """Returns True if the parameter at `path` belongs to a stack, so that its first axis is the layer axis."""
    return stack_of(path) is not None


def match_rules(table: Sequence[tuple[str, Any]], tree: PyTree, table_name: str) -> PyTree:
    """Maps each leaf of `tree` to the value of the first table row whose regex matches the end of its path.

    An expression matches whole path components: "bias" matches "a/bias", but not "a/b_bias".

    Args:
      table: rows (regular expression, value), in which no value is None.
      tree: a pytree of arrays, shapes or specs.
      table_name: the name of the table in the error message.

    Raises:
      ValueError: a leaf matches no row; the message lists the paths of all leaves without a match.
    """
    rows = [(re.compile(rf"(?:^|/)(?:{pattern})$"), value) for pattern, value in table]
    names = parameter_names(tree)
    values = [next((value for pattern, value in rows if pattern.search(name)), None) for name in names]
    unmatched = [name for name, value in zip(names, values, strict=True) if value is None]
    if unmatched:
        raise ValueError(f"no row of {table_name} matches {', '.join(unmatched)}")
    return jax.tree.unflatten(jax.tree.structure(tree), values)
