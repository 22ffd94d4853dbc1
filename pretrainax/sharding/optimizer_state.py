"""The sharding of an optimizer state: each array has the sharding of its parameter.

`optax.tree_utils.tree_map_params` maps arrays to parameters for any optimizer, because the paths in a state are
arbitrary. An array may have the shape of its parameter (moments), some of its axes (Adafactor's statistics), or two
merged axes (heads). An array of another shape, such as a factor [D, D] of Shampoo, is replicated unless it is a
`Placed`, which names its axes.
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
    """An array of a state with the names of its axes in AXIS_RULES: ("layers", "d_model", None)."""

    array: PyTree  # the array, or its shape or sharding
    axes: tuple[Optional[str], ...] = flax.struct.field(pytree_node=False)


def opt_state_specs(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Returns a PartitionSpec for each leaf of `optimizer.init(params)`; params: arrays or shapes.

    Arrays without a parameter, such as counters, and arrays of another shape are replicated.

    Raises:
      ValueError: as in `param_specs`.
    """
    return _map_state(optimizer, params, lambda _, spec: P() if spec is None else spec, P())


def replicated_bytes(optimizer: optax.GradientTransformation, params: PyTree) -> int:
    """Returns the bytes of state arrays that are replicated because their shape is not that of their parameter."""

    def size(array: jax.ShapeDtypeStruct, spec: Optional[P]) -> int:
        return array.size * array.dtype.itemsize if spec is None else 0

    return sum(jax.tree.leaves(_map_state(optimizer, params, size, 0)))


def _map_state(optimizer: optax.GradientTransformation, params: PyTree, function: Callable, others: object) -> PyTree:
    """Returns `function(array, spec or None)` for each array with a parameter, and `others` for other arrays."""
    init = functools.partial(jax.eval_shape, optimizer.init)  # Optax would run it, but the devices may be absent

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
    """Returns a NamedSharding for each leaf of `optimizer.init(params)`; raises like `opt_state_specs`."""
    return jax.tree.map(lambda spec: named_sharding(mesh, spec), opt_state_specs(optimizer, params))


def _spec_of(array: PyTree, param: PyTree, spec: P) -> Optional[P]:
    """Returns the PartitionSpec of one array of the state; None if its axes are not axes of its parameter.

    Args:
      spec: the spec of the parameter.
    """
    if array.shape == param.shape:
        return spec
    if array.size == 1:
        return P()  # a scalar per parameter, or the placeholder of an absent statistic
    sizes = tuple(size for size in array.shape if size > 1)  # a placeholder per layer is [L, 1]
    # If several axes have the same size, as in a square matrix, the first match wins. Layers come first, so they match.
    for shape, splits in _views(param.shape, tuple(spec)):
        for axes in itertools.combinations(range(len(shape)), len(sizes)):
            if tuple(shape[axis] for axis in axes) == sizes:
                matched = iter(axes)
                return P(*(splits[next(matched)] if size > 1 else None for size in array.shape))
    return None


def _views(shape: tuple[int, ...], splits: tuple) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Yields shapes of a parameter with the mesh axes of each axis: (L, D, H, K), and with merged axes, (L, D, H · K).

    Only an unsplit axis is merged, with the axis before it.
    """
    yield shape, splits
    for i in range(1, len(shape)):
        if splits[i] is None:
            yield (*shape[: i - 1], shape[i - 1] * shape[i], *shape[i + 1 :]), (*splits[:i], *splits[i + 1 :])
