"""Applies what is meant for one matrix to each matrix of a model, in whatever array it lies.

The layers of a stack are one array [L, …], experts one [L, E, …], and a projection of attention has an axis for its
heads, [D, H, K] or [H, K, D]. Papers and Optax mean by a matrix that of one layer and one expert, with all heads side
by side, [D, H · K].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from pretrainax.sharding.param_paths import PyTree, parameter_names, stack_of
from pretrainax.sharding.rules import axes_of_leaves

STACKED = ("layers", "experts")  # names of the axes that matrices lie along, outermost first
HEADS = ("num_heads", "num_kv_heads")  # names of an axis that head_dim comes after


def tree_of_names(tree: PyTree) -> PyTree:
    """Returns `tree` with the path of each leaf in its place."""
    return jax.tree.unflatten(jax.tree.structure(tree), parameter_names(tree))


def rms(stacked: int, x: jax.Array) -> jax.Array:
    """Returns the root mean square of each matrix of a parameter or update: [L, …] -> [L, 1, …], or […] -> [1, …].

    stacked: how many axes it is stacked along.
    """
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=tuple(range(stacked, x.ndim)), keepdims=True))


def scale_by_size(factor: Callable[[jax.Array, jax.Array], jax.Array]) -> optax.GradientTransformation:
    """Returns the transformation update × factor(RMS of the parameter, RMS of the update), of each matrix."""

    def scale(stacked: int, update: jax.Array, param: jax.Array) -> jax.Array:
        return update * factor(rms(stacked, param), rms(stacked, update))

    return optax.stateless(lambda updates, params: jax.tree.map(scale, stacked_axes(params), updates, params))


def stacked_axes(params: PyTree) -> PyTree:
    """Returns of each parameter how many axes it is stacked along."""
    counts = [sum(axis in STACKED for axis in axes) for axes in axes_of_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), counts)


def first_output(axes: tuple[str, ...]) -> int:
    """Returns the place of the first axis of a kernel's outputs, which are its last axis, or heads and their width."""
    return len(axes) - (2 if axes[-1] == "head_dim" else 1)


def on_each_matrix(
    transformation: optax.GradientTransformation, params_shape: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Returns `transformation`, which takes each leaf of a tree for a matrix, as it treats each matrix by itself.

    It is mapped over the layers of each stack and over experts, and sees heads side by side. So its state has an axis
    for the layers, also the counters in it.

    Raises:
      ValueError: a parameter that PARTITION_RULES does not cover.
    """
    names = parameter_names(params_shape)
    axes = dict(zip(names, axes_of_leaves(params_shape), strict=True))
    stacks = {name: (stack_of(name) or "", "experts" in axes[name]) for name in names}
    labels = jax.tree.map(lambda name: _label(*stacks[name]), tree_of_names(params_shape))
    mapped = _mapped(transformation)
    of_each = {
        _label(stack, of_experts): _mapped(mapped) if of_experts else mapped if stack else transformation
        for stack, of_experts in set(stacks.values())
    }
    each = optax.partition(of_each, labels)

    def flat(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda name, x: x.reshape(_flat_shape(x.shape, axes[name])), tree_of_names(tree), tree)

    def update(updates, state, params=None, **_):
        found, state = each.update(flat(updates), state, None if params is None else flat(params))
        return jax.tree.map(lambda new, old: new.reshape(old.shape), found, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: each.init(flat(params)), update)


def _label(stack: str, of_experts: bool) -> str:
    """Returns the name of a stack in the state: "encoder_blocks" for "encoder/blocks"."""
    return (stack.replace("/", "_") or "alone") + "_experts" * of_experts


def _mapped(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `transformation` over the first axis of all arrays."""

    def init(params):
        # Optax asks what a state is made of with a tree without arrays, over which nothing can be mapped.
        return jax.vmap(transformation.init)(params) if jax.tree.leaves(params) else transformation.init(params)

    return optax.GradientTransformation(init, jax.vmap(transformation.update))


def _flat_shape(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the shape with heads side by side: (L, D, H, K) -> (L, D, H · K)."""
    for i, (heads, dimension) in enumerate(zip(axes, axes[1:], strict=False)):
        if heads in HEADS and dimension == "head_dim":
            return (*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :])
    return shape
