"""Loads the parameters that a run is initialized from: of another run, or of a Hugging Face directory.

In this file, the start of a run is the model that its parameters are initialized from (`config.checkpoint.init_from`).
A run with parameter-efficient tuning stores only its trained parameters. It reads all other parameters from its start
whenever it is resumed or loaded. The file `start.json` in the folder of the run records the checkpoints of the start
and a digest of their files. `teacher.json` does the same for the teacher of a student. If the start has a different
family or shape, `start.json` also records the source of each parameter.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple, Optional, cast

import jax
import jax.numpy as jnp

from pretrainax import adapt, config, models
from pretrainax.checkpoints.manifest import MANIFEST
from pretrainax.checkpoints.params import TRAINED, Initializer, Params, load_steps
from pretrainax.checkpoints.run_json import stored_shapes
from pretrainax.checkpoints.steps import find_checkpoint, parameter_files, step_of
from pretrainax.config import Classify, Experiment, HeadConfig, ModelConfig, UserError, config_at_checkpoint
from pretrainax.distill.distilled import MAPS, without_maps
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object
from pretrainax.files.paths import is_hub
from pretrainax.interop import weights
from pretrainax.interop.architectures import describe_model, described_model, read_config_json
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

# Files in the folder of a run that record its start and its teacher.
START, TEACHER_START = "start.json", "teacher.json"
_NEEDS = {
    START: "stores what its tuning has trained, and needs the rest from",
    TEACHER_START: "learns from the teacher of config.distill, and needs",
}


# --- the config of a start -------------------------------------------------------------------------------------------


class StartModel(NamedTuple):
    """The model config and tokenizer of a trained model, from which the config of another run is created."""

    model: ModelConfig  # without pretraining heads
    tokenizer: TokenizerConfig
    classes: tuple[TaskClass, ...]  # classes of transformers with task heads, for this family; (): none

    def with_head(self, usual: HeadConfig) -> ModelConfig:
        """Returns the model config with the task head of the corresponding transformers class.

        The transformers class is the class with a head of the same type as `usual`. If it changes further fields of the
        config, these fields are changed too, unless the change would affect the shapes of the parameters.

        Args:
          usual: the head if there is no such class.
        """
        classifier = next((x for x in self.classes if type(x.head) is type(usual)), None)
        if classifier is None:
            return dataclasses.replace(self.model, head=usual.left_open())
        changed = classifier.apply_to(self.model)
        fits = not classifier.changes or _shapes(changed) == _shapes(self.model)
        return dataclasses.replace(changed if fits else self.model, head=dataclasses.replace(classifier.head))


def start_model_of(name: str) -> StartModel:
    """Returns the model config, tokenizer and transformers classes of a trained model.

    Args:
      name: name of the model in the notation of `interop.origin`.

    Raises:
      UserError: the model does not exist or cannot be used.
    """
    origin = find_origin(name)
    if origin.steps:
        model, folder = _single(experiment_of(origin).model), os.path.join(origin.directory, "tokenizer")
        try:
            family = describe_model(model, None)[0]
        except UserError:  # transformers has no such model
            family = None
    else:
        (family, model), folder = described_model(read_config_json(origin.directory)), origin.directory
    classes = () if family is None else tuple(family.classifiers)
    path = name if is_hub(name) else os.path.abspath(folder)
    return StartModel(without_heads(model), PretrainedTokenizer(path=path), classes)


def experiment_of(origin: Origin) -> Experiment:
    """Returns the config with which the checkpoints of a run were trained.

    Args:
      origin: location of the checkpoints. If the run has phases, the config is the config of their phase.

    Raises:
      UserError: the config describes no valid model.
    """
    experiment = config.load(path := os.path.join(origin.directory, "config.json"))
    experiment = config_at_checkpoint(experiment, list(map(step_of, origin.steps)))
    try:
        models.abstract_params(experiment.model)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise UserError(f"{path} describes no model: a wrong value in config.model ({e})") from e
    return experiment


def model_at(origin: Origin) -> ModelConfig:
    """Returns the model config of a run or a Hugging Face directory; for ELECTRA, the config of its discriminator."""
    if origin.steps:
        return _single(experiment_of(origin).model)
    return described_model(read_config_json(origin.directory))[1]


def labels_of(origin: Origin) -> Optional[tuple[str, ...]]:
    """Returns the label names of the task of a trained model, in order.

    Returns:
      The names; () for a run whose task has no labels. None for a Hugging Face directory without label names, or with
      only the default names LABEL_0, LABEL_1 etc.
    """
    if origin.steps:
        return tuple(getattr(experiment_of(origin).objective, "labels", ()))
    names = weights.label_names(read_config_json(origin.directory))
    return None if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def _single(model: ModelConfig) -> ModelConfig:
    """Returns the model config for other tasks: of the discriminator of ELECTRA, otherwise `model` itself."""
    return model if model.generator is None else electra.discriminator_config(model)


# --- matching parameters ---------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """The mapping between the parameters of a new model and of its start: the model that it is initialized from."""

    sources: dict[str, str]  # path in the new model -> path in the start
    lacking: list[str]  # head parameters that the start lacks or has in another shape; they are initialized
    left_out: list[str]  # parameters of the start that are not used
    changed: list[str]  # fields of config.model that differ, but do not affect shapes


def fit_of(origin: Origin, model: ModelConfig, fresh_heads: bool) -> Fit:
    """Returns the mapping between the parameters of a new model and of the trained model that it is initialized from.

    The parameters themselves are not read.

    Args:
      origin: location of the trained model (the start).
      model: config of the new model.
      fresh_heads: True allows heads of the start to be unused, and heads that the start lacks to be initialized.

    Raises:
      UserError: the parameters of the start do not match the parameters of the new model.
    """
    if not origin.steps:
        source = weights.open_start(origin.directory, model, fresh_heads)
        return _fit(_shapes(source.config), model, source.lacking, [])
    experiment = experiment_of(origin)
    _check_plain(origin, experiment)
    their_model = experiment.model if model.generator is not None else _single(experiment.model)
    there, ours = _shapes(their_model), _shapes(model)
    mismatched = [path for path, shape in ours.items() if there.get(_name_there(path, there, model)) != shape]
    heads = head_modules(model) if fresh_heads else set()
    changed = [name for name in differences(their_model, model) if not weights.is_head(name)]
    fit = _fit(there, model, [path for path in mismatched if path.partition("/")[0] in heads], changed)
    unmatched = [path for path in mismatched if path in fit.sources]
    their_heads, no_decoder = head_modules(their_model), weights.takes_encoder(their_model, model)
    for path in fit.left_out:
        is_optional = path.partition("/")[0] in their_heads or (no_decoder and path.startswith("decoder"))
        if not (fresh_heads and is_optional):
            unmatched.append(path)
    if unmatched:
        names = differences(their_model, model)
        raise weights.other_architecture(origin.directory, their_model, model, names, unmatched)
    return fit


def _fit(there: Mapping[str, tuple[int, ...]], model: ModelConfig, lacking: list[str], changed: list[str]) -> Fit:
    taken = {path: _name_there(path, there, model) for path in _shapes(model) if path not in lacking}
    return Fit(taken, lacking, [path for path in there if path not in taken.values()], changed)


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {path: x.shape for path, x in flat(models.abstract_params(model)).items()}


def _check_plain(origin: Origin, experiment: Experiment) -> None:
    if experiment.tuning is not None and not cast(adapt.Tuning, experiment.tuning).is_mergeable:
        raise UserError(
            f"{origin.directory} is a run with {experiment.tuning}, which cannot be merged into a plain model: start "
            f"from {experiment.checkpoint.init_from}"
        )


def _name_there(path: str, there: Container[str], model: ModelConfig) -> str:
    """Returns the path that a parameter of the new model has in the trained model that it is initialized from.

    The pooler of a classifier comes from the pair head if the trained model has no classifier, because BERT's pair head
    contains the pooler.

    Args:
      path: path in the new model.
      there: paths of the trained model.
      model: config of the new model.
    """
    if path in there or not _has_pooler(model):
        return path
    return path.replace("classifier/dense/", "pair_head/dense/")


def _has_pooler(model: ModelConfig) -> bool:
    return isinstance(model.head, Classify) and (model.head.hidden, model.head.pooling) == ("tanh", "cls")


def task_head_paths(fit: Fit, model: ModelConfig) -> list[str]:
    """Returns the paths of task-head parameters that are copied from a trained model, without the pooler.

    With these parameters, the new model gives the same predictions as the trained model.

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


