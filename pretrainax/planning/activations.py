"""Finds the shapes of the train state and of the residuals of a train step by tracing, without allocating arrays.

Residuals are the arrays that the forward pass saves for the backward pass. The module traces `jax.vjp` of the real
objective and reads the residuals from the trace, so it needs no formulas per model family, rematerialization policy or
attention kernel. The trace covers one device: its rows of the batch, and a model with the device's share of the heads,
the feed-forward width and the vocabulary (as AXIS_RULES splits them; Shoeybi et al. 2019, section 3).
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
from pretrainax.sharding.param_paths import PyTree, parameter_names
from pretrainax.sharding.rules import tree_shardings, with_shardings
from pretrainax.training import losses, train_step
from pretrainax.training.run import Steps, build_steps
from pretrainax.training.train_step import Params, TrainState
from pretrainax.training.wrapped import trained_model


class SavedResidual(NamedTuple):
    """An array that the forward pass saves for the backward pass."""

    module: str  # the module that computes the array, "decoder/blocks/mlp/up", or "loss" outside the model
    shape: tuple[int, ...]  # the shape in a trace with 2 rows
    dtype: str
    bytes: float  # per device, for the rows of one microbatch


def saved_residuals(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> list[SavedResidual]:
    """Returns the residuals that one device saves for the backward pass of one microbatch.

    Args:
      mesh_sizes: size of each mesh axis, {axis of AXES: size}.
      platform: "tpu", "gpu" or "cpu".
    """
    rows = micro_rows(experiment, mesh_sizes)
    shard = shard_experiment(experiment, mesh_sizes)
    shard.train = dataclasses.replace(shard.train, global_batch_size=1, accumulate=1)
    key = config_key(shard)
    # The bytes of an array are a constant plus a multiple of the number of rows. Traces with 2 and 4 rows give both.
    teacher = _teacher(experiment, mesh_sizes)
    two_rows, four_rows = (_trace(key, count, platform, teacher) for count in (2, 4))
    bytes_per_row = [(b.bytes - a.bytes) / 2 for a, b in zip(two_rows, four_rows, strict=True)]
    split = mesh_sizes[LENGTH_AXIS]
    return [
        a._replace(bytes=a.bytes - 2 * row + row * rows / split) for a, row in zip(two_rows, bytes_per_row, strict=True)
    ]


def micro_rows(experiment: Experiment, mesh_sizes: dict[str, int]) -> float:
    """Returns the number of batch rows that one device processes in one microbatch; may be a fraction."""
    parts = math.prod(mesh_sizes[axis] for axis in BATCH_AXES)
    return experiment.train.global_batch_size / (experiment.train.accumulate * parts)


def shard_experiment(experiment: Experiment, mesh_sizes: dict[str, int]) -> Experiment:
    """Returns a copy of the experiment with a model of one device: its share of heads, feed-forward and vocabulary.

    AXIS_RULES determines the shares.

    NOTE The heads and the width of a generator (ELECTRA) are not divided.
    """
    experiment = copy.deepcopy(experiment)
    _shard_model(experiment.model, mesh_sizes)
    distillation = cast(Optional[Distillation], experiment.distill)
    if distillation is not None:
        parts = math.prod(mesh_sizes[axis] for axis in mesh_axes("num_heads"))
        distillation.relation_heads = -(-distillation.relation_heads // parts)
    return experiment


def _teacher(experiment: Experiment, mesh_sizes: dict[str, int]) -> str:
    """Returns the config of one device's share of the teacher model, as JSON; "" without a teacher."""
    teacher = copy.deepcopy(teacher_of(experiment))
    if teacher is None:
        return ""
    _shard_model(teacher, mesh_sizes)
    return json.dumps(config_lib.to_json(teacher))


def _build(experiment: Experiment, train: TrainConfig, teacher: str) -> models.AnyModel:
    """Returns the Flax module that the run trains.

    Args:
      train: the train config without "auto" values.
      teacher: the config of the teacher as JSON, from `_teacher`; "" without a teacher.
    """
    teacher_config = config_lib.from_json(ModelConfig, json.loads(teacher)) if teacher else None
    return trained_model(experiment, train, teacher_config)


