"""The parameters that a run starts from: those of another run, of one under tuning too, or a Hugging Face directory.

A run under tuning stores what it trains. What it does not train is read from its start whenever it is used, so
`start.json` in its folder says what that was: which checkpoints, and a digest of them. So does `teacher.json` of a
student's teacher. Of a start of another family or shape `start.json` says too what became of each parameter.
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
from pretrainax.checkpoints.params import TRAINED, Fresh, Params, load_steps
from pretrainax.checkpoints.run_json import stored_shapes
from pretrainax.checkpoints.steps import find_checkpoint, of_parameters, step_of
from pretrainax.config import Classify, Experiment, HeadConfig, ModelConfig, UserError, trained_as
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
from pretrainax.storage.places import complete, here, named
from pretrainax.tokenization import PretrainedTokenizer
from pretrainax.tokenization.choices import TokenizerConfig
from pretrainax.zoo.family import Classifier, differences, without_heads

# Files in the folder of a run that say which parameters of others it needs.
START, TEACHER_START = "start.json", "teacher.json"
_NEEDED = {
    START: "stores what its tuning has trained, and needs the rest from",
    TEACHER_START: "learns from the teacher of config.distill, and needs",
}


# --- what a config begins with ---------------------------------------------------------------------------------------


class Beginning(NamedTuple):
    """A trained model as a config of another run takes it up."""

    model: ModelConfig  # without the heads of its pretraining
    tokenizer: TokenizerConfig
    classes: tuple[Classifier, ...]  # of transformers, with heads of tasks, for the family

    def with_head(self, usual: HeadConfig) -> ModelConfig:
        """Returns the model with the head of a task as its class has it, or `usual` where there is none; and with the
        fields that have another value in this class, unless its parameters would be others."""
        found = next((x for x in self.classes if type(x.head) is type(usual)), None)
        if found is None:
            return dataclasses.replace(self.model, head=usual.left_open())
        changed = found.of_model(self.model)
        fits = not found.changes or _shapes(changed) == _shapes(self.model)
        return dataclasses.replace(changed if fits else self.model, head=dataclasses.replace(found.head))


def beginning_of(name: str) -> Beginning:
    """Returns what `name`, a run or a Hugging Face directory as `interop.origin` takes it, is to begin with.

    Raises:
      UserError: nothing is there, or nothing that can be used.
    """
    origin = find_origin(name)
    if origin.steps:
        model, folder = _single(experiment_of(origin).model), os.path.join(origin.directory, "tokenizer")
        try:
            family = describe_model(model, None)[0]
        except UserError:  # transformers has none like it
            family = None
    else:
        (family, model), folder = described_model(read_config_json(origin.directory)), origin.directory
    classes = () if family is None else tuple(family.classifiers)
    path = name if is_hub(name) else os.path.abspath(folder)
    return Beginning(without_heads(model), PretrainedTokenizer(path=path), classes)


def experiment_of(origin: Origin) -> Experiment:
    """Returns the config, without phases, that the checkpoints of a run were trained by."""
    experiment = config.load(path := os.path.join(origin.directory, "config.json"))
    experiment = trained_as(experiment, list(map(step_of, origin.steps)))
    try:
        models.abstract_params(experiment.model)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise UserError(f"{path} describes no model: a wrong value in config.model ({e})") from e
    return experiment


def model_at(origin: Origin) -> ModelConfig:
    """Returns the model that a start holds; of ELECTRA's two encoders the discriminator."""
    if origin.steps:
        return _single(experiment_of(origin).model)
    return described_model(read_config_json(origin.directory))[1]


def labels_of(origin: Origin) -> Optional[tuple[str, ...]]:
    """Returns the names of a task's answers in their order, () where it has none; None: nobody has named them."""
    if origin.steps:
        return tuple(getattr(experiment_of(origin).objective, "labels", ()))
    names = weights.label_names(read_config_json(origin.directory))
    return None if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def _single(model: ModelConfig) -> ModelConfig:
    """Returns the model that goes on to other tasks: of ELECTRA's two encoders the discriminator."""
    return model if model.generator is None else electra.discriminator_config(model)


# --- how it fits -----------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """Says which parameters of a start become those of a model, by their paths."""

    taken: dict[str, str]  # our path -> the path there
    lacking: list[str]  # of our heads, not there or of another shape: drawn anew
    left_out: list[str]  # of heads there
    changed: list[str]  # fields of config.model that compute something else, with all shapes as they were


