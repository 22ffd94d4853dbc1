"""Derives the shapes of the train state and of a train step's residuals from a trace, without allocating arrays.

Residuals are the arrays that the forward pass saves for the backward pass. The module traces `jax.vjp` of the real
objective and reads the residuals from the trace. It therefore needs no separate formulas for each model family,
rematerialization policy or attention kernel. The trace covers one device: its rows of the batch, and a model with the
device's share of the heads, the feed-forward width and the vocabulary (as sharded by AXIS_RULES; Shoeybi et al. 2019,
section 3).
"""

import copy
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional, Union, cast

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from pretrainax import config as config_lib
from pretrainax import models
from pretrainax.config import Experiment, MeshConfig, ModelConfig, TrainConfig
from pretrainax.distill import Distillation
from pretrainax.interop.run_start import TrainedStart
from pretrainax.interop.teacher import teacher_of
from pretrainax.layers.attention import choose_backend
from pretrainax.layers.attention_spec import AttentionSpec, collect_attention_specs
from pretrainax.layers.compute import resolve_auto
from pretrainax.layers.rematerialization import is_cast_kernel
from pretrainax.planning.shapes import batch_shapes
from pretrainax.sharding.arrays import check_mesh
from pretrainax.sharding.axes import AXES, BATCH_AXES, LENGTH_AXIS, mesh_axes
from pretrainax.sharding.mesh import abstract_mesh
from pretrainax.sharding.mesh import platform as current_platform
from pretrainax.sharding.param_paths import PyTree, parameter_names
from pretrainax.sharding.rules import tree_shardings, with_shardings
from pretrainax.training import losses, train_step
from pretrainax.training.run import Steps, build_steps
from pretrainax.training.train_step import Params, TrainState
from pretrainax.training.wrapped import trained_model


class SavedResidual(NamedTuple):
    """An array that the forward pass saves for the backward pass."""

    module: str  # the module that computes the array, "decoder/blocks/mlp/up", or "loss" outside the model
    shape: tuple[int, ...]  # shape in the trace, with a batch of 2 rows or those of a microbatch
    dtype: str
    bytes: float  # per device, for the rows of one microbatch


def saved_residuals(
    experiment: Experiment, mesh_sizes: dict[str, int], platform: str, single: bool = False
) -> list[SavedResidual]:
    """Computes the residuals that one device saves for the backward pass of one microbatch.

    Args:
      mesh_sizes: size of each mesh axis, {axis of AXES: size}.
      platform: "tpu", "gpu" or "cpu".
      single: traces once, for the rows of the microbatch, if possible. That is faster than the two traces from which
        the residuals for any number of rows follow.
    """
    rows = micro_rows(experiment, mesh_sizes)
    shard = shard_experiment(experiment, mesh_sizes)
    shard.train = dataclasses.replace(shard.train, global_batch_size=1, accumulate=1)
    key = config_key(shard)
    teacher = _teacher_json(experiment, mesh_sizes)
    if single and rows.is_integer() and mesh_sizes[LENGTH_AXIS] == 1:
        return _trace(key, int(rows), platform, teacher)
    # The bytes of an array are a constant plus a multiple of the number of rows. Traces with 2 and 4 rows give both
    # numbers.
    two_rows, four_rows = (_trace(key, num_rows, platform, teacher) for num_rows in (2, 4))
    bytes_per_row = [(large.bytes - small.bytes) / 2 for small, large in zip(two_rows, four_rows, strict=True)]
    sequence_shards = mesh_sizes[LENGTH_AXIS]
    return [
        small._replace(bytes=small.bytes - 2 * row_bytes + row_bytes * rows / sequence_shards)
        for small, row_bytes in zip(two_rows, bytes_per_row, strict=True)
    ]


def micro_rows(experiment: Experiment, mesh_sizes: dict[str, int]) -> float:
    """Computes the number of batch rows that one device processes per microbatch, which may be fractional."""
    shards = math.prod(mesh_sizes[axis] for axis in BATCH_AXES)
    return experiment.train.global_batch_size / (experiment.train.accumulate * shards)


