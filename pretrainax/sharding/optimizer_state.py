"""The sharding of an optimizer's state: each array of it lies like the parameter that it belongs to.

Optax says which those are, whatever the optimizer (`tree_map_params`): moments, which have their parameter's shape, and
statistics of a part of its axes, as Adafactor's. Paths would not do: a state names its arrays as it likes.
"""

import functools
import itertools

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pretrainax.sharding.param_paths import PyTree, parameter_names
from pretrainax.sharding.rules import named_sharding, param_specs


def opt_state_specs(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Returns a PartitionSpec for each leaf of `optimizer.init(params)`; params: arrays or shapes.

    What belongs to no parameter, as a counter, is copied to every device.

    Raises:
      ValueError: as `param_specs`, and an array whose axes are not some of its parameter's.
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
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )


def opt_state_shardings(mesh: Mesh, optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Returns a NamedSharding for each leaf of `optimizer.init(params)`; raises as `opt_state_specs`."""
    return jax.tree.map(lambda spec: named_sharding(mesh, spec), opt_state_specs(optimizer, params))


def _spec_of(array: PyTree, name: str, param: PyTree, spec: P) -> PyTree:
    """Returns the PartitionSpec of one array of the state; `spec` is that of its parameter."""
    if isinstance(array, optax.MaskedNode):  # there is none for this parameter
        return array
    if array.shape == param.shape:
        return spec
    if array.size == 1:
        return P()  # a scalar of each parameter, or the placeholder of a statistic that it does not have
    # Of axes of one size, as in a square matrix, the first are taken: layers come first, and are always left.
    for axes in itertools.combinations(range(param.ndim), array.ndim):
        if tuple(param.shape[axis] for axis in axes) == array.shape:
            return P(*(spec[axis] for axis in axes))
    raise ValueError(
        f"the optimizer keeps an array of shape {array.shape} for {name}, whose shape is {param.shape}: its axes "
        "are not some of the parameter's, and nothing says how to split them"
    )