def reinitialized_head_paths(origin: Origin, fit: Fit, experiment: Experiment) -> list[str]:
    """Returns the paths of task-head parameters that must not be copied, because they are for a different task.

    The result is `task_head_paths` if the kind of the task or its labels differ between the run and the trained model,
    and [] if they agree. Labels without names agree with all labels.

    Args:
      origin: location of the trained model that the run is initialized from.
      fit: result of `fit_of`.
      experiment: config of the run.
    """
    theirs, ours = labels_of(origin), tuple(getattr(experiment.objective, "labels", ()))
    kinds = [(type(model.head), getattr(model.head, "kind", "")) for model in (model_at(origin), experiment.model)]
    is_same = kinds[0] == kinds[1] and (theirs is None or theirs == ours)
    return [] if is_same else task_head_paths(fit, experiment.model)


# --- loading ---------------------------------------------------------------------------------------------------------


def load_start(origin: Origin, model: ModelConfig, abstract: PyTree, fresh: Optional[Initializer] = None) -> Params:
    """Returns the parameters of a plain model, read from the trained model that it is initialized from.

    Each device reads its own shards.

    Args:
      origin: location of the trained model.
      model: config of the plain model.
      abstract: jax.ShapeDtypeStructs with shardings, for the parameters of the plain model.
      fresh: initializes heads that the trained model lacks; None: the heads must match exactly.

    Raises:
      UserError: for the same reasons as in `fit_of`, or because the files are damaged.
    """
    if not origin.steps:
        return weights.load_params(origin.directory, model, abstract, fresh)
    fit, experiment = fit_of(origin, model, fresh is not None), experiment_of(origin)
    mesh = jax.tree.leaves(abstract)[0].sharding.mesh
    params = load_run(origin.directory, experiment, origin.steps, mesh, origin.folder, is_start=True)
    if experiment.model.generator is not None and model.generator is None:
        _, params = electra.discriminator(experiment.model, params)
    there, drawn = flat(params), fresh(fit.lacking) if fresh and fit.lacking else {}
    leaves = [drawn[path] if path in drawn else there[fit.sources[path]] for path in parameter_names(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def load_run(
    workdir: str,
    experiment: Experiment,
    steps: Sequence[str],
    mesh: jax.sharding.Mesh,
    folder: str = TRAINED,
    is_start: bool = False,
) -> Params:
    """Loads the parameters of a run. With `config.tuning`, the trained parameters are merged into the base model.

    If they cannot be merged, the result contains them in addition to the parameters of the base model.

    Args:
      experiment: config of the run, without phases.
      steps, folder: as in `checkpoints.params.load_steps`.
      is_start: another model is initialized from this run, so the mesh need not divide the parameter shapes of this
        run.
    """
    abstract = models.abstract_params(experiment.model)
    placed = placed_start(abstract, mesh) if is_start else _placed(abstract, mesh)
    if experiment.tuning is None:
        return load_plain(steps, placed, folder)
    model = cast(adapt.Tuning, experiment.tuning).adapted(models.build(experiment.model, Compute()), experiment)
    trained = jax.eval_shape(lambda params: model.start(params, jax.random.key(0)), placed)
    trained = load_steps(steps, _placed(trained, mesh), folder)
    fresh = zeros_of(placed) if experiment.draws_heads else None  # the heads are trained in this case
    frozen = model.frozen(load_start(load_recorded_start(workdir), experiment.model, placed, fresh))
    return model.merged(trained, frozen)[1]


def load_plain(steps: Sequence[str], params: Params, folder: str = TRAINED) -> Params:
    """Loads the parameters of a run as stored, but without the projections that distillation adds to a student.

    Args:
      steps, folder: as in `checkpoints.params.load_steps`.
      params: jax.ShapeDtypeStructs with shardings.
    """
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    shapes = {path: shape for path, shape in stored_shapes(steps[0], folder).items() if path.startswith(f"{MAPS}/")}
    loaded = load_steps(steps, {**params, **_placed(nested(shapes), mesh)}, folder)
    return without_maps(loaded)


def _placed(params: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    return with_shardings(params, tree_shardings(mesh, params))


def placed_start(params: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """Returns the shapes of parameters with shardings over a mesh that need not divide the shapes."""
    return with_shardings(params, divided_shardings(mesh, params))


def zeros_of(abstract: PyTree) -> Initializer:
    """Returns a function that initializes parameters with zeros, for heads that are unused or initialized later.

    Args:
      abstract: jax.ShapeDtypeStructs with shardings.
    """
    shapes = flat(abstract)
    return lambda paths: {path: jnp.zeros(shapes[path].shape, device=shapes[path].sharding) for path in paths}


# --- recorded starts -------------------------------------------------------------------------------------------------


def record_start(workdir: str, start: Origin, name: str = START, adapted: Optional[dict] = None) -> None:
    """Writes a record of the trained model that a run is initialized from, or of its teacher, to the folder of the run.

    The record contains the name and commit of a hub model, or the URL of a run in an object store. It also contains a
    digest of the parameter files.

    Args:
      start: location of the trained model.
      name: of the file, START or TEACHER_START.
      adapted: source of each parameter, if an adaptation converted the parameters; None: no adaptation.
    """
    start = dataclasses.replace(start, directory=os.path.abspath(start.directory))
    where = {"directory": start.hub or with_urls(start.directory), "steps": list(map(step_of, start.steps))}
    content = {**where, "folder": start.folder, "sha256": _digest(start)}
    content |= {} if adapted is None else {"adapted": adapted}
    write_atomically(os.path.join(workdir, name), json.dumps(content, indent=1) + "\n")


def load_recorded_start(workdir: str, name: str = START) -> Origin:
    """Returns the location of the trained model that a run was initialized from, or of its teacher, as recorded.

    Args:
      workdir: folder of the run.
      name: of the file with the record, START or TEACHER_START.

    Raises:
      UserError: the record is invalid, or the trained model no longer exists or has changed.
    """
    path = os.path.join(workdir, name)
    record = read_object(path) if os.path.exists(path) else {}
    directory, steps, folder = (record.get(field) for field in ("directory", "steps", "folder"))
    if not (isinstance(directory, str) and isinstance(steps, list) and isinstance(folder, str)):
        raise UserError(f"{workdir} is a run that {_NEEDS[name]} another model, but {name} is missing or invalid")
    description = f"step {' and '.join(map(str, steps))} of {directory}" if steps else directory
    requirement = f"{workdir} {_NEEDS[name]} {description}"
    try:
        local = local_path(url_of_old_copy(directory) or directory)
        checkpoints = tuple(find_checkpoint(local, step, parameter_files(folder)) for step in steps)
        start = Origin(local, checkpoints, description, folder, directory if is_hub(directory) else None)
        digest = _digest(start)
    except (UserError, OSError) as e:
        raise UserError(f"{requirement}, which cannot be read: restore it ({e})") from e
    if digest != record.get("sha256"):
        raise UserError(f"{requirement}, which is not what it was when the run started: restore it")
    return start


def _digest(start: Origin) -> str:
    """Returns the SHA-256 of the files of a trained model; for checkpoints, of their manifests."""
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
