"""The start of a run from what others have trained: `config.checkpoint.init_from`, and the teacher of a student."""

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
from pretrainax.interop.same_ids import check_tokenizer_of, has_tokenizer
from pretrainax.interop.start import (
    TEACHER_START,
    answers_redrawn,
    answers_taken,
    find_known_start,
    load_start,
    placed_start,
    remember_start,
    zeros_of,
)
from pretrainax.interop.teacher import find_teacher, teacher_of
from pretrainax.models import AnyModel
from pretrainax.runtime.agreement import check_same
from pretrainax.sharding.rules import tree_shardings
from pretrainax.training import train_step
from pretrainax.training.run import Run
from pretrainax.training.start import Row, Start
from pretrainax.training.wrapped import Wrapped, plain, trained_model


class TrainedStart(Start):
    """Starts a run as its config says; it is the `training.start.Start` of all commands."""

    def model(self, experiment: Experiment, train: TrainConfig) -> AnyModel:
        return trained_model(experiment, train, teacher_of(experiment))

    def describe(self, experiment: Experiment, workdir: str) -> list[Row]:
        """Returns the rows, as `Start.describe`; [] where the parameters are fresh, or the workdir's own."""
        teacher_of(experiment)
        model, checkpoint, own = experiment.model, experiment.checkpoint, os.path.join(workdir, "checkpoints")
        if not checkpoint.init_from or (os.path.isdir(own) and list_steps(own)):
            return []
        if AUTO in (model.vocab_size, model.position.max_length):  # until the text is prepared; then it is checked
            return [("start", f"from {checkpoint.init_from}")]
        origin = find_origin(os.path.expanduser(checkpoint.init_from))
        start = _adapted(origin, experiment)
        changed = [f"config.model.{name}" for name in start.fit.changed]
        answers = [path for path in answers_taken(start.fit, experiment.model) if path not in start.drawn]
        said = {
            "fresh": _modules(start.drawn),
            "with its answers": _modules(answers),
            "left out": _modules(start.left_out),
            "computes otherwise": changed,
        }
        notes = (f"{what}: {', '.join(names)}" for what, names in said.items() if names)
        return [("start", "; ".join([f"from {origin.description}", *notes])), *_said(start)]

    def read_frozen(self, run: Run, workdir: str, is_new: bool) -> None:
        """Reads the teacher: the one that `config.distill` names, of a new run; else the same again. Of a run under
        tuning that goes on it reads the parameters of its start; of a new one `params` does."""
        if run.experiment.distill is not None:
            _read_teacher(run, workdir, is_new)
        if run.experiment.tuning is not None and not is_new:
            _trained(run, _whole(find_known_start(workdir), run))

    def params(self, run: Run, workdir: str) -> Optional[Params]:
        """Reads the parameters that are trained; gives the run the others, and `workdir`, unless "", the start."""
        init_from = run.experiment.checkpoint.init_from
        if not init_from:
            return None
        if run.experiment.tuning is not None and run.frozen is not None:  # after a rollback the same
            return _trained(run, _whole(find_known_start(workdir), run))
        start = find_origin(os.path.expanduser(init_from))
        _check_commit("config.checkpoint.init_from", start)
        if has_tokenizer(start):
            may_grow = any(isinstance(each, WiderVocabulary) for each in run.experiment.checkpoint.adapt)
            check_tokenizer_of(start, run.prepared.tokenizer, "config.checkpoint.init_from:", may_grow)
        remembers = run.is_primary and bool(workdir)
        if run.experiment.checkpoint.adapt and remembers:
            remember_start(workdir, start, adapted=_adapted(start, run.experiment).report)
        elif start.hub and run.experiment.tuning is None and remembers:  # a branch may have gone on since
            remember_start(workdir, start)
        params = _trained(run, _whole(start, run))
        if run.experiment.tuning is not None and remembers:
            remember_start(workdir, start)
        return params


def _adapted(origin: Origin, experiment: Experiment) -> AdaptedStart:
    """Returns how the start of a run becomes its model; answers that mean something else in this run are drawn anew."""
    model, adaptations = experiment.model, cast(tuple[Adaptation, ...], experiment.checkpoint.adapt)
    start = adapted_start(origin, model, adaptations, experiment.draws_heads)
    return start.without(answers_redrawn(origin, start.fit, experiment))


def _said(start: AdaptedStart) -> list[tuple[str, str]]:
    """Returns the rows about a start of another family or shape: what that does, what is copied, how others are made.

    Those that are drawn anew have been named beside the start.
    """
    if not start.effects:
        return []
    made: dict[str, list[str]] = {}
    for path, way in start.ways.items():
        if way.made:
            made.setdefault(way.how, []).append(path)
    rows = [("adapted", effect) for effect in start.effects]
    rows.append(("copied", ", ".join(_modules(start.copied)) or "nothing"))
    return rows + [("made", f"{', '.join(_modules(paths))}: {how}") for how, paths in made.items()]


def _modules(paths: Iterable[str]) -> list[str]:
    """Names the maps and norms, each of several parameters, that paths are of."""
    return list(dict.fromkeys(path.rpartition("/")[0] for path in paths))


def _read_teacher(run: Run, workdir: str, is_new: bool) -> None:
    """Gives a run the parameters of its teacher: those that `config.distill` names, of a new run; else the same again.

    Raises:
      UserError: the teacher is not there any more, or another one, or its ids are of another tokenizer.
    """
    distillation, teacher = cast(Distillation, run.experiment.distill), run.work.teacher
    assert teacher is not None and run.abstract_frozen is not None  # of a distillation
    origin = find_teacher(distillation) if is_new else find_known_start(workdir, TEACHER_START)
    _check_commit("config.distill.teacher", origin)
    check_tokenizer_of(origin, run.prepared.tokenizer, "the teacher")
    abstract = run.abstract_frozen[TEACHER]
    # Of a teacher whose answers nobody asks for, heads need not be there.
    params = load_start(origin, teacher, abstract, None if distillation.soft else zeros_of(abstract))
    run.freeze({TEACHER: params})
    if is_new and run.is_primary:
        remember_start(workdir, origin, TEACHER_START)


def _check_commit(field: str, origin: Origin) -> None:
    """Raises UserError where a branch of the hub has gone on between the hosts that have asked for it."""
    check_same(field, origin.hub or origin.description, "give a commit, as hf:org/name@1a2b…")


def _whole(start: Origin, run: Run) -> Params:
    """Reads the parameters of the model, whether they are trained or not."""
    adapted = _adapted(start, run.experiment)
    abstract = placed_start(models.abstract_params(adapted.model), run.mesh)
    fresh = zeros_of(abstract) if run.experiment.draws_heads else None
    drawn = run.fresh_params(adapted.drawn) if adapted.drawn else {}
    shardings = tree_shardings(run.mesh, train_step.abstract_params(plain(run.model), run.batch_shapes))
    return adapted.take(load_start(start, adapted.model, abstract, fresh), shardings, drawn)


def _trained(run: Run, whole: Params) -> Params:
    """Returns the trained parameters at their start, of those of the whole model; gives the run the others."""
    model = run.model
    if not isinstance(model, Wrapped):
        return whole
    if (frozen := model.frozen(whole)) is not None:
        run.freeze(frozen)
    key = train_step.init_key(run.experiment.train.seed_of("init"))
    shardings = tree_shardings(run.mesh, run.abstract_state.params)
    return jax.jit(lambda whole: model.start(whole, key), out_shardings=shardings)(whole)
