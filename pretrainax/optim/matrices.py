"""Applies what is meant for one matrix to each matrix of a model, in whatever array it lies.

The layers of a stack are one array [L, …], and a projection of attention has an axis for its heads, [D, H, K] or
[H, K, D]. Papers and Optax mean by a matrix that of one layer, with all heads side by side, [D, H · K].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from pretrainax.sharding.param_paths import PyTree, is_stacked, parameter_names, stack_of
from pretrainax.sharding.rules import axes_of_leaves

HEADS = ("num_heads", "num_kv_heads")  # names of an axis that head_dim comes after


def tree_of_names(tree: PyTree) -> PyTree:
    """Returns `tree` with the path of each leaf in its place."""
    return jax.tree.unflatten(jax.tree.structure(tree), parameter_names(tree))


def rms(name: str, x: jax.Array) -> jax.Array:
    """Returns the root mean square of the parameter or update of this path: [L, …] -> [L, 1, …], or […] -> [1, …]."""
    axes = tuple(range(1, x.ndim)) if is_stacked(name) else None
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))


def scale_by_size(factor: Callable[[jax.Array, jax.Array], jax.Array]) -> optax.GradientTransformation:
    """Returns the transformation update × factor(RMS of the parameter, RMS of the update), of each matrix."""

    def scale(name: str, update: jax.Array, param: jax.Array) -> jax.Array:
        return update * factor(rms(name, param), rms(name, update))

    return optax.stateless(lambda updates, params: jax.tree.map(scale, tree_of_names(params), updates, params))


def on_each_matrix(
    transformation: optax.GradientTransformation, params_shape: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Returns `transformation`, which takes each leaf of a tree for a matrix, as it treats each matrix by itself.

    It is mapped over the layers of each stack, and sees heads side by side. So its state has an axis for the layers,
    also the counters in it.

    Raises:
      ValueError: a parameter that PARTITION_RULES does not cover.
    """
    names = parameter_names(params_shape)
    axes = dict(zip(names, axes_of_leaves(params_shape), strict=True))
    stacks = {name: stack_of(name) or "" for name in names}
    labels = jax.tree.map(lambda name: _label(stacks[name]), tree_of_names(params_shape))
    each = optax.partition(
        {_label(stack): _mapped(transformation) if stack else transformation for stack in set(stacks.values())}, labels
    )

    def flat(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda name, x: x.reshape(_flat_shape(x.shape, axes[name])), tree_of_names(tree), tree)

    def update(updates, state, params=None, **_):
        found, state = each.update(flat(updates), state, None if params is None else flat(params))
        return jax.tree.map(lambda new, old: new.reshape(old.shape), found, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: each.init(flat(params)), update)


def _label(stack: str) -> str:
    """Returns the name of a stack in the state: "encoder_blocks" for "encoder/blocks"."""
    return stack.replace("/", "_") or "alone"


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
