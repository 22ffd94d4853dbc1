"""Initializes a run from trained parameters (`config.checkpoint.init_from`), and reads the teacher of a student."""

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
from pretrainax.interop.adapted_start import AdaptedStart, adapted_start
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
from pretrainax.training.wrapped import Wrapped, plain, trained_model


class TrainedStart(Start):
    """Initializes runs from trained parameters; the `training.start.Start` of all commands."""

    def model(self, experiment: Experiment, train: TrainConfig) -> AnyModel:
        return trained_model(experiment, train, teacher_of(experiment))

    def describe(self, experiment: Experiment, workdir: str) -> list[Row]:
        """Checks the model that a new run is initialized from, and its teacher; returns rows that describe this model.

        Returns:
          Rows for the header of the run; [] if the parameters are initialized randomly or come from checkpoints of the
          run itself.

        Raises:
          UserError: the model or the teacher cannot be used.
        """
        teacher_of(experiment)
        model, checkpoint, checkpoints = experiment.model, experiment.checkpoint, os.path.join(workdir, "checkpoints")
        if not checkpoint.init_from or (os.path.isdir(checkpoints) and list_steps(checkpoints)):
            return []
        if AUTO in (model.vocab_size, model.position.max_length):  # the vocabulary is known only after data preparation
            return [("start", f"from {checkpoint.init_from}")]
        origin = find_origin(os.path.expanduser(checkpoint.init_from))
        start = _start_for_run(origin, experiment)
        changed = [f"config.model.{name}" for name in start.fit.changed]
        answers = [path for path in task_head_paths(start.fit, experiment.model) if path not in start.drawn]
        listed = {
            "fresh": _modules(start.drawn),
            "with its answers": _modules(answers),
            "left out": _modules(start.left_out),
            "computes otherwise": changed,
        }
        notes = (f"{what}: {', '.join(names)}" for what, names in listed.items() if names)
        return [("start", "; ".join([f"from {origin.description}", *notes])), *_adaptation_rows(start)]

    def read_frozen(self, run: Run, workdir: str, is_new: bool) -> None:
        """Reads parameters that are not trained: the teacher, and the base model of a resumed run with `config.tuning`.

        A new run reads the teacher of `config.distill`. A resumed run reads the teacher that is recorded in its folder.
        For a new run with `config.tuning`, `params` reads the base model.
        """
        if run.experiment.distill is not None:
            _read_teacher(run, workdir, is_new)
        if run.experiment.tuning is not None and not is_new:
            _trained(run, _load_whole(load_recorded_start(workdir), run))

    def params(self, run: Run, workdir: str) -> Optional[Params]:
        """Returns the initial trained parameters of a new run from `config.checkpoint.init_from`; None if this is "".

        All other parameters are frozen in the run. The source of the parameters is recorded in the folder of the run if
        the run needs it later, or if it can change.

        Args:
          workdir: folder of the run; "": nothing is recorded.
        """
        init_from = run.experiment.checkpoint.init_from
        if not init_from:
            return None
        if run.experiment.tuning is not None and run.frozen is not None:  # a rollback reads the recorded base model
            return _trained(run, _load_whole(load_recorded_start(workdir), run))
        start = find_origin(os.path.expanduser(init_from))
        _check_commit("config.checkpoint.init_from", start)
        if has_tokenizer(start):
            may_grow = any(isinstance(each, WiderVocabulary) for each in run.experiment.checkpoint.adapt)
            check_tokenizer_of(start, run.prepared.tokenizer, "config.checkpoint.init_from:", may_grow)
        remembers = run.is_primary and bool(workdir)
        if run.experiment.checkpoint.adapt and remembers:
            record_start(workdir, start, adapted=_start_for_run(start, run.experiment).report)
        elif start.hub and run.experiment.tuning is None and remembers:  # a branch of the hub may change
            record_start(workdir, start)
        params = _trained(run, _load_whole(start, run))
        if run.experiment.tuning is not None and remembers:
            record_start(workdir, start)
        return params