def shard_experiment(experiment: Experiment, mesh_sizes: dict[str, int]) -> Experiment:
    """Returns a copy of the experiment whose model has one device's share of heads, feed-forward width and vocabulary.

    AXIS_RULES determines these shares.

    NOTE The heads and the width of a generator (ELECTRA) are not divided.
    """
    experiment = copy.deepcopy(experiment)
    _shard_model(experiment.model, mesh_sizes)
    distillation = cast(Optional[Distillation], experiment.distill)
    if distillation is not None:
        head_shards = math.prod(mesh_sizes[axis] for axis in mesh_axes("num_heads"))
        distillation.relation_heads = -(-distillation.relation_heads // head_shards)
    return experiment


def _teacher_json(experiment: Experiment, mesh_sizes: dict[str, int]) -> str:
    """Returns the config of one device's share of the teacher model as JSON, or "" if the run has no teacher."""
    teacher = copy.deepcopy(teacher_of(experiment))
    if teacher is None:
        return ""
    _shard_model(teacher, mesh_sizes)
    return json.dumps(config_lib.to_json(teacher))


def _build_model(experiment: Experiment, train: TrainConfig, teacher: str) -> models.AnyModel:
    """Builds the Flax module that the run trains.

    Args:
      train: the train config without "auto" values.
      teacher: the teacher's config as JSON, from `_teacher_json`, or "" if the run has no teacher.
    """
    teacher_config = config_lib.from_json(ModelConfig, json.loads(teacher)) if teacher else None
    return trained_model(experiment, train, teacher_config)


def _shard_model(model: ModelConfig, mesh_sizes: dict[str, int]) -> None:
    """Reduces the heads, feed-forward widths and vocabulary of a model config to one device's share, in place."""
    names = ("num_heads", "num_kv_heads", "d_ff", "vocab_size")
    shards = {name: math.prod(mesh_sizes[axis] for axis in mesh_axes(name)) for name in names}
    if max(shards.values()) == 1:
        return
    for name in ("d_ff", "dense_after") if model.experts is not None else ():
        if (width := getattr(model.experts, name)) is not None:
            setattr(model.experts, name, width // shards["d_ff"])
    for stack_config, stack_sizes in zip(filter(None, (model, model.decoder)), model.sized.values(), strict=True):
        stack_config.head_dim, stack_config.num_kv_heads = (
            stack_sizes.dim_per_head,
            stack_sizes.kv_heads // shards["num_kv_heads"],
        )
        stack_config.num_heads, stack_config.d_ff = (
            stack_sizes.num_heads // shards["num_heads"],
            stack_sizes.d_ff // shards["d_ff"],
        )
    model.vocab_size //= shards["vocab_size"]


def abstract_state(experiment: Experiment, mesh_sizes: dict[str, int]) -> TrainState:
    """Builds the abstract train state (shapes, dtypes and shardings) on a mesh without real devices.

    Raises:
      UserError: the batch size or a model dimension is not divisible by the mesh.
    """
    check_mesh(experiment, abstract_mesh(mesh_sizes, "cpu"))
    return _cached_state(_state_key(experiment), tuple(mesh_sizes.items()))


@functools.lru_cache(maxsize=256)
def _cached_state(key: str, mesh_sizes: tuple[tuple[str, int], ...]) -> TrainState:
    mesh, steps = abstract_mesh(dict(mesh_sizes), "cpu"), _cached_steps(key)
    state = steps.abstract_state
    return with_shardings(state, train_step.state_shardings(mesh, steps.optimizer, state.params, state.ema is not None))


def abstract_frozen(experiment: Experiment, mesh_sizes: dict[str, int]) -> dict[str, Params]:
    """Builds the abstract frozen parameters (shapes, dtypes, shardings) by Flax collection; {} if none are frozen."""
    mesh, frozen = abstract_mesh(mesh_sizes, "cpu"), _cached_steps(_state_key(experiment)).abstract_frozen or {}
    return {name: with_shardings(tree, tree_shardings(mesh, tree)) for name, tree in frozen.items()}


def _state_key(experiment: Experiment) -> str:
    """Returns the `config_key` with fixed values of the training fields that do not change the train state."""
    train = dataclasses.replace(
        experiment.train, attention="xla", global_batch_size=1, accumulate=1, remat="none", pipeline_schedule="gpipe"
    )
    return config_key(dataclasses.replace(experiment, train=train))


@functools.lru_cache(maxsize=64)
def _cached_steps(key: str) -> Steps:
    """Builds the run's train step with its model and optimizer, on a mesh of one CPU device.

    The result is cached by config, because the shapes of the train state depend neither on the platform nor on the
    batch.

    Args:
      key: the config as JSON, from `_state_key`.
    """
    experiment = config_lib.from_json(Experiment, json.loads(key))
    mesh = abstract_mesh(dict.fromkeys(AXES, 1), "cpu")
    with jax.sharding.use_abstract_mesh(mesh):
        return build_steps(experiment, batch_shapes(experiment), mesh, make_model=TrainedStart().model)


def shapes_of(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the global batch, cached by config because `batch_shapes` is slow."""
    return _cached_shapes(config_key(experiment))


@functools.lru_cache(maxsize=64)
def _cached_shapes(key: str) -> dict[str, jax.ShapeDtypeStruct]:
    return batch_shapes(config_lib.from_json(Experiment, json.loads(key)))


def resolved_train_config(experiment: Experiment, platform: str) -> TrainConfig:
    """Returns `experiment.train` with "auto" resolved for one device of the platform ("tpu", "gpu" or "cpu")."""
    with jax.sharding.use_abstract_mesh(abstract_mesh(dict.fromkeys(AXES, 1), platform)):
        return resolve_auto(experiment.train, experiment.model.vocab_size)


def compute_itemsize(experiment: Experiment, platform: str) -> int:
    """Returns the bytes per element of the compute dtype on the platform: 2 for bfloat16, 4 for float32."""
    return 2 if resolved_train_config(experiment, platform).dtype == "bfloat16" else 4


def config_key(experiment: Experiment) -> str:
    """Serializes the config without its mesh to JSON, for use as a cache key."""
    return json.dumps(config_lib.to_json(dataclasses.replace(experiment, mesh=MeshConfig())), sort_keys=True)


@functools.lru_cache(maxsize=512)
def _trace(key: str, rows: int, platform: str, teacher: str) -> list[SavedResidual]:
    """Traces the objective for a batch of `rows` rows and returns its residuals, cached by config."""
    experiment = config_lib.from_json(Experiment, json.loads(key))
    shapes = {name: x.update(shape=(rows, *x.shape[1:])) for name, x in shapes_of(experiment).items()}
    if platform == "gpu":
        # Tracing cuDNN's attention requires cuDNN. The trace uses the TPU kernels instead, which save arrays with the
        # same shapes: queries, keys, values, the output and the normalizer of each query. If any attention of a model
        # uses cuDNN, all of its attentions are traced with the TPU kernels.
        requested_backend, specs = experiment.train.attention, _attention_specs(key, platform, teacher)
        backends = {choose_backend(requested_backend, platform, spec)[0] for spec in specs}
        platform, experiment.train.attention = ("tpu", "auto") if "cudnn" in backends else ("gpu", requested_backend)
    with jax.sharding.use_abstract_mesh(abstract_mesh(dict.fromkeys(AXES, 1), platform)):
        train = resolve_auto(experiment.train)
        return list(_residuals_of(_build_model(experiment, train, teacher), train, shapes))


def attention_specs(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> list[AttentionSpec]:
    """Collects the spec (shapes, mask, bias, dropout) of each attention call in an experiment's model.

    The shapes are unsharded, as on a single device. Only the field `sequence`, the number of devices that the sequence
    is sharded over, comes from `mesh_sizes`.
    """
    train = dataclasses.replace(experiment.train, remat="none", accumulate=1, global_batch_size=1)
    teacher = _teacher_json(experiment, dict.fromkeys(AXES, 1))
    specs = _attention_specs(config_key(dataclasses.replace(experiment, train=train)), platform, teacher)
    return [dataclasses.replace(spec, sequence=mesh_sizes[LENGTH_AXIS]) for spec in specs]


@functools.lru_cache(maxsize=64)
def _attention_specs(key: str, platform: str, teacher: str) -> tuple[AttentionSpec, ...]:
    """Collects the spec of each attention call on a one-device mesh, cached by config.

    The trace uses the attention backend "xla", which can be traced on every platform.
    """
    experiment = config_lib.from_json(Experiment, json.loads(key))
    experiment.train.attention = "xla"
    mesh = abstract_mesh(dict.fromkeys(AXES, 1), platform)
    with jax.sharding.use_abstract_mesh(mesh), collect_attention_specs() as specs:
        without_tuning = dataclasses.replace(experiment, tuning=None)
        model = _build_model(without_tuning, resolve_auto(experiment.train), teacher)
        train_step.abstract_params(model, shapes_of(experiment))
    return tuple(specs)


def _residuals_of(
    model: models.AnyModel, train: TrainConfig, shapes: dict[str, jax.ShapeDtypeStruct]
) -> Iterator[SavedResidual]:
    """Yields the objective's residuals for a batch with the given shapes, excluding parameters and the batch itself."""

    def residuals(objective, params):
        return jax.tree.leaves(jax.vjp(objective, params, has_aux=True)[1])

    jaxpr, modules = _objective_jaxpr(model, train, shapes, residuals)
    visited, inputs = set(), set(jaxpr.invars)
    for var in jaxpr.outvars:
        # Parameters and batch are not residuals: they exist for the whole step. Slices of parameters, by kind of layer,
        # are sharded like the parameters, unlike this trace.
        if isinstance(var, Literal) or _before_views(jaxpr, var, {"reshape", "slice"}) in inputs:
            continue
        if _before_views(jaxpr, var, {"reshape"}) not in visited:
            visited.add(_before_views(jaxpr, var, {"reshape"}))
            equations = _producers(jaxpr, var)
            if any(is_cast_kernel(eqn) for eqn in equations):
                continue  # a parameter in the compute dtype: the memory estimate counts these copies separately
            words = [word for eqn in equations for word in name_stack_words(eqn) if word in modules]
            yield SavedResidual("/".join(words) or "loss", var.aval.shape, str(var.aval.dtype), bytes_of(var))


def forward_jaxpr(experiment: Experiment, rows: int, platform: str) -> tuple[Jaxpr, set[str]]:
    """Traces the objective's forward pass on a batch of `rows` rows; returns the jaxpr and the model's module names."""
    shapes = {name: x.update(shape=(rows, *x.shape[1:])) for name, x in shapes_of(experiment).items()}
    with jax.sharding.use_abstract_mesh(abstract_mesh(dict.fromkeys(AXES, 1), platform)):
        train = resolve_auto(experiment.train)
        model = _build_model(experiment, train, "")
        return _objective_jaxpr(model, train, shapes, lambda objective, params: objective(params))


def _objective_jaxpr(
    model: models.AnyModel, train: TrainConfig, shapes: dict[str, jax.ShapeDtypeStruct], function: Callable[..., PyTree]
) -> tuple[Jaxpr, set[str]]:
    """Traces `function(objective, params)`; returns the jaxpr and the names of the model's modules.

    `objective(params)` is the training objective of `model` on a batch with the given shapes.
    """
    # Initialization has no dropout, so a GPU may select cuDNN's attention for it. Tracing that requires cuDNN.
    platform = "cpu" if (target := current_platform()) == "gpu" else target
    with jax.sharding.use_abstract_mesh(abstract_mesh(dict.fromkeys(AXES, 1), platform)):
        variables = train_step.abstract_variables(model, shapes)
    params = variables.pop("params")

    def program(params, frozen, batch, key):
        def objective(params):
            outputs = model.apply(
                {"params": params, **frozen}, batch, deterministic=False, rngs={"dropout": key, "sample": key}
            )
            return losses.objective(outputs, batch, losses.counts(batch), **train_step.loss_options(train))

        return function(objective, params)

    jaxpr = jax.make_jaxpr(program)(params, variables, shapes, jax.eval_shape(lambda: jax.random.key(0))).jaxpr
    return jaxpr, {word for name in parameter_names((params, variables)) for word in name.split("/")}


def _before_views(jaxpr: Jaxpr, var: Var, views: set[str]) -> Var:
    """Follows a chain of views back from `var` and returns the variable at its start, or `var` if it is no view.

    Args:
      views: names of the primitives to follow. Reshapes take no memory: a loop over groups of layers reshapes its
        parameters.
    """
    eqn = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
    is_view = eqn is not None and eqn.primitive.name in views and isinstance(eqn.invars[0], Var)
    return _before_views(jaxpr, eqn.invars[0], views) if is_view else var


def bytes_of(var: Union[Var, Literal]) -> int:
    """Returns the size in bytes of a variable or literal in a jaxpr."""
    return var.aval.size * getattr(var.aval.dtype, "itemsize", 8)  # random keys have no itemsize: 8 bytes


def _producers(jaxpr: Jaxpr, var: Var) -> list[JaxprEqn]:
    """Returns the equations that compute a variable, from the outermost jaxpr to the innermost.

    The equation of a loop or call has an inner jaxpr, in which another equation computes the same variable. Returns []
    if the variable is an input of the jaxpr.
    """
    eqn = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
    if eqn is None:
        return []
    inner_jaxpr = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    inner_jaxpr = getattr(inner_jaxpr, "jaxpr", inner_jaxpr)
    if inner_jaxpr is not None and len(inner_jaxpr.outvars) == len(eqn.outvars):
        output = inner_jaxpr.outvars[eqn.outvars.index(var)]
        return [eqn] if isinstance(output, Literal) else [eqn, *_producers(inner_jaxpr, output)]
    if eqn.primitive.name == "reduce_precision" and isinstance(eqn.invars[0], Var):  # JAX adds it to residuals
        return _producers(jaxpr, eqn.invars[0]) or [eqn]
    return [eqn]


def name_stack_words(eqn: JaxprEqn) -> list[str]:
    """Splits an equation's name stack into words: jvp, Decoder, decoder, ... for jvp(Decoder)/decoder/..."""
    return re.findall(r"\w+", str(eqn.source_info.name_stack))
