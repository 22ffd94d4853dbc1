"""Loads the initial parameters of a run from a trained model: another run, or a Hugging Face directory.

In this file, the start of a run is the trained model that it is initialized from (`config.checkpoint.init_from`).
A run with parameter-efficient tuning stores only its trained parameters. When this run is resumed or loaded, it reads
all other parameters from its start. The file `start.json` in the folder of the run records the checkpoints of the
start and a digest of their files. If the start has a different family or shape, `start.json` also records the source of
each parameter. The file `teacher.json` records the teacher of a student in the same format.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple, Optional, cast

import jax
import jax.numpy as jnp

from pretrainax import adapt, config, models
from pretrainax.adapt.tuning import has_plain_model
from pretrainax.checkpoints.manifest import MANIFEST
from pretrainax.checkpoints.params import TRAINED, Initializer, Params, load_steps
from pretrainax.checkpoints.run_json import stored_shapes
from pretrainax.checkpoints.steps import find_checkpoint, parameter_files, step_of
from pretrainax.config import Classify, Experiment, HeadConfig, ModelConfig, UserError, config_at_checkpoint
from pretrainax.config.validation import model_problems
from pretrainax.distill.distilled import PROJECTIONS, without_projections
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object
from pretrainax.files.paths import is_hub
from pretrainax.interop import weights
from pretrainax.interop.architectures import DAMAGED, describe_model, described_model, read_config_json
from pretrainax.interop.origin import Origin, find_origin
from pretrainax.layers.compute import Compute
from pretrainax.models import electra
from pretrainax.models.heads.base import head_modules, heads_of
from pretrainax.sharding.param_paths import PyTree, flat, nested, parameter_names
from pretrainax.sharding.rules import divided_shardings, tree_shardings, with_shardings
from pretrainax.storage.copies import url_of_old_copy
from pretrainax.storage.places import complete, local_path, with_urls
from pretrainax.tokenization import PretrainedTokenizer
from pretrainax.tokenization.choices import TokenizerConfig
from pretrainax.zoo.family import TaskClass, differences, without_heads

# Files in the folder of a run that record the start and the teacher of the run.
START, TEACHER_START = "start.json", "teacher.json"
_DEPENDENCIES = {
    START: "stores what its tuning has trained, and needs the rest from",
    TEACHER_START: "learns from the teacher of config.distill, and needs",
}


# --- the config of a start -------------------------------------------------------------------------------------------


class StartModel(NamedTuple):
    """The model config and tokenizer of a trained model, used to configure a run initialized from that model."""

    model: ModelConfig  # without pretraining heads
    tokenizer: TokenizerConfig
    classes: tuple[TaskClass, ...]  # transformers classes with task heads for this family

    def with_head(self, head_of: Callable[[ModelConfig], HeadConfig]) -> ModelConfig:
        """Returns the model config with the task head of a transformers class, instead of the pretraining heads.

        This is the first class in `classes` whose head has the same type as the head of the task. If the class also
        sets other config fields, the method applies these fields, unless they would change the shapes of the
        parameters.

        A head that labels tokens uses only the encoder of an encoder-decoder, because the state of the decoder at a
        position has not yet read the token at this position. If a trained model already has such a head, it keeps its
        decoder.

        Args:
          head_of: returns the head of the task for a model. This head is used if no transformers class has a head of
            this type.
        """
        model, usual = self.model, head_of(self.model)
        if model.family == "encoder_decoder" and usual.labels_tokens and type(model.head) is not type(usual):
            model = model.stacks["encoder"]
            usual = head_of(model)
        fitting = (x for x in self.classes if type(x.head) is type(usual) and x.family in ("", model.family))
        if (classifier := next(fitting, None)) is None:
            return dataclasses.replace(model, head=usual.left_open())
        changed = classifier.apply_to(model)
        fits = not classifier.changes or _shapes(changed) == _shapes(model)
        return dataclasses.replace(changed if fits else model, head=classifier.head_for(model))


def start_model_of(name: str) -> StartModel:
    """Returns the model config, tokenizer and transformers classes of a trained model.

    Args:
      name: name of the model, in the syntax described in the module docstring of `interop.origin`.

    Raises:
      UserError: the model does not exist or cannot be used.
    """
    origin = find_origin(name)
    if origin.steps:
        model, folder = _task_config(experiment_of(origin).model), os.path.join(origin.directory, "tokenizer")
        try:
            family = describe_model(model, None)[0]
        except UserError:  # transformers cannot compute this model
            family = None
    else:
        (family, model), folder = described_model(read_config_json(origin.directory)), origin.directory
    classes = () if family is None else tuple(family.classifiers)
    path = name if is_hub(name) else os.path.abspath(folder)
    return StartModel(without_heads(model), PretrainedTokenizer(path=path), classes)


def experiment_of(origin: Origin) -> Experiment:
    """Returns the config that a run's checkpoints were trained with.

    If training consists of several phases, this is the config of the phase that contains the checkpoints.

    Args:
      origin: location of the checkpoints.

    Raises:
      UserError: the config does not describe a valid model.
    """
    experiment = config.load(path := os.path.join(origin.directory, "config.json"))
    experiment = config_at_checkpoint(experiment, list(map(step_of, origin.steps)))
    if problems := list(model_problems(experiment)):
        raise UserError(f"{path} describes no model: {'; '.join(problems)}")
    try:
        models.abstract_params(experiment.model)
    except DAMAGED as e:
        raise UserError(f"{path} describes no model: a wrong value in config.model ({e})") from e
    return experiment


def model_at(origin: Origin) -> ModelConfig:
    """Returns the model config of a run or a Hugging Face directory.

    For an ELECTRA run, this is the discriminator's config.
    """
    if origin.steps:
        return _task_config(experiment_of(origin).model)
    return described_model(read_config_json(origin.directory))[1]


def labels_of(origin: Origin) -> Optional[tuple[str, ...]]:
    """Returns the label names of a trained model's task, in the order of the head's outputs.

    Returns:
      The names, or () for a run whose task has no labels. For a Hugging Face directory that has no label names, or has
      the default names LABEL_0, LABEL_1, …, the result is None.
    """
    if origin.steps:
        return tuple(getattr(experiment_of(origin).objective, "labels", ()))
    names = weights.label_names(read_config_json(origin.directory))
    return None if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def _task_config(model: ModelConfig) -> ModelConfig:
    """Returns the config of the model that downstream tasks use: ELECTRA's discriminator, or `model` itself."""
    return model if model.generator is None else electra.discriminator_config(model)


