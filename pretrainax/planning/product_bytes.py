"""The products of a step's layers: the bytes of activations that they read and write, counted in a trace."""

import dataclasses
import functools
import json
from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from pretrainax import config as config_lib
from pretrainax.config import Experiment
from pretrainax.layers.made_again import PRODUCTS
from pretrainax.planning.activations import bytes_of, config_key, forward_jaxpr, local, micro_rows, scopes
from pretrainax.sharding.axes import LENGTH_AXIS

_PRODUCTS = PRODUCTS | {"pallas_call"}  # the kernel is that of experts: attention is traced as "xla"


def product_bytes(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> float:
    """Counts the bytes of activations that products in layers read and write, in the forward of one update on a device.

    Products of attention's queries with its keys, and of its weights with its values, are not counted: a fused kernel
    writes none of theirs.
    """
    part = dataclasses.replace(local(experiment, mesh_sizes), tuning=None, distill=None)
    part.train = dataclasses.replace(part.train, global_batch_size=1, accumulate=1, remat="none")
    key = config_key(part)
    few, more = (_traced(key, rows, platform) for rows in (2, 4))  # parameters, which both read, cancel
    rows = experiment.train.accumulate * micro_rows(experiment, mesh_sizes) / mesh_sizes[LENGTH_AXIS]
    return rows * (more - few) / 2


@functools.lru_cache(maxsize=256)
def _traced(key: str, rows: int, platform: str) -> int:
    experiment = config_lib.from_json(Experiment, json.loads(key))
    experiment.train.attention = "xla"
    jaxpr, modules = forward_jaxpr(experiment, rows, platform)
    return sum(_counted(jaxpr, modules, ()))


def _counted(jaxpr: Jaxpr, modules: set[str], around: tuple[str, ...]) -> Iterator[int]:
    """Yields the bytes of each product in a program; around: the modules it runs in."""
    for eqn in jaxpr.eqns:
        where = (*around, *(word for word in scopes(eqn) if word in modules))
        if eqn.primitive.name in _PRODUCTS:
            if "blocks" in where and not where[-1].endswith("attention"):
                yield sum(bytes_of(var) for var in (*eqn.invars, *eqn.outvars))
        elif eqn.primitive.name == "cond":
            yield max(sum(_counted(branch, modules, where)) for branch in _inner(eqn))
        else:
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            yield from (times * size for inner in _inner(eqn) for size in _counted(inner, modules, where))


def _inner(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yields the programs that an equation runs."""
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, (ClosedJaxpr, Jaxpr))):
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            yield value.jaxpr if isinstance(value, ClosedJaxpr) else value