def _start_for_run(origin: Origin, experiment: Experiment) -> AdaptedStart:
    """Returns the plan that converts the parameters of a trained model for a run.

    Outputs for labels that have a different meaning in this run are initialized.
    """
    model, adaptations = experiment.model, cast(tuple[Adaptation, ...], experiment.checkpoint.adapt)
    start = adapted_start(origin, model, adaptations, experiment.draws_heads)
    return start.without(reinitialized_head_paths(origin, start.fit, experiment))


def _adaptation_rows(start: AdaptedStart) -> list[tuple[str, str]]:
    """Returns the table rows that describe adaptations: their effects, and the parameters that are copied or converted.

    Without adaptations, the result is []. Initialized parameters are listed in the first row of
    `TrainedStart.describe`.
    """
    if not start.effects:
        return []
    converted: dict[str, list[str]] = {}
    for path, way in start.rules.items():
        if way.operations:
            converted.setdefault(way.how, []).append(path)
    rows = [("adapted", effect) for effect in start.effects]
    rows.append(("copied", ", ".join(_modules(start.copied)) or "nothing"))
    return rows + [("made", f"{', '.join(_modules(paths))}: {how}") for how, paths in converted.items()]


def _modules(paths: Iterable[str]) -> list[str]:
    """Returns the module paths that contain the parameters `paths`, without duplicates."""
    return list(dict.fromkeys(path.rpartition("/")[0] for path in paths))


def _read_teacher(run: Run, workdir: str, is_new: bool) -> None:
    """Loads the parameters of the teacher into a run.

    A new run reads the teacher of `config.distill`, and records it in its folder. A resumed run reads the recorded
    teacher.

    Raises:
      UserError: the teacher no longer exists, has changed, or has a different tokenizer.
    """
    distillation, teacher = cast(Distillation, run.experiment.distill), run.work.teacher
    assert teacher is not None and run.abstract_frozen is not None  # because the run has `config.distill`
    origin = find_teacher(distillation) if is_new else load_recorded_start(workdir, TEACHER_START)
    _check_commit("config.distill.teacher", origin)
    check_tokenizer_of(origin, run.prepared.tokenizer, "the teacher")
    abstract = run.abstract_frozen[TEACHER]
    # Without soft targets, the heads of the teacher are not used.
    params = load_start(origin, teacher, abstract, None if distillation.soft else zeros_of(abstract))
    run.freeze({TEACHER: params})
    if is_new and run.is_primary:
        record_start(workdir, origin, TEACHER_START)


def _check_commit(field: str, origin: Origin) -> None:
    """Raises UserError if the hosts of a run have resolved a branch of the hub to different commits."""
    check_same(field, origin.hub or origin.description, "give a commit, such as hf:org/name@1a2b…")


def _load_whole(start: Origin, run: Run) -> Params:
    """Returns all parameters of the model of a run, trained and frozen, converted from the trained model at `start`."""
    adapted = _start_for_run(start, run.experiment)
    abstract = placed_start(models.abstract_params(adapted.model), run.mesh)
    fresh = zeros_of(abstract) if run.experiment.draws_heads else None
    drawn = run.fresh_params(adapted.drawn) if adapted.drawn else {}
    shardings = tree_shardings(run.mesh, train_step.abstract_params(plain(run.model), run.batch_shapes))
    return adapted.take(load_start(start, adapted.model, abstract, fresh), shardings, drawn)


def _trained(run: Run, whole: Params) -> Params:
    """Returns the initial trained parameters of a run, and freezes all other parameters in the run.

    Args:
      whole: all parameters of the model.
    """
    model = run.model
    if not isinstance(model, Wrapped):
        return whole
    if (frozen := model.frozen(whole)) is not None:
        run.freeze(frozen)
    key = train_step.init_key(run.experiment.train.seed_of("init"))
    shardings = tree_shardings(run.mesh, run.abstract_state.params)
    return jax.jit(lambda whole: model.start(whole, key), out_shardings=shardings)(whole)
