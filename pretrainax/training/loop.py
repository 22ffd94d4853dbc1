"""The training loop: restore, step, log, evaluate, save, roll back, stop. It knows no objective and no architecture.

train      a run from its config to its exit code
Loop       all that happens around the jitted update
  train          the steps; after a spike of the loss, once more from an earlier checkpoint
  _train_steps   one after the other: a batch, the update, and what is due after it
  _roll_back, _next_batch, _watch_batches, _announce_speed: parts of that
  _profile  begins or ends a profile between two steps
  _read_metrics  metrics stay on the device until something needs them; each step's are looked at once
  _log, _evaluate, _save: every `train.logged_every`, `evaluate.every`, `checkpoint.every` steps
"""

import collections
import contextlib
import dataclasses
import datetime
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Optional

import jax

from pretrainax.checkpoints.best import best_step
from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.checkpoints.hosts import open_checkpoints
from pretrainax.checkpoints.paths import exact_path
from pretrainax.config import Experiment, RunFailed, UserError
from pretrainax.config.validation import complete
from pretrainax.data.batch import HostBatch, check_batch, tokens_read
from pretrainax.data.corpus_check import CorpusCheck
from pretrainax.data.pipeline import iterate
from pretrainax.data.preparation.prepare import Prepared, prepare
from pretrainax.runtime.goodput import Goodput
from pretrainax.runtime.recorder import Recorder
from pretrainax.runtime.signals import PREEMPTED, PreemptionHandler
from pretrainax.runtime.workdir_lock import WorkdirLock
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.param_paths import PyTree, parameter_names
from pretrainax.storage import places
from pretrainax.tasks import Task
from pretrainax.trackers import check_trackers, shown_config
from pretrainax.training import expert_balance, header, loss_spikes
from pretrainax.training.corpora import checked_texts
from pretrainax.training.finish import finish
from pretrainax.training.loader_size import size_loader
from pretrainax.training.loop_state import Counts, LoopState
from pretrainax.training.metrics import summarize
from pretrainax.training.metrics_writer import MetricsWriter
from pretrainax.training.profiles import Profiling, recorder_of
from pretrainax.training.restore import claim_workdir, describe_start, restore_or_init
from pretrainax.training.setup import Run, open_run
from pretrainax.training.start_rows import rows_of_start
from pretrainax.training.train_step import TrainState

Observer = Callable[[int, HostBatch], None]  # (step, this process's rows of its batch)


def train(
    experiment: Experiment,
    workdir: str,
    process_age: float = 0.0,
    observe: Optional[Observer] = None,
    paper: header.Paper = header.UNKNOWN,
    extend: bool = False,
    profiling: Optional[Profiling] = None,
    settle: Callable[[Experiment], None] = lambda experiment: None,
) -> int:
    """Trains until `train.steps`, or until a signal. Returns the exit code.

    Args:
      process_age: seconds since the process was started.
      observe: is called with each batch, in a thread, as soon as it is made.
      paper: what is known of the one whose config this is, for the header.
      extend: the run may go on past its planned end, whatever else that changes (see `claim_workdir`).
      profiling: None: profiles are those of the config alone, and nobody reads them.
      settle: is called once the devices are there, and sets what follows from their memory.
    """
    _check(experiment, workdir)
    extended, figure, remat = "", experiment.select_by, experiment.train.remat
    goodput, preemption = Goodput(workdir, process_age), PreemptionHandler()

    def prepare_data(experiment: Experiment) -> Prepared:
        nonlocal extended
        settle(experiment)
        with goodput.on("preparing"):
            if jax.process_index() == 0:
                held.enter_context(WorkdirLock(workdir))
            with places.shared(workdir):
                prepared = prepare(experiment)
                extended = claim_workdir(workdir, experiment, prepared, extend)
        return prepared

    held = contextlib.ExitStack()  # what outlasts everything else
    with held, open_run(experiment, prepare_data, preemption, workdir) as run, contextlib.ExitStack() as stack:
        goodput.primary = run.is_primary  # which JAX knows only now
        saving = os.path.join(workdir, "checkpoints"), experiment.checkpoint.keep, figure, experiment.checkpoint.keeps
        checkpoints = stack.enter_context(contextlib.closing(open_checkpoints(*saving)))
        with goodput.on("restoring"):
            state, loop_state = restore_or_init(run, checkpoints)
        tracked = experiment.trackers, shown_config(experiment)
        writer = MetricsWriter(workdir, experiment.train.steps, loop_state.step, run.is_primary, figure, *tracked)
        stack.callback(writer.close)
        if goodput.damaged:
            writer.note(f"damaged entries of {goodput.path} are left out: {goodput.damaged}; times count from there")
        header.show(run, writer, rows_of_start(run, workdir, loop_state, extended, remat, size_loader(run)), paper)
        texts = checked_texts(experiment.data, run.prepared.valid_first, writer.note)
        with texts as check, recorder_of(run, writer, loop_state.step + 1, profiling) as recorder:
            loop = Loop(run, checkpoints, writer, goodput, preemption, loop_state, Beside(check, recorder), observe)
            state, exit_code = loop.train(state)
        if exit_code == 0:
            with goodput.on("saving"):
                checkpoints.share()  # whatever becomes of what follows, the run is whole
            with goodput.on("finishing"):
                finish(loop.run, run.validated(state), writer, preemption, loop.last_evaluation)
            writer.note(goodput.table())
        goodput.save(done=exit_code == 0)
    return exit_code


