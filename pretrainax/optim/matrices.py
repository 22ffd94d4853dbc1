"""Applies a transformation of one matrix to each matrix of a model.

The layers of a stack are one array [L, …], experts are one array [L, E, …], and attention projections have an axis for
heads, [D, H, K] or [H, K, D]. In papers and in Optax, a matrix is that of one layer and one expert, with all heads in
one axis, [D, H · K].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from pretrainax.sharding.param_paths import PyTree, parameter_names, stack_of
from pretrainax.sharding.rules import axes_of_leaves

STACKED = ("layers", "experts")  # names of the axes that stack matrices, outermost first
HEADS = ("num_heads", "num_kv_heads")  # names of the axes that precede head_dim


def tree_of_names(tree: PyTree) -> PyTree:
    """Returns a tree of the paths of the leaves of `tree`."""
    return jax.tree.unflatten(jax.tree.structure(tree), parameter_names(tree))


def rms(stacked: int, x: jax.Array) -> jax.Array:
    """Returns the root mean square of each matrix of a parameter or update: [L, …] -> [L, 1, …], or […] -> [1, …].

    Args:
      stacked: number of axes that stack matrices.
    """
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=tuple(range(stacked, x.ndim)), keepdims=True))


def scale_by_rms_ratio(factor: Callable[[jax.Array, jax.Array], jax.Array]) -> optax.GradientTransformation:
    """Returns the transformation update × factor(RMS of the parameter, RMS of the update), per matrix."""

    def scale(stacked: int, update: jax.Array, param: jax.Array) -> jax.Array:
        return update * factor(rms(stacked, param), rms(stacked, update))

    return optax.stateless(lambda updates, params: jax.tree.map(scale, stacked_axes(params), updates, params))


def stacked_axes(params: PyTree) -> PyTree:
    """Returns the number of axes that stack matrices, for each parameter."""
    counts = [sum(axis in STACKED for axis in axes) for axes in axes_of_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), counts)


def first_output(axes: tuple[str, ...]) -> int:
    """Returns the index of the first output axis of a kernel: the last axis, or the last two if they are heads."""
    return len(axes) - (2 if axes[-1] == "head_dim" else 1)


def map_matrices(
    transformation: optax.GradientTransformation, params_shape: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Returns `transformation`, which treats each leaf as one matrix, applied to each matrix of the model separately.

    The result maps it over layers and experts, and merges heads into one axis. All arrays of its state, including
    counters, have an axis for layers.

    Raises:
      ValueError: PARTITION_RULES has no row for a parameter.
    """
    names = parameter_names(params_shape)
    axes = dict(zip(names, axes_of_leaves(params_shape), strict=True))
    stacks = {name: (stack_of(name) or "", "experts" in axes[name]) for name in names}
    labels = jax.tree.map(lambda name: _label(*stacks[name]), tree_of_names(params_shape))
    mapped = _mapped(transformation)
    by_label = {
        _label(stack, has_experts): _mapped(mapped) if has_experts else mapped if stack else transformation
        for stack, has_experts in set(stacks.values())
    }
    each = optax.partition(by_label, labels)

    def flat(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda name, x: x.reshape(_flat_shape(x.shape, axes[name])), tree_of_names(tree), tree)

    def update(updates, state, params=None, **_):
        flat_updates, state = each.update(flat(updates), state, None if params is None else flat(params))
        return jax.tree.map(lambda new, old: new.reshape(old.shape), flat_updates, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: each.init(flat(params)), update)


def _label(stack: str, has_experts: bool) -> str:
    """Returns the key of a stack in the state: "encoder_blocks" for "encoder/blocks"."""
    return (stack.replace("/", "_") or "alone") + "_experts" * has_experts


def _mapped(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `transformation` mapped over the first axis of all arrays."""

    def init(params):
        # Optax inspects the structure of a state with a tree without arrays, which vmap does not accept.
        return jax.vmap(transformation.init)(params) if jax.tree.leaves(params) else transformation.init(params)

    return optax.GradientTransformation(init, jax.vmap(transformation.update))


def _flat_shape(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the shape with heads merged into one axis: (L, D, H, K) -> (L, D, H · K)."""
    for i, (heads, dimension) in enumerate(zip(axes, axes[1:], strict=False)):
        if heads in HEADS and dimension == "head_dim":
            return (*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :])
    return shape
