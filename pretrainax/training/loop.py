"""The loop: restore, step, log, evaluate, save, roll back, stop. It knows no objective and no architecture."""

import collections
import contextlib
import datetime
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Optional

import jax
import numpy as np

from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.config import Experiment, RunFailed
from pretrainax.data.baseline import unigram_baseline
from pretrainax.data.batch import Batch, check_batch, padding_fraction, tokens_read
from pretrainax.data.inspection import check
from pretrainax.data.pipeline import batches_of, iterate
from pretrainax.data.preparation.prepare import prepare
from pretrainax.runtime.goodput import Goodput
from pretrainax.runtime.signals import PREEMPTED, PreemptionHandler
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training import loss_spikes
from pretrainax.training.metrics import Metrics, summarize
from pretrainax.training.restore import claim_workdir, restore_or_init
from pretrainax.training.samples import samples
from pretrainax.training.setup import Run, build_run
from pretrainax.training.train_step import TrainState

Observer = Callable[[int, dict[str, np.ndarray]], None]  # (step, this process's rows of its batch)


def run(experiment: Experiment, workdir: str, age: float = 0.0, observe: Optional[Observer] = None) -> int:
    """Trains until `train.steps`, or until a signal. Returns the exit code.

    age: seconds since the process was started; observe: is called with each batch, in a thread, as soon as it is made.
    """
    with contextlib.ExitStack() as stack:
        peers = stack.enter_context(Watchdog())
        primary = jax.process_index() == 0
        goodput = Goodput(workdir, age, primary)
        with goodput.on("preparing"), peers.zero_first():
            prepared = prepare(experiment)
            claim_workdir(workdir, experiment, prepared)
        mesh = make_mesh(experiment.mesh)
        stack.enter_context(jax.set_mesh(mesh))
        stop = stack.enter_context(PreemptionHandler())
        job = build_run(experiment, prepared, mesh)
        checkpoints = Checkpoints(os.path.join(workdir, "checkpoints"), keep=experiment.checkpoint.keep)
        stack.callback(checkpoints.close)
        with goodput.on("restoring"):
            state, notes = restore_or_init(job, checkpoints)
        metrics = Metrics(workdir, experiment.train.steps, notes["step"], primary)
        stack.callback(metrics.close)
        resumed = f", resumed at step {notes['step']}" if notes["step"] else ""
        measured = check.measure(job.train_batches)
        metrics.header([("workdir", workdir + resumed), *job.describe(), ("measured", check.one_line(measured))])
        check.check(measured, experiment.objective)
        loop = Loop(job, checkpoints, metrics, goodput, stop, peers, notes, observe)
        state, exit_code = loop.run(state)
        if exit_code == 0:
            with goodput.on("finishing"):
                evaluated, figures = loop.evaluated
                finish(job, state, metrics, figures if evaluated == notes["step"] else job.validate(state.params))
            with goodput.on("saving"):
                checkpoints.wait()
            metrics.note(goodput.table())
        goodput.save(done=exit_code == 0)
    return exit_code


def to_device(batches: Iterator[dict], mesh: jax.sharding.Mesh) -> Iterator[dict]:
    """One batch ahead: the next one travels to the devices while they work on this one."""
    ahead = collections.deque()
    for batch in batches:
        ahead.append(put_batch(batch, mesh))
        if len(ahead) > 1:
            yield ahead.popleft()
    yield from ahead


