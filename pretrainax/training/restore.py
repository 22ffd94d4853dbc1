"""Claims a workdir for a run, and finds the state there that the run goes on from."""

import dataclasses
import math
import os
from collections.abc import Iterable
from typing import Optional, cast

import jax

from pretrainax import adapt, models
from pretrainax import config as config_lib
from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.checkpoints.params import Params
from pretrainax.checkpoints.steps import list_steps
from pretrainax.config import AUTO, Experiment, UserError
from pretrainax.config.atomic_files import remove_leftovers, write_atomically
from pretrainax.data.preparation.prepare import Prepared
from pretrainax.distill import TEACHER, Distillation, Distilled
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
from pretrainax.reporting.units import byte_size
from pretrainax.runtime.agreement import check_same
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import tree_shardings
from pretrainax.tasks import Instructions
from pretrainax.tokenization.chat import PLAIN, write_template
from pretrainax.training import longer, train_step
from pretrainax.training.loop_state import LoopState
from pretrainax.training.setup import Run
from pretrainax.training.train_step import TrainState, state_from
from pretrainax.training.trained import plain


def claim_workdir(workdir: str, experiment: Experiment, prepared: Prepared, extend: bool = False) -> str:
    """Writes config.json and the tokenizer, or refuses a workdir where another config has been at work.

    Args:
      extend: more steps than the run there was planned for are wanted, whatever else they change.

    Returns:
      A line about the run that goes on past its end; empty for others.
    """
    path, extended = os.path.join(workdir, "config.json"), ""
    if extend and not os.path.exists(path):
        raise UserError(f"--extend is for a run that is there, and --workdir={workdir} holds none")
    if os.path.exists(path):
        old = config_lib.load(path)
        train = dataclasses.replace(old.train, steps=experiment.train.steps)
        as_long = dataclasses.replace(old, train=train, phases=experiment.phases)
        changed = config_lib.differences(as_long, experiment)
        if not changed and old.train.steps != experiment.train.steps:
            extended = longer.extend(old, experiment, _steps_done(workdir), extend)
        changed = [] if extended else config_lib.differences(old, experiment)
        if changed:
            raise UserError(
                f"--workdir={workdir} holds a run of another config: {', '.join(changed)}; "
                "take another --workdir, or set these fields back to resume"
            )
    if jax.process_index() == 0:
        os.makedirs(workdir, exist_ok=True)
        remove_leftovers(workdir)
        saved = os.path.join(workdir, "tokenizer")
        if not (os.path.exists(path) and os.path.isdir(saved)):  # that of the run stays, whatever the text is now
            prepared.tokenizer.save(saved)
            if isinstance(experiment.objective, Instructions):
                write_template(saved, experiment.objective.template or PLAIN)
        write_atomically(path, config_lib.dump(experiment))  # a run that is killed here leaves no half-written config
    elif not os.path.exists(path):  # process 0 was here before
        raise UserError(
            f"--workdir={workdir}: process {jax.process_index()} does not find what process 0 wrote there; "
            "give a folder that all hosts see (NFS, Filestore, a mounted bucket)"
        )
    return extended


def _steps_done(workdir: str) -> int:
    """Returns the newest step that is saved, whether it verifies or not; 0 where none is."""
    directory = os.path.join(workdir, "checkpoints")
    return max(list_steps(directory), default=0) if os.path.isdir(directory) else 0


def describe_start(experiment: Experiment, workdir: str) -> list[tuple[str, str]]:
    """Checks what a new run starts from, without reading a number of it; returns the row of the header that says it.

    It takes no data and no device, so that a mistake shows before the text is prepared; so does one of the teacher.
    Empty where the parameters are fresh, or the workdir's own.

    Raises:
      UserError: `config.checkpoint.init_from` or the teacher is not there, or of another model.
    """
    teacher_of(experiment)
    model, checkpoint, own = experiment.model, experiment.checkpoint, os.path.join(workdir, "checkpoints")
    if not checkpoint.init_from or (os.path.isdir(own) and list_steps(own)):
        return []
    if AUTO in (model.vocab_size, model.position.max_length):  # until the text is prepared; looked at when it is read
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