def fit_of(origin: Origin, model: ModelConfig, fresh_heads: bool) -> Fit:
    """Returns how a model takes the parameters of a start; no number of them is read.

    Args:
      fresh_heads: heads may be left out, and others drawn anew.

    Raises:
      UserError: the start is of another model.
    """
    if not origin.steps:
        source = weights.open_start(origin.directory, model, fresh_heads)
        return _fit(_shapes(source.config), model, source.lacking, [])
    experiment = experiment_of(origin)
    _check_plain(origin, experiment)
    their_model = experiment.model if model.generator is not None else _single(experiment.model)
    there, ours = _shapes(their_model), _shapes(model)
    other = [path for path, shape in ours.items() if there.get(_name_there(path, there, model)) != shape]
    heads = head_modules(model) if fresh_heads else set()
    changed = [name for name in differences(their_model, model) if not weights.is_head(name)]
    fit = _fit(there, model, [path for path in other if path.partition("/")[0] in heads], changed)
    wrong = [path for path in other if path in fit.taken]
    their_heads, no_decoder = head_modules(their_model), weights.takes_encoder(their_model, model)
    for path in fit.left_out:
        is_optional = path.partition("/")[0] in their_heads or (no_decoder and path.startswith("decoder"))
        if not (fresh_heads and is_optional):
            wrong.append(path)
    if wrong:
        names = differences(their_model, model)
        raise weights.other_architecture(origin.directory, their_model, model, names, wrong)
    return fit


def _fit(there: Mapping[str, tuple[int, ...]], model: ModelConfig, lacking: list[str], changed: list[str]) -> Fit:
    taken = {path: _name_there(path, there, model) for path in _shapes(model) if path not in lacking}
    return Fit(taken, lacking, [path for path in there if path not in taken.values()], changed)


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {path: x.shape for path, x in flat(models.abstract_params(model)).items()}


def _check_plain(origin: Origin, experiment: Experiment) -> None:
    if experiment.tuning is not None and not cast(adapt.Tuning, experiment.tuning).is_mergeable:
        raise UserError(
            f"{origin.directory} is a run with {experiment.tuning}, of which there is no plain model: start from "
            f"{experiment.checkpoint.init_from}"
        )


def _name_there(path: str, there: Container[str], model: ModelConfig) -> str:
    """Returns the path of a parameter in a start: of a head's pooler perhaps the pair head's, which BERT trains."""
    if path in there or not _has_pooler(model):
        return path
    return path.replace("classifier/dense/", "pair_head/dense/")


def _has_pooler(model: ModelConfig) -> bool:
    return isinstance(model.head, Classify) and (model.head.hidden, model.head.pooling) == ("tanh", "cls")


def answers_taken(fit: Fit, model: ModelConfig) -> list[str]:
    """Returns the parameters of a task's head, but for a pooler, that a start has: with them a model answers as it."""
    heads = {name for head in heads_of(model) if head.loss_name == "label_loss" for name in head.modules(model)}
    return [
        path
        for path, name in fit.taken.items()
        if name == path and path.partition("/")[0] in heads and not (_has_pooler(model) and "/dense/" in path)
    ]


def answers_redrawn(origin: Origin, fit: Fit, experiment: Experiment) -> list[str]:
    """Returns those of `answers_taken` that mean something else in this run: another kind of answer, other labels."""
    theirs, ours = labels_of(origin), tuple(getattr(experiment.objective, "labels", ()))
    kinds = [(type(model.head), getattr(model.head, "kind", "")) for model in (model_at(origin), experiment.model)]
    is_same = kinds[0] == kinds[1] and (theirs is None or theirs == ours)
    return [] if is_same else answers_taken(fit, experiment.model)


# --- its numbers -----------------------------------------------------------------------------------------------------


