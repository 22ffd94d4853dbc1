"""Counts the activation bytes that the layers' matmuls read and write, from a trace of the forward pass."""

import dataclasses
import functools
import json
from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from pretrainax import config as config_lib
from pretrainax.config import Experiment
from pretrainax.layers.rematerialization import PRODUCTS
from pretrainax.planning.activations import (
    bytes_of,
    config_key,
    forward_jaxpr,
    micro_rows,
    name_stack_words,
    shard_experiment,
)
from pretrainax.sharding.axes import LENGTH_AXIS

_PRODUCTS = PRODUCTS | {"pallas_call"}  # Pallas kernels compute the matmuls of experts; attention is "xla" in the trace


def product_bytes(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> float:
    """Computes the activation bytes that matrix multiplications read and write in one update's forward passes.

    The count is per device, over the layers of the model and over all microbatches. It excludes the matrix
    multiplications inside attention (queries with keys, weights with values), because a fused attention kernel keeps
    their operands and results out of main memory.

    Args:
      platform: "tpu", "gpu" or "cpu".
    """
    sharded_experiment = dataclasses.replace(shard_experiment(experiment, mesh_sizes), tuning=None, distill=None)
    sharded_experiment.train = dataclasses.replace(
        sharded_experiment.train, global_batch_size=1, accumulate=1, remat="none"
    )
    key = config_key(sharded_experiment)
    two_rows, four_rows = (_trace_bytes(key, rows, platform) for rows in (2, 4))  # parameters cancel in the difference
    rows = experiment.train.accumulate * micro_rows(experiment, mesh_sizes) / mesh_sizes[LENGTH_AXIS]
    return rows * (four_rows - two_rows) / 2


@functools.lru_cache(maxsize=256)
def _trace_bytes(key: str, rows: int, platform: str) -> int:
    """Traces the forward pass for `rows` batch rows and returns the bytes that its matmuls move, cached by config."""
    experiment = config_lib.from_json(Experiment, json.loads(key))
    experiment.train.attention = "xla"
    jaxpr, modules = forward_jaxpr(experiment, rows, platform)
    return sum(_bytes_of_products(jaxpr, modules, ()))


def _bytes_of_products(jaxpr: Jaxpr, modules: set[str], path: tuple[str, ...]) -> Iterator[int]:
    """Yields the size in bytes of the operands and result of each matrix multiplication in the blocks of a jaxpr.

    The matrix multiplications inside attention itself, such as queries with keys, are excluded. A scan's body counts
    once per iteration. A conditional counts as its branch with the most bytes.

    Args:
      modules: names of the model's modules.
      path: names of the modules that contain the jaxpr.
    """
    for eqn in jaxpr.eqns:
        scope = (*path, *(word for word in name_stack_words(eqn) if word in modules))
        if eqn.primitive.name in _PRODUCTS:
            if "blocks" in scope and not scope[-1].endswith("attention"):
                yield sum(bytes_of(var) for var in (*eqn.invars, *eqn.outvars))
        elif eqn.primitive.name == "cond":
            yield max(sum(_bytes_of_products(branch, modules, scope)) for branch in _inner_jaxprs(eqn))
        else:
            iterations = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            yield from (
                iterations * size for inner in _inner_jaxprs(eqn) for size in _bytes_of_products(inner, modules, scope)
            )


def _inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yields the jaxprs in the parameters of an equation, such as the body of a scan or the branches of a cond."""
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, (ClosedJaxpr, Jaxpr))):
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            yield value.jaxpr if isinstance(value, ClosedJaxpr) else value
