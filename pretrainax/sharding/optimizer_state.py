"""Shards an optimizer state: each array of the state has the sharding of the parameter to which it belongs.

Paths in an optimizer state are arbitrary, so `optax.tree_utils.tree_map_params` finds the parameter of each array. An
array may have the shape of its parameter (moments), some of the parameter's axes (Adafactor's statistics), or two axes
of the parameter merged into one (heads). An array of a different shape, such as a factor [D, D] of Shampoo, is
replicated, unless it is a `Placed`, which contains the names of its axes.
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
    """An array of an optimizer state with its logical axes (keys of AXIS_RULES): ("layers", "d_model", None)."""

    array: PyTree  # the array, or its shape or sharding
    axes: tuple[Optional[str], ...] = flax.struct.field(pytree_node=False)


def opt_state_specs(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Returns a PartitionSpec for each leaf of the optimizer state.

    Arrays without a parameter, such as counters, are replicated, and so are arrays whose axes are not axes of their
    parameter.

    Args:
      params: arrays or shapes.

    Raises:
      ValueError: as in `param_specs`.
    """
    return _map_state(optimizer, params, lambda _, spec: P() if spec is None else spec, P())


def replicated_bytes(optimizer: optax.GradientTransformation, params: PyTree) -> int:
    """Returns the bytes of the state arrays that are replicated because their axes are not axes of their parameter."""

    def size(array: jax.ShapeDtypeStruct, spec: Optional[P]) -> int:
        return array.size * array.dtype.itemsize if spec is None else 0

    return sum(jax.tree.leaves(_map_state(optimizer, params, size, 0)))


def _map_state(optimizer: optax.GradientTransformation, params: PyTree, function: Callable, others: object) -> PyTree:
    """Maps the arrays of an optimizer state, without allocating them.

    Args:
      function: (array, PartitionSpec or None) -> result, for arrays that belong to a parameter.
      others: the result for arrays that belong to no parameter.
    """
    init = functools.partial(jax.eval_shape, optimizer.init)  # Optax would run `init`, but the devices may be absent

    def each(array: PyTree, param: PyTree, spec: P) -> PyTree:
        if isinstance(array, optax.MaskedNode):  # no array for this parameter
            return array
        if isinstance(array, list):  # several arrays for this parameter
            return [each(x, param, spec) for x in array]
        if isinstance(array, Placed):
            return Placed(function(array.array, logical_spec(*array.axes)), array.axes)
        return function(array, _spec_of(array, param, spec))

    return optax.tree_utils.tree_map_params(
        init,
        each,
        init(params),
        params,
        param_specs(params),
        transform_non_params=lambda _: others,
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
    """Returns the PartitionSpec of one array of the state; None if its axes are not axes of its parameter.

    Args:
      param, spec: the parameter of the array, and the PartitionSpec of this parameter.
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
    """Yields the shape of a parameter, (L, D, H, K), and shapes with two merged axes, such as (L, D, H · K).

    Each shape comes with the mesh axes that split each of its axes. Only an axis that is not split is merged, with the
    axis before it.
    """
    yield shape, splits
    for i in range(1, len(shape)):
        if splits[i] is None:
            yield (*shape[: i - 1], shape[i - 1] * shape[i], *shape[i + 1 :]), (*splits[:i], *splits[i + 1 :])