def _shard_model(model: ModelConfig, mesh_sizes: dict[str, int]) -> None:
    """Reduces heads, feed-forward widths and vocabulary of a model config to the share of one device, in place."""
    names = ("num_heads", "num_kv_heads", "d_ff", "vocab_size")
    parts = {name: math.prod(mesh_sizes[axis] for axis in mesh_axes(name)) for name in names}
    if max(parts.values()) == 1:
        return
    for name in ("d_ff", "dense_after") if model.experts is not None else ():
        if (width := getattr(model.experts, name)) is not None:
            setattr(model.experts, name, width // parts["d_ff"])
    for sizes, stack in zip(filter(None, (model, model.decoder)), model.sized.values(), strict=True):
        sizes.head_dim, sizes.num_kv_heads = stack.dim_per_head, stack.kv_heads // parts["num_kv_heads"]
        sizes.num_heads, sizes.d_ff = stack.num_heads // parts["num_heads"], stack.d_ff // parts["d_ff"]
    model.vocab_size //= parts["vocab_size"]


def abstract_state(experiment: Experiment, mesh_sizes: dict[str, int]) -> TrainState:
    """Returns the train state as shapes with dtypes and shardings, on a mesh without real devices.

    Raises:
      UserError: the batch size or a size of the model is not divisible by the mesh.
    """
    mesh = abstract_mesh(mesh_sizes, "cpu")
    check_mesh(experiment, mesh)
    program = _built_steps(config_key(experiment))
    state = program.abstract_state
    return with_shardings(
        state, train_step.state_shardings(mesh, program.optimizer, state.params, state.ema is not None)
    )


def abstract_frozen(experiment: Experiment, mesh_sizes: dict[str, int]) -> dict[str, Params]:
    """Returns the frozen parameters, by Flax collection, as shapes with dtypes and shardings; {} if none are frozen."""
    mesh, frozen = abstract_mesh(mesh_sizes, "cpu"), _built_steps(config_key(experiment)).abstract_frozen or {}
    return {name: with_shardings(tree, tree_shardings(mesh, tree)) for name, tree in frozen.items()}


@functools.lru_cache(maxsize=64)
def _built_steps(key: str) -> Steps:
    """Builds the run's train step with its model and optimizer, on a mesh of one CPU device.

    The shapes of the train state do not depend on the platform or the batch.

    Args:
      key: the JSON of `config_key`.
    """
    experiment = config_lib.from_json(Experiment, json.loads(key))
    experiment.train = dataclasses.replace(experiment.train, attention="xla", global_batch_size=1, accumulate=1)
    mesh = abstract_mesh(dict.fromkeys(AXES, 1), "cpu")
    with jax.sharding.use_abstract_mesh(mesh):
        return build_steps(experiment, batch_shapes(experiment), mesh, make_model=TrainedStart().model)


def shapes_of(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the global batch, from a cache per experiment: `batch_shapes` is slow."""
    return _cached_shapes(config_key(experiment))


@functools.lru_cache(maxsize=64)
def _cached_shapes(key: str) -> dict[str, jax.ShapeDtypeStruct]:
    return batch_shapes(config_lib.from_json(Experiment, json.loads(key)))


def resolved_train_config(experiment: Experiment, platform: str) -> TrainConfig:
    """Returns `experiment.train` with the values that "auto" stands for on the platform ("tpu", "gpu" or "cpu")."""
    with jax.sharding.use_abstract_mesh(abstract_mesh(dict.fromkeys(AXES, 1), platform)):
        return resolve_auto(experiment.train)


def compute_itemsize(experiment: Experiment, platform: str) -> int:
    """Returns the bytes per element of the compute dtype: 2 for bfloat16, 4 for float32."""
    return 2 if resolved_train_config(experiment, platform).dtype == "bfloat16" else 4


def config_key(experiment: Experiment) -> str:
    return json.dumps(config_lib.to_json(dataclasses.replace(experiment, mesh=MeshConfig())), sort_keys=True)


@functools.lru_cache(maxsize=512)
def _trace(key: str, rows: int, platform: str, teacher: str) -> list[SavedResidual]:
    experiment = config_lib.from_json(Experiment, json.loads(key))
    shapes = {name: x.update(shape=(rows, *x.shape[1:])) for name, x in shapes_of(experiment).items()}
    if platform == "gpu":
        # Tracing cuDNN's attention requires cuDNN. The TPU kernels save arrays with the same shapes: queries, keys,
        # values, the result and the normalizer of each row. The trace therefore uses the TPU kernels. If any attention
        # of a model uses cuDNN, all of its attentions are traced in this way.
        requested, specs = experiment.train.attention, _attention_specs(key, platform, teacher)
        chosen = {choose_backend(requested, platform, spec)[0] for spec in specs}
        platform, experiment.train.attention = ("tpu", "auto") if "cudnn" in chosen else ("gpu", "xla")
    with jax.sharding.use_abstract_mesh(abstract_mesh(dict.fromkeys(AXES, 1), platform)):
        train = resolve_auto(experiment.train)
        return list(_residuals_of(_build(experiment, train, teacher), train, shapes))


def attention_specs(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> list[AttentionSpec]:
    """Returns the spec (shapes, mask, bias, dropout) of each attention call in an experiment's model."""
    train = dataclasses.replace(experiment.train, remat="none", accumulate=1, global_batch_size=1)
    teacher = _teacher(experiment, dict.fromkeys(AXES, 1))
    specs = _attention_specs(config_key(dataclasses.replace(experiment, train=train)), platform, teacher)
    return [dataclasses.replace(spec, sequence=mesh_sizes[LENGTH_AXIS]) for spec in specs]


@functools.lru_cache(maxsize=64)
def _attention_specs(key: str, platform: str, teacher: str) -> tuple[AttentionSpec, ...]:
    """Returns the spec of each attention call on a one-device mesh; cached by config.

    The trace uses the attention backend "xla", which can be traced on every platform.
    """
    experiment = config_lib.from_json(Experiment, json.loads(key))
    experiment.train.attention = "xla"
    mesh = abstract_mesh(dict.fromkeys(AXES, 1), platform)
    with jax.sharding.use_abstract_mesh(mesh), collect_attention_specs() as specs:
        untuned = dataclasses.replace(experiment, tuning=None)
        model = _build(untuned, resolve_auto(experiment.train), teacher)
        train_step.abstract_params(model, shapes_of(experiment))
    return tuple(specs)


def _residuals_of(
    model: models.AnyModel, train: TrainConfig, shapes: dict[str, jax.ShapeDtypeStruct]
) -> Iterator[SavedResidual]:
    def residuals(objective, params):
        return jax.tree.leaves(jax.vjp(objective, params, has_aux=True)[1])

    jaxpr, modules = _objective_jaxpr(model, train, shapes, residuals)
    seen = set(jaxpr.invars)  # parameters and batch: not residuals, because they exist during the whole step
    for var in jaxpr.outvars:
        if not isinstance(var, Literal) and _behind_reshapes(jaxpr, var) not in seen:
            seen.add(_behind_reshapes(jaxpr, var))
            equations = _producers(jaxpr, var)
            if any(is_cast_kernel(eqn) for eqn in equations):
                continue  # a parameter in the compute dtype: the memory estimate counts these copies separately
            words = [word for eqn in equations for word in name_stack_words(eqn) if word in modules]
            yield SavedResidual("/".join(words) or "loss", var.aval.shape, str(var.aval.dtype), bytes_of(var))


def forward_jaxpr(experiment: Experiment, rows: int, platform: str) -> tuple[Jaxpr, set[str]]:
    """Returns (jaxpr of the objective's forward pass for a batch of `rows` rows, names of the model's modules)."""
    shapes = {name: x.update(shape=(rows, *x.shape[1:])) for name, x in shapes_of(experiment).items()}
    with jax.sharding.use_abstract_mesh(abstract_mesh(dict.fromkeys(AXES, 1), platform)):
        train = resolve_auto(experiment.train)
        model = _build(experiment, train, "")
        return _objective_jaxpr(model, train, shapes, lambda objective, params: objective(params))


def _objective_jaxpr(
    model: models.AnyModel, train: TrainConfig, shapes: dict[str, jax.ShapeDtypeStruct], function: Callable[..., PyTree]
) -> tuple[Jaxpr, set[str]]:
    """Returns (jaxpr of `function(objective, params)`, names of the model's modules).

    `objective(params)` is the training objective of `model` on a batch with these shapes.
    """
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


def _behind_reshapes(jaxpr: Jaxpr, var: Var) -> Var:
    """Returns the variable that a chain of reshapes starts from; `var` itself if no reshape computes it.

    Reshapes take no memory. A loop over groups of layers reshapes its parameters, for example.
    """
    eqn = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
    is_view = eqn is not None and eqn.primitive.name == "reshape" and isinstance(eqn.invars[0], Var)
    return _behind_reshapes(jaxpr, eqn.invars[0]) if is_view else var


def bytes_of(var: Union[Var, Literal]) -> int:
    return var.aval.size * getattr(var.aval.dtype, "itemsize", 8)  # random keys have no itemsize: 8 bytes


def _producers(jaxpr: Jaxpr, var: Var) -> list[JaxprEqn]:
    """Returns the equations that compute a variable: the outermost equation first, then those in its inner jaxprs.

    Loops and calls have inner jaxprs. The result is [] for an input of the jaxpr.
    """
    eqn = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
    if eqn is None:
        return []
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    inner = getattr(inner, "jaxpr", inner)
    if inner is not None and len(inner.outvars) == len(eqn.outvars):
        output = inner.outvars[eqn.outvars.index(var)]
        return [eqn] if isinstance(output, Literal) else [eqn, *_producers(inner, output)]
    if eqn.primitive.name == "reduce_precision" and isinstance(eqn.invars[0], Var):  # JAX adds it to residuals
        return _producers(jaxpr, eqn.invars[0]) or [eqn]
    return [eqn]


def name_stack_words(eqn: JaxprEqn) -> list[str]:
    """Returns the words in an equation's name stack: jvp, Decoder, decoder, ... for jvp(Decoder)/decoder/..."""
    return re.findall(r"\w+", str(eqn.source_info.name_stack))