# --- matching parameters ---------------------------------------------------------------------------------------------


class ParameterMapping(NamedTuple):
    """The mapping from the parameters of a new model to the parameters of its start (the model that initializes it)."""

    sources: dict[str, str]  # parameter path in the new model -> parameter path in the start
    missing_head_paths: list[
        str
    ]  # head parameters to initialize, because the start lacks them or has them in a different shape
    unused_paths: list[str]  # unused parameters of the start
    changed: list[str]  # fields of config.model that differ, but do not affect shapes


def fit_of(origin: Origin, model: ModelConfig, fresh_heads: bool) -> ParameterMapping:
    """Maps the parameters of a new model to the parameters of a trained model, without reading any parameters.

    Args:
      origin: location of the trained model (the start).
      model: config of the new model.
      fresh_heads: whether the heads may differ. If True, heads that the start lacks are initialized, and heads that the
        new model lacks are unused. If False, different heads raise UserError.

    Raises:
      UserError: names or shapes of the parameters differ between the start and the new model.
    """
    if not origin.steps:
        source = weights.open_start(origin.directory, model, fresh_heads)
        return _fit(_shapes(source.config), model, source.missing_head_paths, [])
    experiment = experiment_of(origin)
    _check_plain(origin, experiment)
    their_model = experiment.model if model.generator is not None else _task_config(experiment.model)
    their_shapes, ours = _shapes(their_model), _shapes(model)
    mismatched = [
        path for path, shape in ours.items() if their_shapes.get(_source_path(path, their_shapes, model)) != shape
    ]
    heads = head_modules(model) if fresh_heads else set()
    changed = [name for name in differences(their_model, model) if not weights.is_head(name)]
    fit = _fit(their_shapes, model, [path for path in mismatched if path.partition("/")[0] in heads], changed)
    unmatched = [path for path in mismatched if path in fit.sources]
    their_heads, no_decoder = head_modules(their_model), weights.takes_encoder(their_model, model)
    for path in fit.unused_paths:
        is_optional = path.partition("/")[0] in their_heads or (no_decoder and path.startswith("decoder"))
        if not (fresh_heads and is_optional):
            unmatched.append(path)
    if unmatched:
        names = differences(their_model, model)
        raise weights.other_architecture(origin.directory, their_model, model, names, unmatched)
    return fit


def _fit(
    their_shapes: Mapping[str, tuple[int, ...]], model: ModelConfig, lacking: list[str], changed: list[str]
) -> ParameterMapping:
    sources = {path: _source_path(path, their_shapes, model) for path in _shapes(model) if path not in lacking}
    return ParameterMapping(sources, lacking, [path for path in their_shapes if path not in sources.values()], changed)


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {path: x.shape for path, x in flat(models.abstract_params(model)).items()}


def _check_plain(origin: Origin, experiment: Experiment) -> None:
    if not has_plain_model(experiment):
        raise UserError(
            f"{origin.directory} is a run with {experiment.tuning}, which cannot be merged into a plain model: start "
            f"from {experiment.checkpoint.init_from}"
        )


