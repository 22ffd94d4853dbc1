"""The sharding of an optimizer's state: each array of it lies like the parameter that it belongs to.

Optax says which those are, whatever the optimizer (`tree_map_params`): moments, which have their parameter's shape, and
statistics of a part of its axes, as Adafactor's, or of two axes in one, as heads side by side. Paths would not do: a
state names its arrays as it likes. An array of another shape, as a factor [D, D] of Shampoo, is replicated, unless it
is a `Placed`, which names its axes.
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
    """An array of a state that names its axes, as AXIS_RULES has them: ("layers", "d_model", None)."""

    array: PyTree  # or its shape or sharding
    axes: tuple[Optional[str], ...] = flax.struct.field(pytree_node=False)


def opt_state_specs(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Returns a PartitionSpec for each leaf of `optimizer.init(params)`; params: arrays or shapes.

    What belongs to no parameter, as a counter, is copied to every device, and so is what has another shape.

    Raises:
      ValueError: as `param_specs`.
    """
    return _of_state(optimizer, params, lambda _, spec: P() if spec is None else spec, P())


def replicated_bytes(optimizer: optax.GradientTransformation, params: PyTree) -> int:
    """Counts the bytes of arrays of the state that are replicated because they have another shape than their
    parameter."""

    def size(array: jax.ShapeDtypeStruct, spec: Optional[P]) -> int:
        return array.size * array.dtype.itemsize if spec is None else 0

    return sum(jax.tree.leaves(_of_state(optimizer, params, size, 0)))


def _of_state(optimizer: optax.GradientTransformation, params: PyTree, of: Callable, others: object) -> PyTree:
    """Returns `of(array, its spec or None)` of each array that belongs to a parameter, else `others`."""
    init = functools.partial(jax.eval_shape, optimizer.init)  # Optax would run it, and the devices may be absent ones

    def each(array: PyTree, param: PyTree, spec: P) -> PyTree:
        if isinstance(array, optax.MaskedNode):  # there is none for this parameter
            return array
        if isinstance(array, list):  # several for this parameter
            return [each(x, param, spec) for x in array]
        if isinstance(array, Placed):
            return Placed(of(array.array, logical_spec(*array.axes)), array.axes)
        return of(array, _spec_of(array, param, spec))

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
    """Returns a NamedSharding for each leaf of `optimizer.init(params)`; raises as `opt_state_specs`."""
    return jax.tree.map(lambda spec: named_sharding(mesh, spec), opt_state_specs(optimizer, params))


def _spec_of(array: PyTree, param: PyTree, spec: P) -> Optional[P]:
    """Returns the PartitionSpec of one array of the state; None where its axes are not some of its parameter's.

    spec: of the parameter.
    """
    if array.shape == param.shape:
        return spec
    if array.size == 1:
        return P()  # a scalar of each parameter, or the placeholder of a statistic that it does not have
    sizes = tuple(size for size in array.shape if size > 1)  # a placeholder of each layer is [L, 1]
    # Of axes of one size, as in a square matrix, the first are taken: layers come first, and are always left.
    for shape, splits in _views(param.shape, tuple(spec)):
        for axes in itertools.combinations(range(len(shape)), len(sizes)):
            if tuple(shape[axis] for axis in axes) == sizes:
                left = iter(axes)
                return P(*(splits[next(left)] if size > 1 else None for size in array.shape))
    return None


def _views(shape: tuple[int, ...], splits: tuple) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Yields the shape of a parameter with what splits each axis, as it is and with an axis that nothing splits in one
    with that before it: (L, D, H, K) and (L, D, H · K)."""
    yield shape, splits
    for i in range(1, len(shape)):
        if splits[i] is None:
            yield (*shape[: i - 1], shape[i - 1] * shape[i], *shape[i + 1 :]), (*splits[:i], *splits[i + 1 :])
