"""The sharding of an optimizer's state: each array of it lies like the parameter that it belongs to.

Optax says which those are, whatever the optimizer (`tree_map_params`): moments, which have their parameter's shape, and
statistics of a part of its axes, as Adafactor's, or of two axes in one, as heads side by side. Paths would not do: a
state names its arrays as it likes.
"""

import functools
import itertools
from collections.abc import Iterator

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pretrainax.config import UserError
from pretrainax.sharding.param_paths import PyTree, parameter_names
from pretrainax.sharding.rules import named_sharding, param_specs


def opt_state_specs(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Returns a PartitionSpec for each leaf of `optimizer.init(params)`; params: arrays or shapes.

    What belongs to no parameter, as a counter, is copied to every device.

    Raises:
      UserError: an array whose axes are not some of its parameter's.
      ValueError: as `param_specs`.
    """
    names = jax.tree.unflatten(jax.tree.structure(params), parameter_names(params))
    init = functools.partial(jax.eval_shape, optimizer.init)  # Optax would run it, and the devices may be absent ones
    return optax.tree_utils.tree_map_params(
        init,
        _spec_of,
        init(params),
        names,
        params,
        param_specs(params),
        transform_non_params=lambda _: P(),
        is_leaf=lambda x: isinstance(x, (optax.MaskedNode, list)),
    )


def opt_state_shardings(mesh: Mesh, optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Returns a NamedSharding for each leaf of `optimizer.init(params)`; raises as `opt_state_specs`."""
    return jax.tree.map(lambda spec: named_sharding(mesh, spec), opt_state_specs(optimizer, params))


def _spec_of(array: PyTree, name: str, param: PyTree, spec: P) -> PyTree:
    """Returns the PartitionSpec of one array of the state; `spec` is that of its parameter."""
    if isinstance(array, optax.MaskedNode):  # there is none for this parameter
        return array
    if isinstance(array, list):  # several for this parameter
        return [_spec_of(x, name, param, spec) for x in array]
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
    raise UserError(
        f"config.optimizer keeps an array of shape {array.shape} for {name}, whose shape is {param.shape}: its axes "
        "are not some of the parameter's, and nothing says how a mesh splits them; take another optimizer"
    )


def _views(shape: tuple[int, ...], splits: tuple) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Yields the shape of a parameter with what splits each axis, as it is and with an axis that nothing splits in one
    with that before it: (L, D, H, K) and (L, D, H · K)."""
    yield shape, splits
    for i in range(1, len(shape)):
        if splits[i] is None:
            yield (*shape[: i - 1], shape[i - 1] * shape[i], *shape[i + 1 :]), (*splits[:i], *splits[i + 1 :])