def _source_path(path: str, their_paths: Container[str], model: ModelConfig) -> str:
    """Maps the path of a parameter in a new model to the path that it is initialized from in a trained model.

    If the trained model has no classifier, the new classifier's pooler is initialized from the pair head, which
    contains the pooler in BERT.

    Args:
      path: parameter path in the new model.
      their_paths: parameter paths of the trained model.
      model: config of the new model.
    """
    if path in their_paths or not _has_pooler(model):
        return path
    return path.replace("classifier/dense/", "pair_head/dense/")


def _has_pooler(model: ModelConfig) -> bool:
    return isinstance(model.head, Classify) and (model.head.hidden, model.head.pooling) == ("tanh", "cls")


def task_head_paths(fit: ParameterMapping, model: ModelConfig) -> list[str]:
    """Returns the paths of the task-head parameters that are copied from a trained model, except for the pooler.

    With these parameters, the new model makes the same predictions as the trained model.

    Args:
      fit: result of `fit_of`.
      model: config of the new model.
    """
    heads = {name for head in heads_of(model) if head.loss_name == "label_loss" for name in head.modules(model)}
    return [
        path
        for path, name in fit.sources.items()
        if name == path and path.partition("/")[0] in heads and not (_has_pooler(model) and "/dense/" in path)
    ]


def reinitialized_head_paths(origin: Origin, fit: ParameterMapping, experiment: Experiment) -> list[str]:
    """Returns the paths of the task-head parameters that a run must initialize instead of copying them.

    The result is [] if the run and the trained model have the same kind of task and the same labels. Otherwise it is
    `task_head_paths`. A trained model without label names matches any labels.

    Args:
      origin: location of the trained model that the run is initialized from.
      fit: result of `fit_of`.
      experiment: config of the run.
    """
    theirs, ours = labels_of(origin), tuple(getattr(experiment.objective, "labels", ()))
    head_kinds = [(type(model.head), getattr(model.head, "kind", "")) for model in (model_at(origin), experiment.model)]
    is_same = head_kinds[0] == head_kinds[1] and (theirs is None or theirs == ours)
    return [] if is_same else task_head_paths(fit, experiment.model)


# --- loading ---------------------------------------------------------------------------------------------------------


