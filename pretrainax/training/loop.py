"""The training loop: restore, step, log, evaluate, save, roll back, stop. It knows no objective and no architecture.

Loop       all that happens around the jitted update; what callbacks are given
  train          the steps; after a spike of the loss, once more from an earlier checkpoint
  _train_steps   one after the other: a batch, the update, and what is due after it
  _roll_back, _next_batch, _watch_batches, _announce_speed: parts of that
  _read_metrics  metrics stay on the device until something needs them; each step's are looked at once
  _log, _evaluate, _save: every `train.logged_every`, `evaluate.every`, `checkpoint.every` steps
"""

import collections
import contextlib
import dataclasses
import datetime
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, Optional

import jax

from pretrainax.checkpoints.best import best_step
from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.config import RunFailed, UserError
from pretrainax.data.batch import HostBatch, check_batch, tokens_read
from pretrainax.data.corpus_check import CorpusCheck
from pretrainax.data.pipeline import iterate
from pretrainax.runtime.goodput import Goodput
from pretrainax.runtime.recorder import STEP
from pretrainax.runtime.signals import PREEMPTED, PreemptionHandler
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.param_paths import PyTree, parameter_names
from pretrainax.training import loss_spikes
from pretrainax.training.callbacks import Callbacks
from pretrainax.training.loop_state import Counts, LoopState
from pretrainax.training.metrics import summarize
from pretrainax.training.metrics_writer import MetricsWriter
from pretrainax.training.restore import restore_or_init
from pretrainax.training.run import Run
from pretrainax.training.start import Row
from pretrainax.training.train_step import TrainState


def to_device(batches: Iterator[HostBatch], mesh: jax.sharding.Mesh) -> Iterator[dict[str, jax.Array]]:
    """Yields the batches on the mesh, one ahead: the next one travels while the devices work on this one."""
    ahead = collections.deque()
    for batch in batches:
        ahead.append(put_batch(batch, mesh))
        if len(ahead) > 1:
            yield ahead.popleft()
    yield from ahead