def restore_or_init(run: Run, checkpoints: Checkpoints, up_to: Optional[int] = None) -> tuple[TrainState, LoopState]:
    """Returns the state to train from, and what the loop remembers beside it.

    1. The newest checkpoint of the workdir that verifies (`up_to`: as in `Checkpoints.restore_newest`).
    2. `config.checkpoint.init_from`: parameters of another run or a Hugging Face directory, a fresh optimizer.
    3. Fresh parameters.

    Raises:
      UserError: the checkpoint is of another model, optimizer, tokenizer or text.
    """
    fresh = LoopState(
        tokenizer=run.prepared.tokenizer.fingerprint,
        corpora=[corpus.fingerprint for corpus in run.prepared.corpora],
    )
    check_room_for_ema(run.abstract_state, (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"))
    restored, workdir = checkpoints.restore_newest(run.abstract_state, up_to), os.path.dirname(checkpoints.directory)
    if run.experiment.distill is not None and run.frozen is None:
        read_teacher(run, workdir, is_new=restored is None)
    if restored is not None:
        if run.frozen is None:  # after a rollback they are there
            read_frozen(run, workdir)
        _, state, extra = restored
        loop_state = LoopState.from_json(extra, fresh)
        if loop_state.tokenizer != fresh.tokenizer:
            raise UserError(
                f"the checkpoint was trained with tokenizer {loop_state.tokenizer[:12]}, the data is now tokenized "
                f"with {fresh.tokenizer[:12]}: set config.tokenizer.path to the workdir's tokenizer/ folder"
            )
        if loop_state.corpora != fresh.corpora:
            raise UserError(
                "the text of config.data.source is not the one that this run was trained on: put its files back to "
                "resume, or take another --workdir, with config.checkpoint.init_from for its parameters"
            )
        return state, loop_state
    if run.experiment.checkpoint.init_from:
        has_ema = run.abstract_state.ema is not None
        params = _first_params(run, run.experiment.checkpoint.init_from, workdir)
        return state_from(params, run.optimizer, run.mesh, has_ema), fresh
    return run.fresh_state(), fresh


def check_room_for_ema(state: TrainState, room: Optional[int]) -> None:
    """Raises UserError where a moving average of the parameters leaves no room for what a step must have.

    Args:
      state: shapes, dtypes and shardings.
      room: bytes of memory of a device; None: it does not say, as a CPU does not.
    """

    def size(tree: PyTree) -> int:  # of a device's part
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    ema, gradients = size(state.ema), size(state.params)
    needed = size(state) + gradients
    if room is not None and ema and needed > room:
        raise UserError(
            f"config.train.ema_decay keeps another copy of the parameters, {byte_size(ema)} of a device, and there is "
            f"no memory for it: parameters, optimizer, gradients and it take {byte_size(needed)} of {byte_size(room)}; "
            "set it to None, or split the parameters by config.mesh.fsdp"
        )


def read_frozen(run: Run, workdir: str) -> None:
    """Gives a run under tuning the parameters that it does not train, as its start has them.

    Raises:
      UserError: the start is not there any more, or another one.
    """
    if run.experiment.tuning is not None:
        _split(run, _whole(find_known_start(workdir), run))


def read_teacher(run: Run, workdir: str, is_new: bool) -> None:
    """Gives a run the parameters of its teacher: those that `config.distill` names, of a new run; else the same again.

    Raises:
      UserError: the teacher is not there any more, or another one, or its ids are of another tokenizer.
    """
    distillation, model = cast(Distillation, run.experiment.distill), run.model
    assert isinstance(model, Distilled) and run.abstract_frozen is not None
    origin = find_teacher(distillation) if is_new else find_known_start(workdir, TEACHER_START)
    _check_commit("config.distill.teacher", origin)
    check_tokenizer_of(origin, run.prepared.tokenizer, "the teacher")
    abstract = run.abstract_frozen[TEACHER]
    # Of a teacher whose answers nobody asks for, heads need not be there.
    params = load_start(origin, model.teacher.config, abstract, None if distillation.soft else zeros_of(abstract))
    for part in run.parts:
        part.frozen = {TEACHER: params}
    if is_new and run.is_primary:
        remember_start(workdir, origin, TEACHER_START)


def _first_params(run: Run, init_from: str, workdir: str) -> Params:
    """Reads the parameters that are trained, as `run` starts from them; gives it the others, and keeps their start."""
    if run.experiment.tuning is not None and run.frozen is not None:  # after a rollback the same
        return _split(run, _whole(find_known_start(workdir), run))
    start = find_origin(os.path.expanduser(init_from))
    _check_commit("config.checkpoint.init_from", start)
    if has_tokenizer(start):
        may_grow = any(isinstance(each, WiderVocabulary) for each in run.experiment.checkpoint.adapt)
        check_tokenizer_of(start, run.prepared.tokenizer, "config.checkpoint.init_from:", may_grow)
    if run.experiment.checkpoint.adapt and run.is_primary:
        remember_start(workdir, start, adapted=_adapted(start, run.experiment).report)
    elif start.hub and run.experiment.tuning is None and run.is_primary:  # a branch may have gone on since
        remember_start(workdir, start)
    if isinstance(run.model, Distilled):
        return _started(run, run.model, _whole(start, run))
    if run.experiment.tuning is None:
        return _whole(start, run)
    params = _split(run, _whole(start, run))
    if run.is_primary:
        remember_start(workdir, start)
    return params


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


def _split(run: Run, whole: Params) -> Params:
    """Returns what is trained of the parameters of a model under tuning, as it starts; gives the run all others."""
    model = cast(adapt.Adapted, run.model)
    for part in run.parts:
        part.frozen = {adapt.FROZEN: model.frozen(whole)}
    return _started(run, model, whole)


def _started(run: Run, model: adapt.Adapted | Distilled, whole: Params) -> Params:
    """Returns what is trained as it starts, beside or instead of the parameters of a model."""
    key = train_step.init_key(run.experiment.train.seed_of("init"))
    shardings = tree_shardings(run.mesh, run.abstract_state.params)
    return jax.jit(lambda whole: model.start(whole, key), out_shardings=shardings)(whole)