def load_start(origin: Origin, model: ModelConfig, abstract: PyTree, fresh: Optional[Initializer] = None) -> Params:
    """Loads the parameters of a plain model from a trained model; each device reads its own shards.

    A plain model has no parameter-efficient tuning.

    Args:
      origin: location of the trained model.
      model: config of the plain model.
      abstract: jax.ShapeDtypeStructs with shardings, for the parameters of the plain model.
      fresh: function that initializes heads that the trained model lacks. If None, the heads must match exactly.

    Raises:
      UserError: the parameters do not match (see `fit_of`), or the files are damaged.
    """
    if not origin.steps:
        return weights.load_params(origin.directory, model, abstract, fresh)
    fit, experiment = fit_of(origin, model, fresh is not None), experiment_of(origin)
    mesh = jax.tree.leaves(abstract)[0].sharding.mesh
    params = load_run(origin.directory, experiment, origin.steps, mesh, origin.folder, is_start=True)
    if experiment.model.generator is not None and model.generator is None:
        _, params = electra.discriminator(experiment.model, params)
    their_params, initialized = flat(params), fresh(fit.missing_head_paths) if fresh and fit.missing_head_paths else {}
    leaves = [
        initialized[path] if path in initialized else their_params[fit.sources[path]]
        for path in parameter_names(abstract)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def load_run(
    workdir: str,
    experiment: Experiment,
    steps: Sequence[str],
    mesh: jax.sharding.Mesh,
    folder: str = TRAINED,
    is_start: bool = False,
) -> Params:
    """Loads the parameters of a run; with `config.tuning`, merges the trained parameters into the base model.

    If the trained parameters cannot be merged, the result contains both the base model's parameters and the trained
    parameters.

    Args:
      experiment: config of the run, without phases.
      steps, folder: as in `checkpoints.params.load_steps`.
      is_start: whether the parameters initialize another model. If True, their shapes need not be divisible by the mesh
        axes.
    """
    abstract = models.abstract_params(experiment.model)
    placed = placed_start(abstract, mesh) if is_start else _placed(abstract, mesh)
    if experiment.tuning is None:
        return load_plain(steps, placed, folder)
    model = cast(adapt.Tuning, experiment.tuning).adapted(models.build(experiment.model, Compute()), experiment)
    trained = jax.eval_shape(lambda params: model.start(params, jax.random.key(0)), placed)
    trained = load_steps(steps, _placed(trained, mesh), folder)
    fresh = zeros_of(placed) if experiment.initializes_missing_heads else None  # the heads are trained in this case
    frozen = model.frozen(load_start(load_recorded_start(workdir), experiment.model, placed, fresh))
    return model.merged(trained, frozen)[1]


def load_plain(steps: Sequence[str], params: Params, folder: str = TRAINED) -> Params:
    """Loads the stored parameters of a run, except for the projections that distillation adds to a student.

    Parameters trained with `config.tuning` are not merged into the base model.

    Args:
      steps, folder: as in `checkpoints.params.load_steps`.
      params: jax.ShapeDtypeStructs with shardings.
    """
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    shapes = {
        path: shape for path, shape in stored_shapes(steps[0], folder).items() if path.startswith(f"{PROJECTIONS}/")
    }
    loaded = load_steps(steps, {**params, **_placed(nested(shapes), mesh)}, folder)
    return without_projections(loaded)


def _placed(params: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    return with_shardings(params, tree_shardings(mesh, params))


def placed_start(params: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """Adds shardings over `mesh` to parameter shapes, which need not be divisible by the mesh axes."""
    return with_shardings(params, divided_shardings(mesh, params))


def zeros_of(abstract: PyTree) -> Initializer:
    """Returns an initializer that fills parameters with zeros, for heads that are unused or initialized later.

    Args:
      abstract: jax.ShapeDtypeStructs with shardings.
    """
    shapes = flat(abstract)
    return lambda paths: {path: jnp.zeros(shapes[path].shape, device=shapes[path].sharding) for path in paths}


# --- recorded starts -------------------------------------------------------------------------------------------------


def record_start(workdir: str, start: Origin, name: str = START, adapted: Optional[dict] = None) -> None:
    """Records the start or the teacher of a run in the run's folder.

    The record contains the location of the trained model and a digest of its parameter files. The location is the name
    and commit of a Hub model, the URL of a run in an object store, or an absolute path.

    Args:
      start: location of the trained model.
      name: name of the file, START or TEACHER_START.
      adapted: the source of each parameter (`ConversionPlan.report`), or None without adaptations.
    """
    start = dataclasses.replace(start, directory=os.path.abspath(start.directory))
    location = {"directory": start.hub or with_urls(start.directory), "steps": list(map(step_of, start.steps))}
    content = {**location, "folder": start.folder, "sha256": _digest(start)}
    content |= {} if adapted is None else {"adapted": adapted}
    write_atomically(os.path.join(workdir, name), json.dumps(content, indent=1) + "\n")


def load_recorded_start(workdir: str, name: str = START) -> Origin:
    """Returns the recorded location of a run's initial model or teacher, after verifying its digest.

    Args:
      workdir: folder of the run.
      name: name of the file with the record, START or TEACHER_START.

    Raises:
      UserError: the record is missing or invalid, or the trained model no longer exists or has changed.
    """
    path = os.path.join(workdir, name)
    record = read_object(path) if os.path.exists(path) else {}
    directory, steps, folder = (record.get(field) for field in ("directory", "steps", "folder"))
    if not (isinstance(directory, str) and isinstance(steps, list) and isinstance(folder, str)):
        raise UserError(
            f"{workdir} is a run that {_DEPENDENCIES[name]} another model, but {name} is missing or invalid"
        )
    description = f"step {' and '.join(map(str, steps))} of {directory}" if steps else directory
    requirement = f"{workdir} {_DEPENDENCIES[name]} {description}"
    try:
        local_directory = local_path(url_of_old_copy(directory) or directory)
        checkpoints = tuple(find_checkpoint(local_directory, step, parameter_files(folder)) for step in steps)
        start = Origin(local_directory, checkpoints, description, folder, directory if is_hub(directory) else None)
        digest = _digest(start)
    except (UserError, OSError) as e:
        raise UserError(f"{requirement}, which cannot be read: restore it ({e})") from e
    if digest != record.get("sha256"):
        raise UserError(f"{requirement}, which is not what it was when the run started: restore it")
    return start


def _digest(start: Origin) -> str:
    """Computes the SHA-256 digest of a Hugging Face directory's files, or of the manifests of a run's checkpoints.

    For a run with `config.tuning`, the digest also covers the base model.
    """
    digest = hashlib.sha256()
    names = [os.path.join(step, MANIFEST) for step in start.steps]
    if not start.steps:
        complete(start.directory)
        files = sorted(name for name in os.listdir(start.directory) if name.endswith(".safetensors"))
        names = [os.path.join(start.directory, name) for name in ("config.json", *files)]
    elif experiment_of(start).tuning is not None:
        digest.update(_digest(load_recorded_start(start.directory)).encode())
    for name in names:
        with open(name, "rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()