class Loop:
    """Everything that happens every so many steps, around the one jitted update.

    `loop_state` is what must survive a restart beside the `TrainState`; each checkpoint carries a copy. Callbacks use
    `run`, `step`, `workdir`, `sums`, `note`, `text`, `paused`, `stop`, `ask_for` and `is_leaving`.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        goodput: Goodput,
        preemption: PreemptionHandler,
        loop_state: LoopState,
        corpus_check: CorpusCheck,
        callbacks: Callbacks,
    ):
        self.run, self.checkpoints, self.writer, self.goodput = run, checkpoints, writer, goodput
        self.preemption, self.loop_state, self.corpus_check = preemption, loop_state, corpus_check
        self.callbacks = callbacks
        self.first_rows: Sequence[Row] = ()  # for the header: where the run is, and its start
        self.sums: Mapping[str, Sequence] = {}  # (sum, count) of each figure over the steps of the last line
        self._stopped, self._asked_for = "", set[str]()  # by a callback: why; "evaluation", "checkpoint"
        self.saved = False  # a step of this start has been saved
        self.compiled: Optional[Run] = None  # the phase whose update is
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
    def step(self) -> int:
        """Returns how many updates are made."""
        return self.loop_state.step

    @property
    def workdir(self) -> str:
        """Returns the folder of the run."""
        return self.writer.workdir

    @property
    def is_leaving(self) -> bool:
        """Returns True if this process is asked to leave."""
        return self.preemption.requested

    def note(self, line: str) -> None:
        """Prints a line between those of the run."""
        self.writer.note(line)

    def text(self, name: str, text: str) -> None:
        """Hands a text about the model to all callbacks."""
        self.callbacks.call("on_text", self, name, text)

    def stop(self, reason: str) -> None:
        """Ends the run after this step, as if it were the last one; all processes must ask for it."""
        self._stopped = reason

    def ask_for(self, *what: Literal["evaluation", "checkpoint"]) -> None:
        """Makes a validation or saves a checkpoint after this step; all processes must ask for it."""
        self._asked_for.update(what)

    @contextlib.contextmanager
    def paused(self, part: str) -> Iterator[None]:
        """Does something between two steps, when the devices have nothing to do; its time is that of no step.

        part: of the goodput table.
        """
        self._read_metrics()
        with self.goodput.on(part):
            yield
        self.resumed = time.perf_counter()

    def _call(self, method: str, state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Calls the callbacks between two steps; their time is that of no step."""
        self.callbacks.call(method, self, state, metrics)
        self.resumed = time.perf_counter()

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
        self._call("on_start", state, {})
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
        steps, first = experiment.train.steps, loop_state.step + 1
        batches = iterate(self.batches, first - 1, steps, experiment.data.workers or 0)
        batches = to_device(self._watch_batches(batches, first), self.run.mesh)
        self.resumed = time.perf_counter()
        if first == 1 and experiment.checkpoint.keeps(0):
            self._save(state)
        with ThreadPoolExecutor(1, "batches") as loader:
            fetched = loader.submit(next, batches, None)
            for step in range(first, steps + 1):
                if why := self._why_stop():
                    self.note(why)
                    break
                self._enter_phase(step)
                self.callbacks.call("before_step", self, state, {})
                with jax.profiler.StepTraceAnnotation(STEP, step_num=step):
                    batch, fetched = self._next_batch(fetched), loader.submit(next, batches, None)
                    self.goodput.step(step)
                    is_compiled = self.compiled is self.run
                    with contextlib.nullcontext() if is_compiled else self.goodput.on("compiling"):
                        state, metrics = self.run.step(state, batch, self.run.frozen)
                        if not is_compiled:  # the other processes may take longer
                            jax.block_until_ready(metrics)
                self.compiled = self.run
                self._count(step, batch, metrics)
                self.callbacks.call("on_step", self, state, metrics)

                self._stop_if_text_is_damaged()
                self.run.peers.beat(step)
                if self._do_what_is_due(state):
                    return state, PREEMPTED
        return state, 0

    def _count(self, step: int, batch: dict[str, jax.Array], metrics: dict[str, PyTree]) -> None:
        """Adds a step that is on its way to those not looked at yet."""
        index, work = self.batches.index(step - 1), self.run.work
        self.flops_done += work.flops_done_of(index)
        self.pending.append((step, Counts(tokens=tokens_read(batch), flops=work.flops_of(index)), metrics))
        self.loop_state.step = step
        if step in (self.first_step, self.first_step + 3):
            self._announce_speed(step - self.first_step)
        jax.block_until_ready(self.pending[-2:-1])  # never more than one step ahead of the devices

    def _do_what_is_due(self, state: TrainState) -> bool:
        """Logs, evaluates and saves after a step; returns whether the run leaves here, to be resumed."""
        experiment, step, asked = self.run.experiment, self.step, self._asked_for
        self._asked_for = set()
        is_end = step == self.run.stop  # of the phase, whose last figures are its own
        is_last, is_leaving = step == experiment.train.steps, self.run.peers.agree(self.preemption.requested)
        if step % experiment.train.logged_every == 0 or is_end:
            self._log(state)
        is_best = False  # who leaves evaluates first where it is due: the resumed run will not come by again
        if step % experiment.evaluate.every == 0 or is_end or "evaluation" in asked:
            is_best = self._evaluate(state)
        is_due = step % experiment.checkpoint.every == 0 or experiment.checkpoint.keeps(step) or "checkpoint" in asked
        is_scheduled = is_due or is_best or is_end or bool(self._stopped)
        if is_scheduled or is_leaving:
            self._save(state, is_scheduled)
        if is_leaving and not is_last:
            with self.goodput.on("saving"):
                self.checkpoints.wait()
            self.note(f"saved step {step}; the same command resumes here")
            return True
        return False

    def _why_stop(self) -> str:
        """Returns why the run ends before its last step; "" where it goes on."""
        evaluate = self.run.experiment.evaluate
        if evaluate.patience is not None and self.loop_state.evaluations_since_best >= evaluate.patience:
            return (
                f"no better validation {self.run.experiment.select_by} in {evaluate.patience} evaluations: "
                "stopping; with a larger config.evaluate.patience the same command goes on"
            )
        return self._stopped and f"stopped after step {self.step}: {self._stopped}"

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
        self._call("on_rollback", state, {})
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
            self.callbacks.call_beside("on_batch", step, batch)
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
        watched = objective.watched or objective.select_by
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

    def _log(self, state: TrainState) -> None:
        """Logs the means and the speed since the last line, and what all steps have taken."""
        self._read_metrics()
        assert self.newest is not None  # of the step just made
        loop_state, counts = self.loop_state, self.counts
        self.sums = loop_state.sums or self.newest["sums"]
        metrics = summarize(self.sums) | {
            "learning_rate": float(self.newest["learning_rate"]),
            "gradient_norm": float(self.newest["gradient_norm"]),
            "skipped_updates": loop_state.skipped_updates,
            "skipped_batches": loss_spikes.skipped(loop_state.step - 1, loop_state.rollbacks),
            "tokens_per_second": counts.text_tokens / self.seconds,
            "padded_tokens_per_second": counts.tokens / self.seconds,
            "step_seconds": self.seconds / self.steps,
            "mfu": self.run.work.mfu(counts.flops, self.seconds),
            "mfu_done": self.run.work.mfu(self.flops_done, self.seconds),
            "data_wait_fraction": self.waited / self.seconds,
            **self._taken(),
            **self._phase,
        }
        for more in self.callbacks.call("figures", self, state):
            metrics |= more
        self.writer.log(loop_state.step, "train", metrics)
        self._call("on_log", state, metrics)
        self.goodput.save()
        loop_state.sums = {}
        self._reset_clock()

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
        for more in self.callbacks.call("evaluation", self, state):
            metrics |= more
        with self.goodput.on("evaluating"):
            line = metrics | self._taken() | self._phase
            self.writer.log(loop_state.step, "valid", line)
        self._call("on_evaluate", state, line)
        self.evaluation = loop_state.step, metrics
        value, best = metrics.get(figure, math.nan), loop_state.best_loss
        if math.isfinite(value) and (best is None or best_step({0: best, 1: value}, figure) == 1):
            loop_state.best_loss, loop_state.evaluations_since_best = value, 0
            return True
        loop_state.evaluations_since_best += 1
        return False

    def _save(self, state: TrainState, is_scheduled: bool = True) -> None:
        """Saves a checkpoint: nothing that `_read_metrics` has not seen to be finite."""
        self._read_metrics()
        self.loop_state.metrics_file, self.loop_state.is_scheduled = self.writer.size(), is_scheduled
        evaluation, self.saved = self.last_evaluation, True
        with self.goodput.on("saving"):
            loop_state = self.loop_state.to_json() | self._phase
            self.checkpoints.save(self.loop_state.step, state, loop_state, evaluation)
        self._call("on_save", state, evaluation or {})
