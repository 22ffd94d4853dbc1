"""Applies Optax transformations, which treat each array as one matrix, to the individual matrices of a model.

In this package, a stack of layers stores each parameter as one array [L, …], or [L, E, …] for experts, and attention
projections have a separate axis for heads, [D, H, K] or [H, K, D]. In papers and in Optax, a matrix belongs to one
layer and one expert, and has all heads in one axis, [D, H · K].
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
    """Replaces each leaf of `tree` by its path."""
    return jax.tree.unflatten(jax.tree.structure(tree), parameter_names(tree))


def rms(stacked: int, x: jax.Array) -> jax.Array:
    """Computes the root mean square (RMS) of each matrix in a parameter or update: [L, …] -> [L, 1, …].

    Args:
      stacked: the number of leading axes that stack matrices. If 0, `x` is a single matrix, […] -> [1, …].
    """
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=tuple(range(stacked, x.ndim)), keepdims=True))


def scale_by_rms_ratio(factor: Callable[[jax.Array, jax.Array], jax.Array]) -> optax.GradientTransformation:
    """Builds a transformation that multiplies the update of each matrix by a factor.

    Args:
      factor: computes the factor from the RMS of the matrix and the RMS of its update.
    """

    def scale(stacked: int, update: jax.Array, param: jax.Array) -> jax.Array:
        return update * factor(rms(stacked, param), rms(stacked, update))

    return optax.stateless(lambda updates, params: jax.tree.map(scale, stacked_axes(params), updates, params))


def stacked_axes(params: PyTree) -> PyTree:
    """Counts each parameter's leading axes that stack matrices, i.e. the layer and expert axes."""
    counts = [sum(axis in STACKED for axis in axes) for axes in axes_of_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), counts)


def first_output(axes: tuple[str, ...]) -> int:
    """Returns the index of the first output axis of a kernel with the given logical axes.

    The last axis is the output axis, or the last two axes are, for the heads of attention and the gates of an LSTM.
    """
    return len(axes) - (2 if axes[-1] == "head_dim" or "gates" in axes[-2:-1] else 1)


def map_matrices(
    transformation: optax.GradientTransformation, params_shape: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Builds a transformation that applies `transformation` separately to each matrix of the model.

    The result maps `transformation` over layers and experts, and merges the axes num_heads and head_dim into one. A
    stack's state arrays, including counters, all have a layer axis.

    Args:
      transformation: the transformation, which treats each array as one matrix.
      params_shape: the parameters, as arrays or shapes.

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
    partitioned = optax.partition(by_label, labels)

    def merge_heads(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda name, x: x.reshape(_merged_shape(x.shape, axes[name])), tree_of_names(tree), tree)

    def update(updates, state, params=None, **_):
        merged_updates, state = partitioned.update(
            merge_heads(updates), state, None if params is None else merge_heads(params)
        )
        return jax.tree.map(lambda new, old: new.reshape(old.shape), merged_updates, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: partitioned.init(merge_heads(params)), update)


def _label(stack: str, has_experts: bool) -> str:
    """Returns a parameter group's key in the optimizer state.

    For the stack "encoder/blocks", the key is "encoder_blocks", or "encoder_blocks_experts" for its experts. For
    parameters outside of stacks (stack ""), the key is "alone".
    """
    return (stack.replace("/", "_") or "alone") + "_experts" * has_experts


def _mapped(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Maps a transformation over the first axis of all arrays, as `jax.vmap` does for a function."""

    def init(params):
        # Optax calls `init` with a tree without arrays to inspect the structure of a state; vmap does not accept it.
        return jax.vmap(transformation.init)(params) if jax.tree.leaves(params) else transformation.init(params)

    return optax.GradientTransformation(init, jax.vmap(transformation.update))


def _merged_shape(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    """Merges the axes num_heads and head_dim in a parameter's shape: (L, D, H, K) -> (L, D, H · K)."""
    for i, (heads, dimension) in enumerate(zip(axes, axes[1:], strict=False)):
        if heads in HEADS and dimension == "head_dim":
            return (*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :])
    return shape
