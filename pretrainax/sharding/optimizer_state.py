"""Shards an optimizer state by giving each state array the sharding of the parameter that it belongs to.

Paths in an optimizer state are arbitrary, so `optax.tree_utils.tree_map_params` finds each array's parameter. An array
may have its parameter's shape (moments), some of the parameter's axes (Adafactor's statistics), or two of the
parameter's axes merged into one (heads). An array of any other shape, for example a Shampoo factor [D, D], is
replicated unless it is a `Placed`, which contains the names of its axes.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Optional

import flax.struct
import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pretrainax.sharding.axes import logical_spec
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import named_sharding, param_specs


@flax.struct.dataclass
class Placed:
    """An optimizer state array with its logical axes, which are keys of AXIS_RULES: ("layers", "d_model", None)."""

    array: PyTree  # the array, or its shape or sharding
    axes: tuple[Optional[str], ...] = flax.struct.field(pytree_node=False)


def opt_state_specs(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Returns a PartitionSpec for each leaf of the optimizer state.

    Arrays that belong to no parameter (counters) are replicated. Arrays whose axes do not match the axes of their
    parameter are also replicated.

    Args:
      params: arrays or shapes.

    Raises:
      ValueError: as in `param_specs`.
    """
    return _map_state(optimizer, params, lambda _, spec: P() if spec is None else spec, P())


def replicated_bytes(optimizer: optax.GradientTransformation, params: PyTree) -> int:
    """Returns the size in bytes of the state arrays that are replicated because they do not match their parameter."""

    def size(array: jax.ShapeDtypeStruct, spec: Optional[P]) -> int:
        return array.size * array.dtype.itemsize if spec is None else 0

    return sum(jax.tree.leaves(_map_state(optimizer, params, size, 0)))


def _map_state(optimizer: optax.GradientTransformation, params: PyTree, function: Callable, default: object) -> PyTree:
    """Applies a function to an optimizer state's arrays, without allocating them.

    Args:
      optimizer: the transformation whose state is mapped.
      params: the parameters, as arrays or shapes.
      function: maps (array, PartitionSpec or None) to the result, for arrays that belong to a parameter.
      default: the result for arrays that belong to no parameter.
    """
    init = functools.partial(jax.eval_shape, optimizer.init)  # Optax would run `init`, but the devices may be absent

    def map_array(array: PyTree, param: PyTree, spec: P) -> PyTree:
        if isinstance(array, optax.MaskedNode):  # no array for this parameter
            return array
        if isinstance(array, list):  # several arrays for this parameter
            return [map_array(x, param, spec) for x in array]
        if isinstance(array, Placed):
            return Placed(function(array.array, logical_spec(*array.axes)), array.axes)
        return function(array, _spec_of(array, param, spec))

    return optax.tree_utils.tree_map_params(
        init,
        map_array,
        init(params),
        params,
        param_specs(params),
        transform_non_params=lambda _: default,
        is_leaf=lambda x: isinstance(x, (optax.MaskedNode, list, Placed)),
    )


def opt_state_shardings(mesh: Mesh, optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Returns a NamedSharding for each leaf of the optimizer state.

    Args:
      params: arrays or shapes.

    Raises:
      ValueError: as in `param_specs`.
    """
    return jax.tree.map(lambda spec: named_sharding(mesh, spec), opt_state_specs(optimizer, params))


def _spec_of(array: PyTree, param: PyTree, spec: P) -> Optional[P]:
    """Returns the PartitionSpec of one state array, or None if its axes do not match the axes of its parameter.

    Args:
      array: the state array, or its shape.
      param, spec: the parameter to which the array belongs, and this parameter's PartitionSpec.
    """
    if array.shape == param.shape:
        return spec
    if array.size == 1:
        return P()  # a scalar per parameter, or the placeholder of an absent statistic
    sizes = tuple(size for size in array.shape if size > 1)  # the placeholder of a stack of layers is [L, 1]
    # If several axes have the same size, as in a square matrix, the first match wins. The layer axis comes first.
    for shape, splits in _views(param.shape, tuple(spec)):
        for axes in itertools.combinations(range(len(shape)), len(sizes)):
            if tuple(shape[axis] for axis in axes) == sizes:
                matched = iter(axes)
                return P(*(splits[next(matched)] if size > 1 else None for size in array.shape))
    return None


def _views(shape: tuple[int, ...], splits: tuple) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Yields a parameter's shape, (L, D, H, K), and the shapes with two adjacent axes merged: (L, D, H · K).

    Each shape comes with a tuple of the mesh axes that split its axes. Two axes are merged only if the mesh does not
    split the second of them.
    """
    yield shape, splits
    for i in range(1, len(shape)):
        if splits[i] is None:
            yield (*shape[: i - 1], shape[i - 1] * shape[i], *shape[i + 1 :]), (*splits[:i], *splits[i + 1 :])