class Loop:
    """Everything that happens every so many steps, around the one jitted update.

    `notes` is what must survive a resumption beside the state; each checkpoint carries a copy.
    """

    def __init__(
        self,
        job: Run,
        checkpoints: Checkpoints,
        metrics: Metrics,
        goodput: Goodput,
        stop: PreemptionHandler,
        peers: Watchdog,
        notes: dict,
        observe: Optional[Observer] = None,
    ):
        self.job, self.checkpoints, self.metrics, self.goodput = job, checkpoints, metrics, goodput
        self.stop, self.peers, self.notes, self.observe = stop, peers, notes, observe
        self.compiled = False
        self.first = notes["step"] + 1  # of this start, whatever is rolled back later
        self._reset()

    def _reset(self) -> None:
        self.batches = loss_spikes.Skipping(self.job.train_batches, self.notes["rollbacks"])
        self.paddings = collections.deque()  # the share of each batch that is made and not yet used
        self.pending = []  # (step, metrics still on the device), not looked at yet
        self.newest = None  # the last of them that was
        self.evaluated = None, None  # (step, figures) of the last evaluation here
        self.seconds, self.waited, self.steps = 0.0, 0.0, 0  # of training and of waiting for data since the last log
        self.tokens, self.flops = 0, 0.0  # in the same time

    def run(self, state: TrainState) -> tuple[TrainState, int]:
        """The state at the end, and the exit code."""
        while True:
            try:
                return self._train(state)
            except loss_spikes.Spike as found:
                spike = found.with_traceback(None)  # which would hold a state
            state = None  # two do not fit
            state = self._roll_back(spike)

    def _train(self, state: TrainState) -> tuple[TrainState, int]:
        experiment, notes = self.job.experiment, self.notes
        train, steps, first = experiment.train, experiment.train.steps, notes["step"] + 1
        batches = iterate(self.batches, first - 1, steps, experiment.data.workers)
        batches = to_device(self._checked(batches, first), self.job.mesh)
        self.resumed = time.perf_counter()
        with ThreadPoolExecutor(1, "batches") as loader:
            fetched = loader.submit(next, batches, None)
            for step in range(first, steps + 1):
                if self._out_of_patience():
                    self.metrics.note(
                        f"no better validation loss in {experiment.evaluate.patience} evaluations: stopping"
                    )
                    break
                batch, fetched = self._fetch(fetched), loader.submit(next, batches, None)
                self.goodput.step(step)
                with contextlib.nullcontext() if self.compiled else self.goodput.on("compiling"):
                    state, out = self.job.step(state, batch)
                    if not self.compiled:  # the other processes may take longer
                        jax.block_until_ready(out)
                self.compiled = True
                self.padding = self.paddings.popleft()
                self.tokens += tokens_read(batch)
                self.flops += self.job.flops_of(self.batches.index(step - 1))
                self.pending.append((step, out))
                notes["step"] = step
                if step in (self.first, self.first + 3):
                    self._announce(step - self.first, steps - step)
                jax.block_until_ready(self.pending[-2:-1])  # never more than one step ahead of the devices

                self.peers.beat(step)
                last, leaving = step == steps, self.peers.agree(self.stop.requested)
                if step % train.log_every == 0 or last:
                    self._log()
                improved = False  # who leaves evaluates first where it is due: the resumed run will not come by again
                if step % experiment.evaluate.every == 0 or last:
                    improved = self._evaluate(state)
                if step % experiment.checkpoint.every == 0 or improved or last or leaving:
                    self._save(state)
                if leaving and not last:
                    with self.goodput.on("saving"):
                        self.checkpoints.wait()
                    self.metrics.note(f"saved step {step}; the same command resumes here")
                    return state, PREEMPTED
        return state, 0

    def _roll_back(self, spike: loss_spikes.Spike) -> TrainState:
        """The state of a checkpoint before the spike; those after it are deleted, and what was logged since.

        A kill meanwhile changes nothing: the newest checkpoint, whichever that is then, leads to the same spike.
        """
        rollbacks = self.notes["rollbacks"]
        decided = loss_spikes.plan_rollback(spike, rollbacks, self.job.experiment.train)
        with self.goodput.on("restoring"):
            state, notes = restore_or_init(self.job, self.checkpoints, up_to=decided["step"])
            self.checkpoints.drop_after(notes["step"])
        decided["step"] = max(decided["step"], notes["step"])
        self.notes.update(notes, rollbacks=[*rollbacks, decided])
        self._reset()
        self.metrics.rewind(notes["step"])
        self.metrics.note(
            f"{spike.what}; rollback {len(rollbacks) + 1}: back to step {notes['step']}, and after step "
            f"{decided['step']} {decided['skipped']} batches are left out"
        )
        return state

    def _fetch(self, fetched: Future) -> dict[str, jax.Array]:
        """The next batch. Waiting for it counts from when the devices have nothing left to do."""
        if not fetched.done():
            jax.block_until_ready(self.pending[-1:])
        before = time.perf_counter()
        with self.goodput.on("waiting"):
            batch = fetched.result()
        self.waited += time.perf_counter() - before
        return batch

    def _checked(self, batches: Iterator[Batch], first: int) -> Iterator[Batch]:
        """The first batch is checked in full; the others only for how much of them is padding."""
        model, made = self.job.experiment.model, self.job.train_batches
        for step, batch in enumerate(batches, first):
            if step == first:
                check_batch(batch, model, made.lengths_of(self.batches.index(step - 1)), made.local_batch_size)
            if self.observe:
                self.observe(step, batch)
            self.paddings.append(padding_fraction(batch))
            yield batch

    def _announce(self, done: int, left: int) -> None:
        """How long the first step took, and what the next ones say of the time the others will take."""
        jax.block_until_ready(self.pending[-1][1])
        now = time.perf_counter()
        if done == 0:
            self.first_done = now
            self.metrics.note(f"first step {self.goodput.age():.1f} s after the start")
        else:
            seconds = (now - self.first_done) / done * left
            self.metrics.note(f"expected time {datetime.timedelta(seconds=round(seconds))} for {left:,} steps")

    def _catch_up(self) -> None:
        """Waits for the device and looks at every step since it last did: none that is not finite goes unseen."""
        if not self.pending:
            return
        steps, outs = zip(*jax.device_get(self.pending), strict=True)
        now = time.perf_counter()
        self.seconds, self.resumed, self.steps = self.seconds + now - self.resumed, now, self.steps + len(steps)
        self.pending, self.newest = [], outs[-1]
        train, left_out = self.job.experiment.train, []
        for step, out in zip(steps, outs, strict=True):
            if out["finite"]:
                loss = summarize(out["sums"])["loss"]
                loss_spikes.observe_step(self.notes["recent"], step, loss, float(out["gradient_norm"]), train)
                continue
            line = self._where(step, int(out["bad_parameter"]))
            left_out.append(line)
            if train.on_nonfinite == "stop" and train.on_spike == "rollback":
                raise loss_spikes.Spike(step, line)
            if train.on_nonfinite == "stop":
                raise RunFailed(
                    f"{line}; lower config.optimizer.learning_rate in a new --workdir, or resume with "
                    "--config.train.on_nonfinite=skip or --config.train.on_spike=rollback"
                )
        if left_out:
            self.notes["skipped_updates"] += len(left_out)
            self.metrics.note(f"{left_out[0]}; {len(left_out)} of the last {len(steps)} updates left out")

    def _where(self, step: int, parameter: int) -> str:
        """Of a step that is not finite: which examples, and the first parameter by its number in tree order, or -1."""
        size, index = self.job.experiment.train.global_batch_size, self.batches.index(step - 1)
        names = parameter_names(self.job.abstract_state.params)
        where = f"first in the gradient of {names[parameter]}" if parameter >= 0 else "in the loss alone"
        return f"not finite at step {step} (examples {index * size} to {(index + 1) * size - 1}), {where}"

    def _log(self) -> None:
        """The figures of the newest step, and the speed since the last line."""
        self._catch_up()
        seconds = self.seconds / self.steps
        line = summarize(self.newest["sums"]) | {
            "learning_rate": float(self.newest["learning_rate"]),
            "gradient_norm": float(self.newest["gradient_norm"]),
            "skipped_updates": self.notes["skipped_updates"],
            "skipped_batches": loss_spikes.skipped(self.notes["step"] - 1, self.notes["rollbacks"]),
            "tokens_per_second": self.tokens / self.seconds,
            "step_seconds": seconds,
            "mfu": self.job.mfu(self.flops, self.seconds),
            "data_wait_fraction": self.waited / self.seconds,
            "padding_fraction": self.padding,
        }
        self.metrics.log(self.notes["step"], "train", line)
        self.goodput.save()
        self.seconds, self.waited, self.steps, self.tokens, self.flops = 0.0, 0.0, 0, 0, 0.0

    def _evaluate(self, state: TrainState) -> bool:
        """Logs the validation figures; whether they are the best so far."""
        self._catch_up()
        with self.goodput.on("evaluating"):
            line, notes = self.job.validate(state.params), self.notes
            self.metrics.log(notes["step"], "valid", line)
        self.resumed = time.perf_counter()
        self.evaluated = notes["step"], line
        if math.isfinite(line["loss"]) and (notes["best_loss"] is None or line["loss"] < notes["best_loss"]):
            notes.update(best_loss=line["loss"], evaluations_since_best=0)
            return True
        notes["evaluations_since_best"] += 1
        return False

    def _out_of_patience(self) -> bool:
        patience = self.job.experiment.evaluate.patience
        return patience is not None and self.notes["evaluations_since_best"] >= patience

    def _save(self, state: TrainState) -> None:
        """Nothing is saved that `_catch_up` has not seen to be finite."""
        self._catch_up()
        evaluated, figures = self.evaluated
        measured = {"loss": figures["loss"]} if evaluated == self.notes["step"] else None
        with self.goodput.on("saving"):
            self.checkpoints.save(self.notes["step"], state, self.notes, measured)
        self.resumed = time.perf_counter()


def finish(job: Run, state: TrainState, metrics: Metrics, figures: dict) -> None:
    """The table beside the unigram baseline, a few samples, and the picture."""
    experiment = job.experiment
    train, valid = (batches_of(experiment, job.prepared, split) for split in ("train", "valid"))  # of all processes
    baseline = unigram_baseline(
        (train[i] for i in range(min(50, experiment.train.steps))),
        job.validation_batches(valid),
        experiment.model.vocab_size,
    )
    metrics.finish(figures, baseline)
    for text in samples(job.model, state.params, valid[0], job.prepared.tokenizer):
        metrics.note(f"  · {text}")