def load_start(origin: Origin, model: ModelConfig, abstract: PyTree, fresh: Optional[Fresh] = None) -> Params:
    """Reads the parameters of a plain model that a run starts from, each device its own shards.

    Args:
      abstract: jax.ShapeDtypeStructs with shardings.
      fresh: gives the parameters of heads that the start lacks; None: it must have them all, and no others.

    Raises:
      UserError: as `fit_of` does, or the numbers are damaged.
    """
    if not origin.steps:
        return weights.load_params(origin.directory, model, abstract, fresh)
    fit, experiment = fit_of(origin, model, fresh is not None), experiment_of(origin)
    mesh = jax.tree.leaves(abstract)[0].sharding.mesh
    params = load_run(origin.directory, experiment, origin.steps, mesh, origin.folder, is_start=True)
    if experiment.model.generator is not None and model.generator is None:
        _, params = electra.discriminator(experiment.model, params)
    there, drawn = flat(params), fresh(fit.lacking) if fresh and fit.lacking else {}
    leaves = [drawn[path] if path in drawn else there[fit.taken[path]] for path in parameter_names(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def load_run(
    workdir: str,
    experiment: Experiment,
    steps: Sequence[str],
    mesh: jax.sharding.Mesh,
    folder: str = TRAINED,
    is_start: bool = False,
) -> Params:
    """Returns the parameters of a run; of one under tuning those that it trained, merged into those of its start.

    Where they cannot be merged, those that were added are beside the others.

    Args:
      experiment: the run's, without phases.
      steps, folder: as `checkpoints.params.load_steps` has them.
      is_start: of another model, which alone the mesh has to divide.
    """
    abstract = models.abstract_params(experiment.model)
    whole = placed_start(abstract, mesh) if is_start else _placed(abstract, mesh)
    if experiment.tuning is None:
        return load_plain(steps, whole, folder)
    model = cast(adapt.Tuning, experiment.tuning).adapted(models.build(experiment.model, Compute()), experiment)
    trained = jax.eval_shape(lambda params: model.start(params, jax.random.key(0)), whole)
    trained = load_steps(steps, _placed(trained, mesh), folder)
    fresh = zeros_of(whole) if experiment.draws_heads else None  # heads are trained then
    frozen = model.frozen(load_start(find_known_start(workdir), experiment.model, whole, fresh))
    return model.merged(trained, frozen)[1]


def load_plain(steps: Sequence[str], params: Params, folder: str = TRAINED) -> Params:
    """Returns the parameters of a run, without the maps that a student learns beside them.

    Args:
      steps, folder: as `checkpoints.params.load_steps` has them.
      params: jax.ShapeDtypeStructs with shardings.
    """
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    shapes = {path: shape for path, shape in stored_shapes(steps[0], folder).items() if path.startswith(f"{MAPS}/")}
    found = load_steps(steps, {**params, **_placed(nested(shapes), mesh)}, folder)
    return without_maps(found)


def _placed(params: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    return with_shardings(params, tree_shardings(mesh, params))


def placed_start(params: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """Returns the shapes of a start's parameters with shardings on the mesh of the run, which need not divide them."""
    return with_shardings(params, divided_shardings(mesh, params))


def zeros_of(abstract: PyTree) -> Fresh:
    """Returns what gives zeros for parameters that are of no use: heads that are drawn, or that nobody asks.

    abstract: jax.ShapeDtypeStructs with shardings.
    """
    shapes = flat(abstract)
    return lambda paths: {path: jnp.zeros(shapes[path].shape, device=shapes[path].sharding) for path in paths}


# --- which start that was --------------------------------------------------------------------------------------------


def remember_start(workdir: str, start: Origin, name: str = START, adapted: Optional[dict] = None) -> None:
    """Writes what a run has started from, or its teacher, into its folder, with a digest of it.

    Of a model of the hub that is its name with the commit, of a run in an object store its URL.

    adapted: what became of its parameters, where they are not those of the run.
    """
    start = dataclasses.replace(start, directory=os.path.abspath(start.directory))
    where = {"directory": start.hub or named(start.directory), "steps": list(map(step_of, start.steps))}
    content = {**where, "folder": start.folder, "sha256": _digest(start)}
    content |= {} if adapted is None else {"adapted": adapted}
    write_atomically(os.path.join(workdir, name), json.dumps(content, indent=1) + "\n")


def find_known_start(workdir: str, name: str = START) -> Origin:
    """Returns what a run under tuning has started from, or a student's teacher; UserError where that is not there any
    more, or not the same."""
    path = os.path.join(workdir, name)
    known = read_object(path) if os.path.exists(path) else {}
    directory, steps, folder = (known.get(field) for field in ("directory", "steps", "folder"))
    if not (isinstance(directory, str) and isinstance(steps, list) and isinstance(folder, str)):
        raise UserError(f"{workdir} is a run that {_NEEDED[name]} another model, and no {name} there says which")
    description = f"step {' and '.join(map(str, steps))} of {directory}" if steps else directory
    needed = f"{workdir} {_NEEDED[name]} {description}"
    try:
        local = here(url_of_old_copy(directory) or directory)
        found = tuple(find_checkpoint(local, step, of_parameters(folder)) for step in steps)
        start = Origin(local, found, description, folder, directory if is_hub(directory) else None)
        digest = _digest(start)
    except (UserError, OSError) as e:
        raise UserError(f"{needed}, which cannot be read: put it back ({e})") from e
    if digest != known.get("sha256"):
        raise UserError(f"{needed}, which is not what it was when the run started: put that back")
    return start


def _digest(start: Origin) -> str:
    """Returns the SHA-256 of the files of a start: of a checkpoint, which is compared with it, its manifest."""
    digest = hashlib.sha256()
    names = [os.path.join(step, MANIFEST) for step in start.steps]
    if not start.steps:
        complete(start.directory)
        found = sorted(name for name in os.listdir(start.directory) if name.endswith(".safetensors"))
        names = [os.path.join(start.directory, name) for name in ("config.json", *found)]
    elif experiment_of(start).tuning is not None:
        digest.update(_digest(find_known_start(start.directory)).encode())
    for name in names:
        with open(name, "rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()
