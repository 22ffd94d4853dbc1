"""Runs training from a config, for any objective and architecture."""

import contextlib
import os
from collections.abc import Sequence
from typing import cast

import jax

from pretrainax.checkpoints.hosts import open_checkpoints
from pretrainax.checkpoints.paths import exact_path
from pretrainax.checkpoints.workdir import adopt_steps, check_workdir
from pretrainax.config import Experiment, dump
from pretrainax.config.validation import complete
from pretrainax.data.preparation.prepare import Prepared, prepare
from pretrainax.files.atomic_files import write_atomically
from pretrainax.runtime.goodput import Goodput
from pretrainax.runtime.signals import PreemptionHandler
from pretrainax.runtime.workdir_lock import WorkdirLock
from pretrainax.storage import places
from pretrainax.trackers import check_trackers
from pretrainax.training.callbacks import Callback, Callbacks
from pretrainax.training.corpora import checked_corpora
from pretrainax.training.expert_report import ExpertBalance
from pretrainax.training.finish import finish
from pretrainax.training.loader_size import size_loader
from pretrainax.training.loop import Loop
from pretrainax.training.metrics_writer import MetricsWriter
from pretrainax.training.profiles import Profiles
from pretrainax.training.restore import claim_workdir, restore_or_init
from pretrainax.training.run import GenerateOutputs, no_generation, open_run
from pretrainax.training.start import FRESH, Row, Start
from pretrainax.training.start_rows import rows_of_start
from pretrainax.training.tracking import Tracking


def train(
    experiment: Experiment,
    workdir: str,
    process_age: float = 0.0,
    extend: bool = False,
    callbacks: Sequence[Callback] = (),
    start: Start = FRESH,
    write: GenerateOutputs = no_generation,
) -> int:
    """Trains until `train.steps` or until a signal arrives; returns the exit code: 0 at the end, 75 after a signal.

    Args:
      process_age: seconds since this process started.
      extend: whether a run may continue past its planned end. callbacks: in addition to `config.callbacks`.
      start, write: as in `build_run`.
    """
    _check(experiment, workdir, start)
    claimed, remat, follows_budget = [], experiment.train.remat, experiment.train.steps == 0
    goodput, preemption = Goodput(workdir, process_age), PreemptionHandler()
    run_callbacks = Callbacks(all_callbacks(experiment, callbacks), goodput)

    def prepare_data(experiment: Experiment) -> Prepared:
        nonlocal claimed
        run_callbacks.call("resolve_fields", experiment)
        with goodput.on("preparing"):
            if jax.process_index() == 0:
                outer_stack.enter_context(WorkdirLock(workdir))
            with places.process_zero_first(workdir):
                prepared, claimed = _prepare(experiment, workdir, extend)
        return prepared

    outer_stack = contextlib.ExitStack()  # holds the lock of the workdir, which is released last
    run_context = open_run(experiment, prepare_data, preemption, workdir, start, write)
    with outer_stack, run_context as run, contextlib.ExitStack() as stack:
        goodput.primary = run.is_primary  # known only after JAX has connected the processes
        with places.process_zero_first(workdir):
            if follows_budget and run.is_primary:  # `open_run` has computed the steps
                write_atomically(os.path.join(workdir, "config.json"), dump(experiment))
        options = experiment.checkpoint.keep, experiment.select_by, experiment.checkpoint.keeps, run.peers.progress
        checkpoints = open_checkpoints(os.path.join(workdir, "checkpoints"), *options)
        stack.callback(checkpoints.close)
        with goodput.on("restoring"):
            state, loop_state = restore_or_init(run, checkpoints)
        writer = MetricsWriter(workdir, experiment.train.steps, loop_state.step, run.is_primary, experiment.select_by)
        stack.callback(writer.close)
        if goodput.damaged:
            writer.note(f"ignored {goodput.damaged} damaged entries of {goodput.path}; the goodput table lacks them")
        stack.enter_context(run_callbacks.closing())
        with checked_corpora(experiment.data, run.prepared.valid_first, writer.note) as check:
            loop = Loop(run, checkpoints, writer, goodput, preemption, loop_state, check, run_callbacks)
            loop.first_rows = rows_of_start(run, workdir, loop_state, claimed, remat, size_loader(run))
            state, exit_code = loop.train(state)
        if exit_code == 0:
            with goodput.on("saving"):
                checkpoints.share()  # the run is complete from now on, even if finish() fails
            with goodput.on("finishing"):
                finish(loop, state)
            writer.note(goodput.table())
        goodput.save(done=exit_code == 0)
    return exit_code


def all_callbacks(experiment: Experiment, given: Sequence[Callback]) -> list[Callback]:
    """Returns all callbacks in call order: tracking, `config.callbacks`, `given`, expert balance, and profiles."""
    profiles = [] if any(isinstance(callback, Profiles) for callback in given) else [Profiles()]
    configured = cast(tuple[Callback, ...], experiment.callbacks)
    return [Tracking(experiment.trackers), *configured, *given, ExpertBalance(), *profiles]


def _prepare(experiment: Experiment, workdir: str, extend: bool) -> tuple[Prepared, list[Row]]:
    """Checks the workdir, prepares the data and claims the workdir for the run; also returns header rows."""
    rows = adopt_steps(workdir, experiment)
    check_workdir(workdir, experiment, extend)  # before the data is prepared, which may take hours
    prepared = prepare(experiment, saved_tokenizer=os.path.join(workdir, "tokenizer"))
    return prepared, rows + claim_workdir(workdir, experiment, prepared, extend)


def _check(experiment: Experiment, workdir: str, start: Start) -> None:
    """Raises UserError for invalid settings; runs before data preparation, when sizes may still be "auto"."""
    complete(experiment)
    check_trackers(experiment.trackers)
    exact_path(workdir)
    start.describe(experiment, workdir)
