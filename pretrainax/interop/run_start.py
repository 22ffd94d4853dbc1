"""Initializes a run from trained parameters (`config.checkpoint.init_from`), and loads the teacher of a student."""

import os
from collections.abc import Iterable
from typing import Optional, cast

import jax

from pretrainax import models
from pretrainax.checkpoints.params import Params
from pretrainax.checkpoints.steps import list_steps
from pretrainax.config import AUTO, Experiment, TrainConfig
from pretrainax.distill import TEACHER, Distillation
from pretrainax.interop.adaptations import Adaptation, WiderVocabulary
from pretrainax.interop.adapted_start import ConversionPlan, adapted_start
from pretrainax.interop.origin import Origin, find_origin
from pretrainax.interop.start import (
    TEACHER_START,
    load_recorded_start,
    load_start,
    placed_start,
    record_start,
    reinitialized_head_paths,
    task_head_paths,
    zeros_of,
)
from pretrainax.interop.teacher import find_teacher, teacher_of
from pretrainax.interop.tokenizer_check import check_tokenizer_of, has_tokenizer
from pretrainax.models import AnyModel
from pretrainax.runtime.agreement import check_same
from pretrainax.sharding.rules import tree_shardings
from pretrainax.training import train_step
from pretrainax.training.run import Run
from pretrainax.training.start import Row, Start
from pretrainax.training.wrapped import Wrapped, plain, teacher_config, trained_model


class TrainedStart(Start):
    """Initializes runs from trained parameters; the subclass of `training.start.Start` that all commands use."""

    def model(self, experiment: Experiment, train: TrainConfig) -> AnyModel:
        return trained_model(experiment, train, teacher_of(experiment))

    def describe(self, experiment: Experiment, workdir: str) -> list[Row]:
        """Checks the teacher of a run, and describes the trained model that a new run is initialized from.

        Returns:
          Table rows for the run header, or [] if the run resumes from its own checkpoints or its parameters are
          initialized randomly.

        Raises:
          UserError: the run cannot be initialized from the trained model, or the student cannot learn from the teacher.
        """
        teacher_of(experiment)
        model, checkpoint, checkpoints = experiment.model, experiment.checkpoint, os.path.join(workdir, "checkpoints")
        if not checkpoint.init_from or (os.path.isdir(checkpoints) and list_steps(checkpoints)):
            return []
        if AUTO in (model.vocab_size, model.position.max_length):  # the vocabulary exists only after data preparation
            return [("start", f"from {checkpoint.init_from}")]
        origin = find_origin(os.path.expanduser(checkpoint.init_from))
        start = _start_for_run(origin, experiment)
        changed = [f"config.model.{name}" for name in start.fit.changed]
        copied_heads = [path for path in task_head_paths(start.fit, experiment.model) if path not in start.drawn]
        paths_by_label = {
            "fresh": _modules(start.drawn),
            "with its answers": _modules(copied_heads),
            "left out": _modules(start.unused_paths),
            "computes otherwise": changed,
        }
        details = (f"{label}: {', '.join(names)}" for label, names in paths_by_label.items() if names)
        return [("start", "; ".join([f"from {origin.description}", *details])), *_adaptation_rows(start)]

    def read_frozen(self, run: Run, workdir: str, is_new: bool) -> None:
        """Loads the frozen parameters of a run: its teacher, and its base model if `config.tuning` is set.

        A new run loads the teacher that `config.distill` names. Its base model is loaded by the method
        `params`. A resumed run loads the teacher and the base model that are recorded in its folder.
        """
        if run.experiment.distill is not None:
            _read_teacher(run, workdir, is_new)
        if run.experiment.tuning is not None and not is_new:
            _split_trained(run, _load_all(load_recorded_start(workdir), run))

    def params(self, run: Run, workdir: str) -> Optional[Params]:
        """Loads the initial values of a run's trained parameters from `config.checkpoint.init_from`.

        Parameters that the run does not train are frozen in `run`. The method also records the trained model in the
        run's folder if the run needs this model again on resume, or if the model may change later.

        Args:
          workdir: folder of the run; if "", nothing is recorded.

        Returns:
          The parameters, or None if `config.checkpoint.init_from` is "".
        """
        init_from = run.experiment.checkpoint.init_from
        if not init_from:
            return None
        if run.experiment.tuning is not None and run.frozen is not None:  # a rollback reads the recorded base model
            return _split_trained(run, _load_all(load_recorded_start(workdir), run))
        start = find_origin(os.path.expanduser(init_from))
        _check_commit("config.checkpoint.init_from", start)
        if has_tokenizer(start):
            may_grow = any(isinstance(adaptation, WiderVocabulary) for adaptation in run.experiment.checkpoint.adapt)
            check_tokenizer_of(start, run.prepared.tokenizer, "config.checkpoint.init_from:", may_grow)
        records_start = run.is_primary and bool(workdir)
        if run.experiment.checkpoint.adapt and records_start:
            record_start(workdir, start, adapted=_start_for_run(start, run.experiment).report)
        elif start.hub and run.experiment.tuning is None and records_start:  # a branch of the hub may change
            record_start(workdir, start)
        params = _split_trained(run, _load_all(start, run))
        if run.experiment.tuning is not None and records_start:
            record_start(workdir, start)
        return params


