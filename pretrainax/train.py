"""The loop: restore, step, log, evaluate, save, stop. It knows no objective and no architecture."""

import collections
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from pretrainax import config as config_lib
from pretrainax import sharding
from pretrainax.checkpoint import Checkpoints, load_params
from pretrainax.config import Experiment, RunFailed, UserError
from pretrainax.data.baseline import unigram_baseline
from pretrainax.data.pipeline import check_batch, iterate
from pretrainax.evaluate import evaluate, summarize
from pretrainax.job import Job, assemble
from pretrainax.metrics import Metrics
from pretrainax.prepare import Prepared, prepare
from pretrainax.sample import samples
from pretrainax.paths import parameter_names
from pretrainax.train_step import TrainState, init_state

PREEMPTED = 75  # EX_TEMPFAIL of <sysexits.h>: run the same command again


def run(experiment: Experiment, workdir: str) -> int:
    """Trains until `train.steps`, or until a signal. Returns the exit code."""
    started = time.perf_counter()
    prepared = prepare(experiment)
    claim(workdir, experiment, prepared)
    mesh = sharding.make_mesh(experiment.mesh)
    with jax.set_mesh(mesh), Stop() as stop:
        job = assemble(experiment, prepared, mesh)
        checkpoints = Checkpoints(os.path.join(workdir, "checkpoints"), keep=experiment.checkpoint.keep)
        state, notes = start(job, checkpoints)
        metrics = Metrics(workdir, total_steps=experiment.train.steps, resume_step=notes["step"])
        metrics.header([("workdir", workdir), *job.describe()])
        loop = Loop(job, checkpoints, metrics, stop, started)
        try:
            state, exit_code = loop.run(state, notes)
        finally:
            checkpoints.close()
            metrics.close()
        if exit_code == 0:
            finish(job, state, metrics)
    return exit_code


def claim(workdir: str, experiment: Experiment, prepared: Prepared) -> None:
    """Writes config.json and the tokenizer, or refuses a workdir where another config has been at work."""
    path = os.path.join(workdir, "config.json")
    if os.path.exists(path):
        changed = config_lib.differences(config_lib.load(path), experiment)
        if changed:
            raise UserError(
                f"--workdir={workdir} holds a run of another config: {', '.join(changed)}; "
                "take another --workdir, or set these fields back to resume"
            )
    if jax.process_index() == 0:
        os.makedirs(workdir, exist_ok=True)
        prepared.tokenizer.save(os.path.join(workdir, "tokenizer"))
        with open(path + ".tmp", "w", encoding="utf-8") as f:
            f.write(config_lib.dump(experiment))
        os.replace(path + ".tmp", path)  # a run that is killed here leaves no half-written config


def start(job: Job, checkpoints: Checkpoints) -> tuple[TrainState, dict]:
    """The state to train from, and what the loop remembers beside it.

    1. The newest checkpoint of the workdir that verifies.
    2. `config.checkpoint.init_from`: parameters of another run, a fresh optimizer.
    3. Fresh parameters.
    """
    fingerprint = job.prepared.tokenizer.fingerprint
    restored = checkpoints.restore_newest(job.abstract_state)
    if restored is not None:
        _, state, notes = restored
        if notes["tokenizer"] != fingerprint:
            raise UserError(
                f"the checkpoint was trained with tokenizer {notes['tokenizer'][:12]}, the data is now tokenized with "
                f"{fingerprint[:12]}: set config.tokenizer.path to the workdir's tokenizer/ folder"
            )
        return state, notes
    state = init_state(job.model, job.optimizer, job.batch_shapes, job.mesh, job.experiment.train.seed)
    if job.experiment.checkpoint.init_from:
        state = state.replace(params=load_params(job.experiment.checkpoint.init_from, job.abstract_state.params))
    return state, {"step": 0, "tokenizer": fingerprint, "best_loss": None, "evaluations_since_best": 0}