def _check(experiment: Experiment, workdir: str) -> None:
    """Refuses mistakes before anything is prepared; sizes may still be auto."""
    complete(experiment)
    check_trackers(experiment.trackers)
    exact_path(workdir)
    describe_start(experiment, workdir)


def to_device(batches: Iterator[HostBatch], mesh: jax.sharding.Mesh) -> Iterator[dict[str, jax.Array]]:
    """Yields the batches on the mesh, one ahead: the next one travels while the devices work on this one."""
    ahead = collections.deque()
    for batch in batches:
        ahead.append(put_batch(batch, mesh))
        if len(ahead) > 1:
            yield ahead.popleft()
    yield from ahead


class Beside(NamedTuple):
    """Names what goes on beside the steps of a run."""

    corpus_check: CorpusCheck
    recorder: Recorder


class Loop:
    """Everything that happens every so many steps, around the one jitted update.

    `loop_state` is what must survive a restart beside the `TrainState`; each checkpoint carries a copy.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        goodput: Goodput,
        preemption: PreemptionHandler,
        loop_state: LoopState,
        beside: Beside,
        observe: Optional[Observer] = None,
    ):
        self.run, self.checkpoints, self.writer, self.goodput = run, checkpoints, writer, goodput
        self.preemption, self.loop_state, self.observe = preemption, loop_state, observe
        self.corpus_check, self.recorder = beside
        self.saved = False  # a step of this start has been saved
        self.compiled: Optional[Run] = None  # the phase whose update is
        self.dead_experts = 0.0  # of the last line
        self.first_step = loop_state.step + 1  # of this start, whatever is rolled back later
        self._reset()

    def _reset(self) -> None:
        """Forgets what belongs to steps after `loop_state.step`, at the start and after a rollback."""
        self.writer.check(self.loop_state.metrics_file, self.loop_state.step)
        self.run = self.run.at(self.loop_state.step - 1)
        self.batches = loss_spikes.Skipping(self.run.batches, self.loop_state.rollbacks)
        # (step, what the device has to do in it, metrics on the device), not looked at yet
        self.pending: list[tuple[int, Counts, dict[str, PyTree]]] = []
        self.newest: Optional[dict[str, PyTree]] = None  # the last of them that was
        self.evaluation: Optional[tuple[int, dict[str, float]]] = None  # (step, metrics) of the last one here
        self._reset_clock()
        self._select_by(self.run.experiment.select_by)

    def _reset_clock(self) -> None:
        """Begins to measure what the speeds of the next line are of."""
        self.seconds, self.waited, self.steps = 0.0, 0.0, 0  # of training and of waiting for data since the last log
        self.counts = Counts()  # of the same steps
        self.flops_done = 0.0  # of its FLOPs, without what attention skips

    def _select_by(self, figure: str) -> None:
        """Begins anew with the best of a figure where a restored state has that of another one."""
        state = self.loop_state
        if state.select_by != figure and state.best_loss is not None:
            self.writer.note(
                f"so far the best checkpoint was chosen by validation {state.select_by}; from here on it is by "
                f"{figure}, among those that have it"
            )
            state.best_loss, state.evaluations_since_best = None, 0
        state.select_by = figure

    @property
    def last_evaluation(self) -> Optional[dict[str, float]]:
        """Returns the validation metrics of the state as it is; None where it has gone on since, or none were made."""
        step, metrics = self.evaluation or (None, None)
        return metrics if step == self.loop_state.step else None

    @property
    def _phase(self) -> dict[str, float]:
        """Returns what lines and checkpoints of a run in phases have beside the others."""
        return {"phase": self.run.phase.number} if self.run.phase else {}

    def train(self, state: TrainState) -> tuple[TrainState, int]:
        """Returns the state at the end, and the exit code."""
        while True:
            try:
                return self._train_steps(state)
            except loss_spikes.Spike as found:
                spike = found.with_traceback(None)  # which would hold a state
            del state  # two do not fit
            state = self._roll_back(spike)

    def _train_steps(self, state: TrainState) -> tuple[TrainState, int]:
        """Trains from `loop_state.step` on; raises Spike, RunFailed."""
        experiment, loop_state = self.run.experiment, self.loop_state
        train, steps, first = experiment.train, experiment.train.steps, loop_state.step + 1
        batches = iterate(self.batches, first - 1, steps, experiment.data.workers or 0)
        batches = to_device(self._watch_batches(batches, first), self.run.mesh)
        self.resumed = time.perf_counter()
        if first == 1 and experiment.checkpoint.keeps(0):
            self._save(state)
        with ThreadPoolExecutor(1, "batches") as loader:
            fetched = loader.submit(next, batches, None)
            for step in range(first, steps + 1):
                if self._is_out_of_patience():
                    self.writer.note(
                        f"no better validation {experiment.select_by} in {experiment.evaluate.patience} evaluations: "
                        "stopping; with a larger config.evaluate.patience the same command goes on"
                    )
                    break
                self._enter_phase(step)
                if self.recorder.begins_at(step):
                    self._profile(lambda step=step: self.recorder.begin(step))
                with self.recorder.step(step):
                    batch, fetched = self._next_batch(fetched), loader.submit(next, batches, None)
                    self.goodput.step(step)
                    is_compiled = self.compiled is self.run
                    with contextlib.nullcontext() if is_compiled else self.goodput.on("compiling"):
                        state, metrics = self.run.step(state, batch, self.run.frozen)
                        if not is_compiled:  # the other processes may take longer
                            jax.block_until_ready(metrics)
                self.compiled = self.run
                index = self.batches.index(step - 1)
                flops = self.run.flops_of(index)
                self.flops_done += self.run.flops_done_of(index)
                self.pending.append((step, Counts(tokens=tokens_read(batch), flops=flops), metrics))
                loop_state.step = step
                if step in (self.first_step, self.first_step + 3):
                    self._announce_speed(step - self.first_step)
                jax.block_until_ready(self.pending[-2:-1])  # never more than one step ahead of the devices
                if self.recorder.ends_at(step):
                    self._profile(self.recorder.end)

                self._stop_if_text_is_damaged()
                self.run.peers.beat(step)
                is_end = step == self.run.stop  # of the phase, whose last figures are its own
                is_last, is_leaving = step == steps, self.run.peers.agree(self.preemption.requested)
                if step % train.logged_every == 0 or is_end:
                    self._log()
                is_best = False  # who leaves evaluates first where it is due: the resumed run will not come by again
                if step % experiment.evaluate.every == 0 or is_end:
                    is_best = self._evaluate(state)
                is_due = step % experiment.checkpoint.every == 0 or experiment.checkpoint.keeps(step)
                is_scheduled = is_due or is_best or is_end
                if is_scheduled or is_leaving:
                    self._save(state, is_scheduled)
                if is_leaving and not is_last:
                    with self.goodput.on("saving"):
                        self.checkpoints.wait()
                    self.writer.note(f"saved step {step}; the same command resumes here")
                    return state, PREEMPTED
        return state, 0

    def _profile(self, change: Callable[[], None]) -> None:
        """Begins or ends a profile, when the devices have nothing to do; the time that takes is that of no step."""
        self._read_metrics()
        with self.goodput.on("profiling"):
            change()
        self.resumed = time.perf_counter()

    def _roll_back(self, spike: loss_spikes.Spike) -> TrainState:
        """Returns the state of a checkpoint before the spike; deletes those after it, and what was logged since.

        A kill meanwhile changes nothing: the newest checkpoint, whichever that is then, leads to the same spike. Where
        none is as old as the target, it is the oldest one, which is the same after a kill: see `Checkpoints`.
        """
        before = self.loop_state.rollbacks
        rollback = loss_spikes.plan_rollback(spike, before, self.run.experiment.train)
        with self.goodput.on("restoring"):
            state, restored = restore_or_init(self.run, self.checkpoints, up_to=rollback.step)
            self.checkpoints.drop_after(restored.step)
        rollback = dataclasses.replace(rollback, step=max(rollback.step, restored.step))
        self.loop_state = dataclasses.replace(restored, rollbacks=[*before, rollback])
        self.writer.rewind(restored.step)
        self._reset()
        self.writer.note(
            f"{spike.what}; rollback {len(before) + 1}: back to step {restored.step}, and after step "
            f"{rollback.step} {rollback.skipped} batches are left out"
        )
        return state

    def _enter_phase(self, step: int) -> None:
        """Goes on with the model, the update and the batches of the phase that a step is in; says where one begins.

        What a spike is, is measured by the losses of one phase.
        """
        run = self.run.at(step - 1)
        if run is not self.run:
            self._read_metrics()
            self.run, self.loop_state.recent = run, []
            self.writer.note(str(run.phase))

    def _next_batch(self, fetched: Future) -> dict[str, jax.Array]:
        """Returns the batch that was fetched. Waiting for it counts from when the devices have nothing left to do."""
        if not fetched.done():
            jax.block_until_ready(self.pending[-1:])
        before = time.perf_counter()
        with self.goodput.on("waiting"):
            batch = fetched.result()
        self.waited += time.perf_counter() - before
        return batch

    def _watch_batches(self, batches: Iterator[HostBatch], first: int) -> Iterator[HostBatch]:
        """Yields the batches of step `first` on. The first one, and that of each phase, is checked."""
        model, checked = self.run.experiment.model, None
        for step, batch in enumerate(batches, first):
            made = self.run.at(step - 1).train_batches
            if made is not checked:
                check_batch(batch, model, made.lengths_of(self.batches.index(step - 1)), made.local_batch_size)
                checked = made
            if self.observe:
                self.observe(step, batch)
            yield batch

    def _announce_speed(self, done: int) -> None:
        """Says how long the first step took, and what the next ones say of the time the others will take."""
        jax.block_until_ready(self.pending[-1][-1])
        now = time.perf_counter()
        if done == 0:
            self.first_done = now
            self.writer.note(f"first step {self.goodput.age():.1f} s after the start")
        else:
            left = self.run.experiment.train.steps - self.loop_state.step
            seconds = (now - self.first_done) / done * self.run.steps_left(self.loop_state.step)
            self.writer.note(f"expected time {datetime.timedelta(seconds=round(seconds))} for {left:,} steps")

    def _read_metrics(self) -> None:
        """Waits for the device and looks at every step since it last did: none that is not finite goes unseen."""
        if not self.pending:
            return
        steps, taken, on_device = zip(*self.pending, strict=True)
        metrics_of_steps = jax.device_get(on_device)
        now = time.perf_counter()
        self.seconds, self.resumed, self.steps = self.seconds + now - self.resumed, now, self.steps + len(steps)
        self.pending, self.newest = [], metrics_of_steps[-1]
        train, objective, left_out = self.run.experiment.train, self.run.experiment.objective, []
        watched = "loss" if isinstance(objective, Task) else objective.select_by  # a task is kept for another figure
        for step, counts, metrics in zip(steps, taken, metrics_of_steps, strict=True):
            counts.add(Counts(**{name: int(count) for name, count in metrics["text"].items()}))
            for total in filter(None, (self.counts, self.loop_state.counts)):
                total.add(counts)
            if metrics["finite"]:
                self.loop_state.add_sums(metrics["sums"])
                found, norm = summarize(metrics["sums"]), float(metrics["gradient_norm"])
                loss = found.get(watched, found["loss"])  # which is all that a step without pairs trains
                loss_spikes.observe_step(self.loop_state.recent, step, loss, norm, train)
                continue
            line = self._describe_nonfinite(step, int(metrics["bad_parameter"]))
            left_out.append(line)
            if train.on_nonfinite == "stop" and train.on_spike == "rollback":
                raise loss_spikes.Spike(step, line)
            if train.on_nonfinite == "stop":
                raise RunFailed(
                    f"{line}; lower config.optimizer.learning_rate in a new --workdir, or resume with "
                    "--config.train.on_nonfinite=skip or --config.train.on_spike=rollback"
                )
        if left_out:
            self.loop_state.skipped_updates += len(left_out)
            self.writer.note(f"{left_out[0]}; {len(left_out)} of the last {len(steps)} updates left out")

    def _stop_if_text_is_damaged(self) -> None:
        """Raises UserError where a checksum is wrong, with the checkpoints that may have seen the text."""
        try:
            self.corpus_check.raise_if_damaged()
        except UserError as e:
            seen = f"; checkpoints after step {self.first_step - 1} may have seen it: delete these too" * self.saved
            raise UserError(f"{e}{seen}") from e

    def _describe_nonfinite(self, step: int, parameter: int) -> str:
        """Names the examples of a step that is not finite, and the first parameter at fault.

        parameter: its number in tree order, -1 if it is the loss alone.
        """
        size, index = self.run.at(step - 1).train_batches.global_batch_size, self.batches.index(step - 1)
        names = parameter_names(self.run.abstract_state.params)
        where = f"first in the gradient of {names[parameter]}" if parameter >= 0 else "in the loss alone"
        return f"not finite at step {step} (examples {index * size} to {(index + 1) * size - 1}), {where}"

    def _log(self) -> None:
        """Logs the means and the speed since the last line, and what all steps have taken."""
        self._read_metrics()
        assert self.newest is not None  # of the step just made
        loop_state, counts = self.loop_state, self.counts
        sums = loop_state.sums or self.newest["sums"]
        metrics = summarize(sums) | {
            "learning_rate": float(self.newest["learning_rate"]),
            "gradient_norm": float(self.newest["gradient_norm"]),
            "skipped_updates": loop_state.skipped_updates,
            "skipped_batches": loss_spikes.skipped(loop_state.step - 1, loop_state.rollbacks),
            "tokens_per_second": counts.text_tokens / self.seconds,
            "padded_tokens_per_second": counts.tokens / self.seconds,
            "step_seconds": self.seconds / self.steps,
            "mfu": self.run.mfu(counts.flops, self.seconds),
            "mfu_done": self.run.mfu(self.flops_done, self.seconds),
            "data_wait_fraction": self.waited / self.seconds,
            **self._taken(),
            **self._phase,
            **expert_balance.layer_figures(sums),
        }
        self.writer.log(loop_state.step, "train", metrics, expert_balance.expert_loads(sums))
        self._warn_of_dead_experts(metrics.get("dead_experts", 0.0))
        self.goodput.save()
        loop_state.sums = {}
        self._reset_clock()

    def _warn_of_dead_experts(self, dead: float) -> None:
        """Says how many experts no token was given to since the last line, where they have become more."""
        if dead > self.dead_experts:
            self.writer.note(
                f"{dead:.0f} experts got no token in the steps up to {self.loop_state.step}: they learn nothing. Which "
                "ones: `experts` in metrics.jsonl; raise config.model.experts.balance_weight"
            )
        self.dead_experts = dead

    def _taken(self) -> dict[str, Optional[float]]:
        """Returns what all steps so far have taken: of two runs any of it is a common axis for their losses."""
        known = self.loop_state.counts
        return vars(known) if known else dict.fromkeys(vars(Counts()))

    def _evaluate(self, state: TrainState) -> bool:
        """Logs the validation metrics; returns whether the run's figure of them is the best so far."""
        self._read_metrics()
        loop_state, figure = self.loop_state, self.run.experiment.select_by
        with self.goodput.on("evaluating"):
            metrics = self.run.validate(self.run.validated(state))
            self.writer.log(loop_state.step, "valid", metrics | self._taken() | self._phase)
        self.resumed = time.perf_counter()
        self.evaluation = loop_state.step, metrics
        value, best = metrics.get(figure, math.nan), loop_state.best_loss
        if math.isfinite(value) and (best is None or best_step({0: best, 1: value}, figure) == 1):
            loop_state.best_loss, loop_state.evaluations_since_best = value, 0
            return True
        loop_state.evaluations_since_best += 1
        return False

    def _is_out_of_patience(self) -> bool:
        patience = self.run.experiment.evaluate.patience
        return patience is not None and self.loop_state.evaluations_since_best >= patience

    def _save(self, state: TrainState, is_scheduled: bool = True) -> None:
        """Saves a checkpoint: nothing that `_read_metrics` has not seen to be finite."""
        self._read_metrics()
        self.loop_state.metrics_file, self.loop_state.is_scheduled = self.writer.size(), is_scheduled
        evaluation, self.saved = self.last_evaluation, True
        with self.goodput.on("saving"):
            loop_state = self.loop_state.to_json() | self._phase
            self.checkpoints.save(self.loop_state.step, state, loop_state, evaluation)
        self.resumed = time.perf_counter()