def _start_for_run(origin: Origin, experiment: Experiment) -> ConversionPlan:
    """Returns the plan that converts the parameters of a trained model to the initial parameters of a run.

    Task-head parameters are initialized randomly if the run and the trained model differ in their task or labels.
    """
    model, adaptations = experiment.model, cast(tuple[Adaptation, ...], experiment.checkpoint.adapt)
    start = adapted_start(origin, model, adaptations, experiment.initializes_missing_heads)
    return start.without(reinitialized_head_paths(origin, start.fit, experiment))


def _adaptation_rows(start: ConversionPlan) -> list[tuple[str, str]]:
    """Describes adaptations as table rows: their effects, and the modules that are copied or converted.

    Returns [] if there are no adaptations. Initialized parameters are listed in the first row of
    `TrainedStart.describe` instead.
    """
    if not start.effects:
        return []
    converted: dict[str, list[str]] = {}
    for path, rule in start.rules.items():
        if rule.operations:
            converted.setdefault(rule.description, []).append(path)
    rows = [("adapted", effect) for effect in start.effects]
    rows.append(("copied", ", ".join(_modules(start.copied)) or "nothing"))
    return rows + [("made", f"{', '.join(_modules(paths))}: {how}") for how, paths in converted.items()]


def _modules(paths: Iterable[str]) -> list[str]:
    """Returns the paths of the modules that contain the parameters at `paths`, without duplicates."""
    return list(dict.fromkeys(path.rpartition("/")[0] for path in paths))


def _read_teacher(run: Run, workdir: str, is_new: bool) -> None:
    """Loads the teacher's parameters, and freezes them in the run.

    A new run loads the teacher that `config.distill` names, and records this teacher in its folder. A resumed run loads
    the recorded teacher.

    Raises:
      UserError: the teacher no longer exists, has changed, or has a different tokenizer.
    """
    distillation, teacher = cast(Distillation, run.experiment.distill), teacher_config(run.model)
    assert teacher is not None and run.abstract_frozen is not None  # because the run has `config.distill`
    origin = find_teacher(distillation) if is_new else load_recorded_start(workdir, TEACHER_START)
    _check_commit("config.distill.teacher", origin)
    check_tokenizer_of(origin, run.prepared.tokenizer, "the teacher")
    abstract = run.abstract_frozen[TEACHER]
    # Without soft targets, the heads of the teacher are unused, so missing heads are filled with zeros.
    params = load_start(origin, teacher, abstract, None if distillation.soft else zeros_of(abstract))
    run.freeze({TEACHER: params})
    if is_new and run.is_primary:
        record_start(workdir, origin, TEACHER_START)


def _check_commit(field: str, origin: Origin) -> None:
    """Raises UserError if the hosts of a run resolved the Hub branch in config field `field` to different commits."""
    check_same(field, origin.hub or origin.description, "give a commit, such as hf:org/name@1a2b…")


def _load_all(start: Origin, run: Run) -> Params:
    """Loads all parameters of a run's model, trained and frozen, converted from the trained model at `start`."""
    adapted = _start_for_run(start, run.experiment)
    abstract = placed_start(models.abstract_params(adapted.model), run.mesh)
    fresh = zeros_of(abstract) if run.experiment.initializes_missing_heads else None
    initialized = run.fresh_params(adapted.drawn) if adapted.drawn else {}
    shardings = tree_shardings(run.mesh, train_step.abstract_params(plain(run.model), run.batch_shapes))
    return adapted.take(load_start(start, adapted.model, abstract, fresh), shardings, initialized)


def _split_trained(run: Run, params: Params) -> Params:
    """Freezes the parameters that a run does not train, and returns the initial values of all other parameters.

    Without `config.tuning`, all parameters are trained.

    Args:
      params: all parameters of the model.
    """
    model = run.model
    if not isinstance(model, Wrapped):
        return params
    if (frozen := model.frozen(params)) is not None:
        run.freeze(frozen)
    key = train_step.init_key(run.experiment.train.seed_of("init"))
    shardings = tree_shardings(run.mesh, run.abstract_state.params)
    return jax.jit(lambda params: model.start(params, key), out_shardings=shardings)(params)