class Stop:
    """Catches SIGTERM and SIGINT: the first asks the loop to save and leave, a second one leaves at once."""

    def __enter__(self):
        self.requested = False
        self._previous = {s: signal.signal(s, self._catch) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _catch(self, number, _):
        if self.requested:
            os._exit(128 + number)
        self.requested = True
        print(f"\n{signal.Signals(number).name}: saving after this step; once more to leave at once", file=sys.stderr)


def to_device(batches: Iterator[dict], mesh: jax.sharding.Mesh) -> Iterator[dict]:
    """One batch ahead: the next one travels to the devices while they work on this one."""
    ahead = collections.deque()
    for batch in batches:
        ahead.append(sharding.put_batch(batch, mesh))
        if len(ahead) > 1:
            yield ahead.popleft()
    yield from ahead


class Loop:
    """Everything that happens every so many steps, around the one jitted update."""

    def __init__(self, job: Job, checkpoints: Checkpoints, metrics: Metrics, stop: Stop, started: float):
        self.job, self.checkpoints, self.metrics, self.stop = job, checkpoints, metrics, stop
        self.started = started
        self.pending = []  # (step, metrics still on the device) since the last log
        self.waited = 0.0  # seconds spent waiting for data since then
        self.logged = time.perf_counter()

    def run(self, state: TrainState, notes: dict) -> tuple[TrainState, int]:
        experiment = self.job.experiment
        train, steps = experiment.train, experiment.train.steps
        first = notes["step"] + 1
        batches = iterate(self.job.train_batches, first - 1, steps, experiment.data.workers)
        batches = to_device(self._checked(batches), self.job.mesh)
        for step in range(first, steps + 1):
            before = time.perf_counter()
            batch = next(batches)
            self.waited += time.perf_counter() - before
            state, out = self.job.step(state, batch)
            self.pending.append((step, out))
            if step == first:
                jax.block_until_ready(out)
                self.metrics.note(f"first step after {time.perf_counter() - self.started:.1f} s")
            if step == min(first + 3, steps):
                self._announce(steps - step)
            notes["step"] = step

            last, leaving = step == steps, self.stop.requested
            if step % train.log_every == 0 or last or leaving:
                self._log()
            if step % experiment.evaluate.every == 0 or last:
                self._log_validation(state, notes)
            out_of_patience = self._out_of_patience(notes)
            if step % experiment.checkpoint.every == 0 or last or leaving or out_of_patience:
                self._save(state, notes)
            if leaving and not last:
                self.checkpoints.wait()
                self.metrics.note(f"saved step {step}; the same command resumes here")
                return state, PREEMPTED
            if out_of_patience:
                self.metrics.note(f"no better validation loss in {experiment.evaluate.patience} evaluations: stopping")
                break
        return state, 0

    def _checked(self, batches: Iterator[dict]) -> Iterator[dict]:
        """The first batch is checked in full; the others only for how much of them is padding."""
        for i, batch in enumerate(batches):
            if i == 0:
                check_batch(batch, self.job.experiment.model, self.job.lengths, self.job.train_batches.local_batch_size)
            segments = [v for k, v in batch.items() if k.endswith("segment_ids")]
            self.padding = sum((s == 0).sum() for s in segments) / sum(s.size for s in segments)
            yield batch

    def _announce(self, left: int) -> None:
        """Expected time, measured over the steps after the first (which compiles)."""
        jax.block_until_ready(self.pending[-1][1])
        seconds = (time.perf_counter() - self.logged) / max(len(self.pending), 1)
        self.metrics.note(f"expected time {time.strftime('%H:%M:%S', time.gmtime(seconds * left))}")

    def _log(self) -> None:
        """The figures of the newest step. Waits for the device: the only place that does, beside evaluations."""
        if not self.pending:
            return
        steps, outs = zip(*self.pending, strict=True)
        outs = jax.device_get(outs)
        elapsed, self.pending = time.perf_counter() - self.logged, []
        skipped = self._check_finite(steps, outs)
        seconds = elapsed / len(steps)
        line = summarize(outs[-1]["sums"]) | {
            "learning_rate": float(outs[-1]["learning_rate"]),
            "gradient_norm": float(outs[-1]["gradient_norm"]),
            "skipped_updates": skipped,
            "tokens_per_second": self.job.tokens_per_step / seconds,
            "step_seconds": seconds,
            "mfu": self.job.mfu(seconds),
            "data_wait_fraction": self.waited / elapsed,
            "padding_fraction": float(self.padding),
        }
        self.metrics.log(steps[-1], "train", line)
        self.logged, self.waited = time.perf_counter(), 0.0

    def _check_finite(self, steps: tuple[int, ...], outs: tuple[dict, ...]) -> int:
        """How many updates were left out because their loss or gradient was not finite; stops if so configured."""
        bad = [(step, out) for step, out in zip(steps, outs, strict=True) if not out["finite"]]
        if not bad:
            return 0
        step, out = bad[0]
        train = self.job.experiment.train
        index = int(out["bad_parameter"])
        where = f"first in the gradient of {parameter_names(self.job.abstract_state.params)[index]}" if index >= 0 else "in the loss"
        size = train.global_batch_size
        line = f"not finite at step {step} (examples {(step - 1) * size} to {step * size - 1}), {where}"
        if train.on_nonfinite == "stop":
            raise RunFailed(f"{line}; lower config.optimizer.learning_rate, or set config.train.on_nonfinite=skip")
        self.metrics.note(f"{line}; {len(bad)} of the last {len(steps)} updates left out")
        return len(bad)

    def _log_validation(self, state: TrainState, notes: dict) -> None:
        self._log()
        line = self.job.validate(state.params)
        self.metrics.log(notes["step"], "valid", line)
        if notes["best_loss"] is None or line["loss"] < notes["best_loss"]:
            notes.update(best_loss=line["loss"], evaluations_since_best=0)
        else:
            notes["evaluations_since_best"] += 1
        self.evaluated = (notes["step"], line["loss"])
        self.logged = time.perf_counter()

    def _out_of_patience(self, notes: dict) -> bool:
        patience = self.job.experiment.evaluate.patience
        return patience is not None and notes["evaluations_since_best"] >= patience

    def _save(self, state: TrainState, notes: dict) -> None:
        step, loss = getattr(self, "evaluated", (None, None))
        self.checkpoints.save(notes["step"], state, dict(notes), {"loss": loss} if step == notes["step"] else None)
        self.logged = time.perf_counter()


def finish(job: Job, state: TrainState, metrics: Metrics) -> None:
    """The table beside the unigram baseline, a few samples, and the picture."""
    experiment = job.experiment
    figures = job.validate(state.params)
    baseline = unigram_baseline(
        (job.train_batches[i] for i in range(min(50, experiment.train.steps))),
        job.valid_host_batches(),
        experiment.model.vocab_size,
    )
    metrics.finish(figures, baseline)
    for text in samples(job.model, state.params, job.valid_batches[0], job.prepared.tokenizer):
        metrics.note(f"  · {text}")
