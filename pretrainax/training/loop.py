"""Implements the training loop: step, log, evaluate, save, roll back, stop, for all objectives and architectures.

Loop       everything around the jitted update; callbacks receive the loop
  train          runs the steps; after a loss spike it continues from an earlier checkpoint
  _train_steps   for each step: fetches a batch, runs the update, then logs, evaluates and saves if due
  _roll_back, _next_batch, _watch_batches, _announce_speed: helpers of `train` and `_train_steps`
  _read_metrics  copies the metrics of pending steps to the host, and checks them for NaN, infinity and spikes
  _log, _evaluate, _save: called every `train.logged_every`, `evaluate.every` and `checkpoint.every` steps
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
from pretrainax.config import Diverged, UserError
from pretrainax.config.metric import with_metrics
from pretrainax.data.batch import HostBatch, check_batch, tokens_read
from pretrainax.data.corpus_check import CorpusCheck
from pretrainax.data.pipeline import iterate
from pretrainax.files.errors import counted
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
    """Copies batches to the devices of the mesh, prefetching one batch."""
    on_device = collections.deque()
    for batch in batches:
        on_device.append(put_batch(batch, mesh))
        if len(on_device) > 1:
            yield on_device.popleft()
    yield from on_device


class Loop:
    """Runs the jitted update, and periodically logs, evaluates and saves.

    `loop_state` is what a restart needs in addition to the `TrainState`; each checkpoint contains a copy of it.
    Callbacks use `run`, `step`, `workdir`, `sums`, `note`, `log_text`, `paused`, `stop`, `request` and `is_stopping`.
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
        self.first_rows: Sequence[Row] = ()  # header rows about the workdir and the initial parameters
        self.sums: Mapping[str, Sequence] = {}  # {metric: (sum, count)} over the steps of the last "train" line
        self.saved = False  # True if this process has saved a checkpoint
        self.compiled: set[tuple] = set()  # updates and lengths of rows for which a program is compiled
        self.first_step = loop_state.step + 1  # first step of this process; a rollback does not change this number
        self._reset()

    def _reset(self) -> None:
        """Discards all data about steps after `loop_state.step`; used in a new process and after a rollback."""
        self.writer.check(self.loop_state.metrics_file, self.loop_state.step)
        self.run = self.run.at(self.loop_state.step - 1)
        self.batches = loss_spikes.SkippingBatches(self.run.batches, self.loop_state.rollbacks)
        # (step, its tokens and FLOPs, whether it is timed, its metrics on the device) of steps that were not read
        self.pending: list[tuple[int, Counts, bool, dict[str, PyTree]]] = []
        self.newest: Optional[dict[str, PyTree]] = None  # metrics of the last step whose metrics were read
        self.evaluation: Optional[tuple[int, dict[str, float]]] = None  # (step, metrics) of the last validation
        self._requested_stop, self._requests = "", set[str]()  # arguments of `stop` and of `request`
        self._reset_clock()
        self._select_by(self.run.experiment.select_by)

    def _reset_clock(self) -> None:
        """Resets the times and counts from which the speeds in the next line of metrics.jsonl are computed.

        The speeds are those of the steps that did not compile a program.
        """
        self.seconds, self.waited, self.steps = 0.0, 0.0, 0  # seconds of training; seconds of waiting for data; steps
        self.compile_seconds = 0.0  # seconds of the other steps: compilation and the step itself
        self.counts = Counts()  # counts of the steps in `steps`
        self.flops_done = 0.0  # FLOPs of these steps, without masked blocks that attention skips

    def _select_by(self, metric: str) -> None:
        """Discards the restored best metric value if the run now has another metric or other validation rows."""
        state, batches, change = self.loop_state, self.run.validation.sizes[0], ""
        if state.select_by != metric:
            change = f"validation {state.select_by} selected the best checkpoint; from this step on {metric} selects it"
            change += ", among checkpoints with that metric"
        elif state.valid_batches not in (None, batches):
            change = f"a validation had {counted(state.valid_batches or 0, 'batch')}; from this step on it has "
            change += f"{batches:,}, and the best {metric} and the patience begin again"
        if change and state.best_loss is not None:
            self.writer.note(f"until now {change}")
            state.best_loss, state.evaluations_since_best = None, 0
        state.select_by, state.valid_batches = metric, batches

    @property
    def step(self) -> int:
        """Returns the number of completed updates."""
        return self.loop_state.step

    @property
    def workdir(self) -> str:
        """Returns the run's folder (--workdir), or the local copy of that folder if --workdir is a URL."""
        return self.writer.workdir

    @property
    def is_stopping(self) -> bool:
        """Returns True if this process received a signal to stop the run."""
        return self.preemption.requested

    def note(self, line: str) -> None:
        """Logs a line."""
        self.writer.note(line)

    def log_text(self, name: str, text: str) -> None:
        """Passes text that the run outputs, such as samples, to the `on_text` method of every callback."""
        self.callbacks.call("on_text", self, name, text)

    def stop(self, reason: str) -> None:
        """Ends the run after this step as if it were the last one; all processes must call this method."""
        self._requested_stop = reason

    def request(self, *what: Literal["evaluation", "checkpoint"]) -> None:
        """Requests a validation or a checkpoint after this step; all processes must call this method."""
        self._requests.update(what)

    @contextlib.contextmanager
    def paused(self, part: str) -> Iterator[None]:
        """Waits until the devices are idle, and excludes the time inside the context from the step time.

        Args:
          part: the row of the goodput table to which the time is added.
        """
        self._read_metrics()
        waited = self.waited
        with self.goodput.on(part):
            yield
        self.resumed, self.waited = time.perf_counter(), waited

    def _call(self, method: str, state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Calls the callbacks' method `method` between two steps, and excludes the time from the step time."""
        self.callbacks.call(method, self, state, metrics)
        self.resumed = time.perf_counter()

    @property
    def last_evaluation(self) -> Optional[dict[str, float]]:
        """Returns the validation metrics of the current step, or None if this step was not validated."""
        step, metrics = self.evaluation or (None, None)
        return metrics if step == self.loop_state.step else None

    @property
    def _phase(self) -> dict[str, float]:
        """Returns {"phase": number} to add to metrics and checkpoints, or {} for a run without phases."""
        return {"phase": self.run.phase.number} if self.run.phase else {}

    def train(self, state: TrainState) -> tuple[TrainState, int]:
        """Runs all remaining steps; returns the final state and the exit code (0, or PREEMPTED after a signal)."""
        self._call("on_start", state, {})
        while True:
            try:
                return self._train_steps(state)
            except loss_spikes.Spike as error:
                spike = error.with_traceback(None)  # the traceback would hold a state
            del state  # two states do not fit in memory
            state = self._roll_back(spike)

    def _train_steps(self, state: TrainState) -> tuple[TrainState, int]:
        """Runs the steps after `loop_state.step`; returns the state and the exit code. Raises Spike or Diverged."""
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
                if reason := self._stop_reason():
                    self.note(reason)
                    break
                self._enter_phase(step)
                self.callbacks.call("before_step", self, state, {})
                with jax.profiler.StepTraceAnnotation(STEP, step_num=step):
                    self.goodput.step(step)
                    program = id(self.run.step.jitted), self.run.train_batches.lengths_of(self.batches.index(step - 1))
                    is_compiled = program in self.compiled
                    with contextlib.nullcontext() if is_compiled else self.paused("compiling"):
                        batch, fetched = self._next_batch(fetched), loader.submit(next, batches, None)
                        start = time.perf_counter()
                        state, metrics = self.run.step(state, batch, self.run.frozen)
                        if not is_compiled:  # other processes may take longer to compile
                            jax.block_until_ready(metrics)
                            self.compile_seconds += time.perf_counter() - start
                self.compiled.add(program)
                self._count(step, batch, metrics, is_compiled)
                self.callbacks.call("on_step", self, state, metrics)

                self._check_corpora()
                self.run.peers.beat(step)
                if self._run_due_actions(state):
                    return state, PREEMPTED
        return state, 0

    def _count(self, step: int, batch: dict[str, jax.Array], metrics: dict[str, PyTree], is_timed: bool) -> None:
        """Appends a dispatched step to `pending`, then waits until the devices have finished the step before it."""
        index, work = self.batches.index(step - 1), self.run.work
        self.flops_done += work.flops_done_of(index) * is_timed
        self.pending.append((step, Counts(tokens=tokens_read(batch), flops=work.flops_of(index)), is_timed, metrics))
        self.loop_state.step = step
        if step in (self.first_step, self.first_step + 3):
            self._announce_speed(step - self.first_step)
        jax.block_until_ready(self.pending[-2:-1])  # stays at most one step ahead of the devices

    def _run_due_actions(self, state: TrainState) -> bool:
        """Logs, evaluates and saves if due after this step; returns True if a signal requires the run to stop now."""
        experiment, checkpoint, step = self.run.experiment, self.run.experiment.checkpoint, self.step
        requests, self._requests = self._requests, set()
        is_stopping = self.run.peers.agree(self.preemption.requested)
        if is_logged := step % experiment.train.logged_every == 0 or self._is_end:
            self._log(state)
        is_best = False  # a stopping run still evaluates if due, because the resumed run starts after this step
        if step % experiment.evaluate.every == 0 or self._is_end or "evaluation" in requests:
            is_best = self._evaluate(state)
        if self._is_end and not is_logged:  # this validation ended the run
            self._log(state)
        is_due = step % checkpoint.every == 0 or checkpoint.keeps(step) or "checkpoint" in requests
        is_scheduled = is_due or is_best or self._is_end
        if is_scheduled or is_stopping:
            self._save(state, is_scheduled)
        if is_stopping and step < experiment.train.steps and not self._stop_reason():
            with self.goodput.on("saving"):
                self.checkpoints.wait()
            self.note(f"saved step {step}; the same command resumes here")
            return True
        return False

    @property
    def _is_end(self) -> bool:
        """Returns True if the completed step is the last one of the phase, or if the run ends before its last step."""
        return self.step == self.run.stop or bool(self._stop_reason())

    def _stop_reason(self) -> str:
        """Returns the reason to end the run before its last step, or "" if the run continues."""
        evaluate = self.run.experiment.evaluate
        if evaluate.patience is not None and self.loop_state.evaluations_since_best >= evaluate.patience:
            return (
                f"no better validation {self.run.experiment.select_by} in {counted(evaluate.patience, 'evaluation')}: "
                "stopping; to continue, run the same command with a larger config.evaluate.patience"
            )
        return self._requested_stop and f"stopped after step {self.step}: {self._requested_stop}"

    def _roll_back(self, spike: loss_spikes.Spike) -> TrainState:
        """Restores a checkpoint from before the spike, and deletes later checkpoints and later lines of metrics.jsonl.

        If the process is killed during the rollback, the resumed run detects the same spike again, from any checkpoint.
        If all checkpoints are too new, the oldest one is restored, also after a kill (`Checkpoints.restore_newest`).
        """
        earlier_rollbacks = self.loop_state.rollbacks
        rollback = loss_spikes.plan_rollback(spike, earlier_rollbacks, self.run.experiment.train)
        with self.goodput.on("restoring"):
            state, restored_state = restore_or_init(self.run, self.checkpoints, up_to=rollback.step)
            self.checkpoints.drop_after(restored_state.step)
        rollback = dataclasses.replace(rollback, step=max(rollback.step, restored_state.step))
        self.loop_state = dataclasses.replace(restored_state, rollbacks=[*earlier_rollbacks, rollback])
        self.writer.rewind(restored_state.step)
        self._reset()
        self.writer.note(
            f"{spike.what}; rollback {len(earlier_rollbacks) + 1}: back to step {restored_state.step}; after step "
            f"{rollback.step} the run skips {rollback.skipped} batches"
        )
        self._call("on_rollback", state, {})
        return state

    def _enter_phase(self, step: int) -> None:
        """Switches to a new phase's model, update and batches if `step` begins one, and logs the phase.

        Spike detection discards its previous losses, because losses of different phases are not comparable.
        """
        run = self.run.at(step - 1)
        if run is not self.run:
            self._read_metrics()
            self.run, self.loop_state.recent = run, []
            self.writer.note(str(run.phase))

    def _next_batch(self, fetched: Future) -> dict[str, jax.Array]:
        """Waits for the fetched batch and returns it; adds the time for which the devices sat idle to `waited`."""
        if not fetched.done():
            jax.block_until_ready(self.pending[-1:])
        start = time.perf_counter()
        with self.goodput.on("waiting"):
            batch = fetched.result()
        self.waited += time.perf_counter() - start
        return batch

    def _watch_batches(self, batches: Iterator[HostBatch], first: int) -> Iterator[HostBatch]:
        """Yields the batches from step `first` on, after checking the first one and the first of each later phase."""
        model, checked = self.run.experiment.model, None
        for step, batch in enumerate(batches, first):
            current = self.run.at(step - 1).train_batches
            if current is not checked:
                check_batch(batch, model, current.lengths_of(self.batches.index(step - 1)), current.local_batch_size)
                checked = current
            self.callbacks.call_untimed("on_batch", step, batch)
            yield batch

    def _announce_speed(self, steps_done: int) -> None:
        """Logs the startup time after the first step (`steps_done` is 0) or, 3 steps later, the estimated time left."""
        jax.block_until_ready(self.pending[-1][-1])
        now = self.goodput.in_steps()
        if steps_done == 0:
            self.first_done = now
            self.writer.note(
                f"first step {self.goodput.age():.1f} s after the start, {self.compile_seconds:.1f} s of it compiling"
            )
        else:
            remaining = self.run.experiment.train.steps - self.loop_state.step
            seconds = (now - self.first_done) / steps_done * self.run.steps_left(self.loop_state.step)
            self.writer.note(
                f"expected time {datetime.timedelta(seconds=round(seconds))} for {counted(remaining, 'step')}"
            )

    def _read_metrics(self) -> None:
        """Copies the metrics of all pending steps to the host and checks them for non-finite values and spikes."""
        if not self.pending:
            return
        steps, counts_of_steps, timed, on_device = zip(*self.pending, strict=True)
        metrics_of_steps = jax.device_get(on_device)
        now = time.perf_counter()
        self.seconds, self.resumed, self.steps = self.seconds + now - self.resumed, now, self.steps + sum(timed)
        self.pending, self.newest = [], metrics_of_steps[-1]
        train, objective, skipped_lines = self.run.experiment.train, self.run.experiment.objective, []
        watched_loss = objective.watched or objective.select_by
        for step, counts, is_timed, metrics in zip(steps, counts_of_steps, timed, metrics_of_steps, strict=True):
            counts.add(Counts(**{name: int(count) for name, count in metrics["text"].items()}))
            for total in filter(None, (is_timed and self.counts, self.loop_state.counts)):
                total.add(counts)
            if metrics["finite"]:
                self.loop_state.add_sums(metrics["sums"])
                means, norm = summarize(metrics["sums"]), float(metrics["gradient_norm"])
                loss = means.get(watched_loss, means["loss"])  # a step without labels for `watched` has only "loss"
                loss_spikes.observe_step(self.loop_state.recent, step, loss, norm, train)
                continue
            line = self._describe_nonfinite(step, int(metrics["bad_parameter"]))
            skipped_lines.append(line)
            if train.on_nonfinite == "stop" and train.on_spike == "rollback":
                raise loss_spikes.Spike(step, line)
            if train.on_nonfinite == "stop":
                raise Diverged(
                    f"{line}; lower config.optimizer.learning_rate in a new --workdir, or resume with "
                    "--config.train.on_nonfinite=skip or --config.train.on_spike=rollback"
                )
        if skipped_lines:
            self.loop_state.skipped_updates += len(skipped_lines)
            self.writer.note(
                f"{skipped_lines[0]}; skipped {len(skipped_lines)} of the last {counted(len(steps), 'update')}"
            )

    def _check_corpora(self) -> None:
        """Raises UserError if the checksum of a corpus file is wrong; the message names the affected checkpoints."""
        try:
            self.corpus_check.raise_if_damaged()
        except UserError as e:
            hint = f"; checkpoints after step {self.first_step - 1} may have seen it: delete them too" * self.saved
            raise UserError(f"{e}{hint}") from e

    def _describe_nonfinite(self, step: int, parameter: int) -> str:
        """Describes a non-finite step: its examples, and the first parameter with a non-finite gradient.

        Args:
          parameter: index of that parameter in tree order, or -1 if only the loss is not finite.
        """
        size, index = self.run.at(step - 1).train_batches.global_batch_size, self.batches.index(step - 1)
        names = parameter_names(self.run.abstract_state.params)
        where = f"first in the gradient of {names[parameter]}" if parameter >= 0 else "only in the loss"
        return f"not finite at step {step} (examples {index * size} to {(index + 1) * size - 1}), {where}"

    def _log(self, state: TrainState) -> None:
        """Logs the mean metrics and the speed since the last log, and the total counts of all steps so far."""
        self._read_metrics()
        assert self.newest is not None  # _read_metrics sets it after a step
        loop_state, counts = self.loop_state, self.counts
        seconds = self.seconds if self.steps else math.nan  # null in the file: every step compiled
        self.sums = loop_state.sums or self.newest["sums"]
        metrics = summarize(self.sums) | {
            "learning_rate": float(self.newest["learning_rate"]),
            "gradient_norm": float(self.newest["gradient_norm"]),
            "skipped_updates": loop_state.skipped_updates,
            "skipped_batches": loss_spikes.skipped(loop_state.step - 1, loop_state.rollbacks),
            "tokens_per_second": counts.text_tokens / seconds,
            "padded_tokens_per_second": counts.tokens / seconds,
            "step_seconds": seconds / max(self.steps, 1),
            **({"compile_seconds": self.compile_seconds} if self.compile_seconds else {}),
            "mfu": self.run.work.mfu(counts.flops, seconds),
            "mfu_executed": self.run.work.mfu(self.flops_done, seconds),
            "data_wait_fraction": self.waited / seconds,
            **self._total_counts(),
            **self._phase,
        }
        for origin, extra in self.callbacks.call("log_metrics", self, state):
            metrics = with_metrics(metrics, extra, origin)
        self.writer.log(loop_state.step, "train", metrics)
        self._call("on_log", state, metrics)
        self.goodput.save()
        loop_state.sums = {}
        self._reset_clock()

    def _total_counts(self) -> dict[str, Optional[float]]:
        """Returns the total tokens, bytes and FLOPs so far (None if unknown), for comparing runs at equal totals."""
        counts = self.loop_state.counts
        return vars(counts) if counts else dict.fromkeys(vars(Counts()))

    def _evaluate(self, state: TrainState) -> bool:
        """Computes and logs the validation metrics; returns True if the `select_by` metric is the best so far."""
        self._read_metrics()
        loop_state, metric = self.loop_state, self.run.experiment.select_by
        with self.goodput.on("evaluating"):
            metrics, totals = self.run.validate(self.run.validated(state)), self._total_counts() | self._phase
        for origin, extra in self.callbacks.call("evaluation_metrics", self, state):
            with_metrics(totals, extra, origin)  # raises UserError for a name of a total
            metrics = with_metrics(metrics, extra, origin)
        with self.goodput.on("evaluating"):
            line = metrics | totals
            self.writer.log(loop_state.step, "valid", line)
        self._call("on_evaluate", state, line)
        self.evaluation = loop_state.step, {name: x for name, x in metrics.items() if not isinstance(x, dict)}
        value, best_value = float(metrics.get(metric, math.nan)), loop_state.best_loss
        if math.isfinite(value) and (best_value is None or best_step({0: best_value, 1: value}, metric) == 1):
            loop_state.best_loss, loop_state.evaluations_since_best = value, 0
            return True
        loop_state.evaluations_since_best += 1
        return False

    def _save(self, state: TrainState, is_scheduled: bool = True) -> None:
        """Checks pending steps, then saves a checkpoint; `is_scheduled` is False if only a signal caused the save."""
        self._read_metrics()
        self.loop_state.metrics_file, self.loop_state.is_scheduled = self.writer.size(), is_scheduled
        evaluation, self.saved = self.last_evaluation, True
        with self.goodput.on("saving"):
            loop_state = self.loop_state.to_json() | self._phase
            self.checkpoints.save(self.loop_state.step, state, loop_state, evaluation)
        self._call("on_save", state, evaluation or {})
