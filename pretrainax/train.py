"""The loop: restore, step, log, evaluate, save, stop. It knows no objective and no architecture."""

import collections
import contextlib
import datetime
import math
import os
import signal
import sys
import time
from collections.abc import Iterator

import jax

from pretrainax import config as config_lib
from pretrainax import pretrained, sharding
from pretrainax.checkpoint import Checkpoints, load_params
from pretrainax.config import Experiment, RunFailed, UserError
from pretrainax.data import check
from pretrainax.data.baseline import unigram_baseline
from pretrainax.data.pipeline import check_batch, iterate
from pretrainax.job import Job, assemble
from pretrainax.metrics import Metrics, summarize
from pretrainax.paths import parameter_names
from pretrainax.prepare import Prepared, prepare
from pretrainax.sample import samples
from pretrainax.train_step import TrainState, state_from

PREEMPTED = 75  # EX_TEMPFAIL of <sysexits.h>: run the same command again


def run(experiment: Experiment, workdir: str) -> int:
    """Trains until `train.steps`, or until a signal. Returns the exit code."""
    started = time.perf_counter()
    prepared = prepare(experiment)
    claim(workdir, experiment, prepared)
    mesh = sharding.make_mesh(experiment.mesh)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        stop = stack.enter_context(Stop())
        job = assemble(experiment, prepared, mesh)
        checkpoints = Checkpoints(os.path.join(workdir, "checkpoints"), keep=experiment.checkpoint.keep)
        stack.callback(checkpoints.close)
        state, notes = start(job, checkpoints)
        metrics = Metrics(workdir, experiment.train.steps, notes["step"], primary=jax.process_index() == 0)
        stack.callback(metrics.close)
        resumed = f", resumed at step {notes['step']}" if notes["step"] else ""
        measured = check.measure(job.train_batches)
        metrics.header([("workdir", workdir + resumed), *job.describe(), ("measured", check.one_line(measured))])
        check.check(measured, experiment.objective)
        loop = Loop(job, checkpoints, metrics, stop, notes, started)
        state, exit_code = loop.run(state)
        if exit_code == 0:
            evaluated, figures = loop.evaluated
            finish(job, state, metrics, figures if evaluated == notes["step"] else job.validate(state.params))
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
    2. `config.checkpoint.init_from`: parameters of another run or a Hugging Face directory, a fresh optimizer.
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
    if job.experiment.checkpoint.init_from:
        directory, abstract = os.path.expanduser(job.experiment.checkpoint.init_from), job.abstract_state.params
        if pretrained.is_directory(directory):
            params = pretrained.load_params(directory, job.experiment.model, abstract)
        else:
            params = load_params(directory, abstract)
        state = state_from(params, job.optimizer, job.mesh)
    else:
        state = job.fresh_state()
    return state, {
        "step": 0,
        "tokenizer": fingerprint,
        "skipped_updates": 0,  # whose loss or gradient was not finite
        "best_loss": None,
        "evaluations_since_best": 0,
    }


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
    """Everything that happens every so many steps, around the one jitted update.

    `notes` is what must survive a resumption beside the state; each checkpoint carries a copy.
    """

    def __init__(self, job: Job, checkpoints: Checkpoints, metrics: Metrics, stop: Stop, notes: dict, started: float):
        self.job, self.checkpoints, self.metrics, self.stop, self.notes = job, checkpoints, metrics, stop, notes
        self.started = started
        self.pending = []  # (step, metrics still on the device), not looked at yet
        self.newest = None  # the last of them that was
        self.evaluated = None, None  # (step, figures) of the last evaluation here
        self.seconds, self.waited, self.steps = 0.0, 0.0, 0  # of training and of waiting for data since the last log
        self.tokens, self.flops = 0, 0.0  # in the same time

    def run(self, state: TrainState) -> tuple[TrainState, int]:
        experiment, notes = self.job.experiment, self.notes
        train, steps, first = experiment.train, experiment.train.steps, notes["step"] + 1
        batches = iterate(self.job.train_batches, first - 1, steps, experiment.data.workers)
        batches = to_device(self._checked(batches), self.job.mesh)
        self.resumed = time.perf_counter()
        for step in range(first, steps + 1):
            if self._out_of_patience():
                self.metrics.note(f"no better validation loss in {experiment.evaluate.patience} evaluations: stopping")
                break
            before = time.perf_counter()
            batch = next(batches)
            self.waited += time.perf_counter() - before
            state, out = self.job.step(state, batch)
            self.tokens += sum(x.size for name, x in batch.items() if name in ("tokens", "encoder_tokens"))
            self.flops += self.job.flops_of(step - 1)
            self.pending.append((step, out))
            notes["step"] = step
            if step in (first, first + 3):
                self._announce(step - first, steps - step)

            last, leaving = step == steps, self.stop.requested
            if step % train.log_every == 0 or last:
                self._log()
            improved = False
            if step % experiment.evaluate.every == 0 or last:
                improved = self._evaluate(state)
            if step % experiment.checkpoint.every == 0 or improved or last or leaving:
                self._save(state)
            if leaving and not last:
                self.checkpoints.wait()
                self.metrics.note(f"saved step {step}; the same command resumes here")
                return state, PREEMPTED
        return state, 0

    def _checked(self, batches: Iterator[dict]) -> Iterator[dict]:
        """The first batch is checked in full; the others only for how much of them is padding."""
        model, made = self.job.experiment.model, self.job.train_batches
        for i, batch in enumerate(batches):
            if i == 0:
                check_batch(batch, model, made.lengths_of(self.notes["step"]), made.local_batch_size)
            segments = [v for k, v in batch.items() if k.endswith("segment_ids")]
            self.padding = sum(int((s == 0).sum()) for s in segments) / sum(s.size for s in segments)
            yield batch

    def _announce(self, done: int, left: int) -> None:
        """How long the first step took, and what the next ones say of the time the others will take."""
        jax.block_until_ready(self.pending[-1][1])
        now = time.perf_counter()
        if done == 0:
            self.first_done = now
            self.metrics.note(f"first step {now - self.started:.1f} s after the start")
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
        bad = [(step, out) for step, out in zip(steps, outs, strict=True) if not out["finite"]]
        if not bad:
            return
        step, out = bad[0]
        size, index = self.job.experiment.train.global_batch_size, int(out["bad_parameter"])
        names = parameter_names(self.job.abstract_state.params)
        where = f"first in the gradient of {names[index]}" if index >= 0 else "in the loss alone"
        line = f"not finite at step {step} (examples {(step - 1) * size} to {step * size - 1}), {where}"
        if self.job.experiment.train.on_nonfinite == "stop":
            raise RunFailed(f"{line}; lower config.optimizer.learning_rate, or set config.train.on_nonfinite=skip")
        self.notes["skipped_updates"] += len(bad)
        self.metrics.note(f"{line}; {len(bad)} of the last {len(steps)} updates left out")

    def _log(self) -> None:
        """The figures of the newest step, and the speed since the last line."""
        self._catch_up()
        seconds = self.seconds / self.steps
        line = summarize(self.newest["sums"]) | {
            "learning_rate": float(self.newest["learning_rate"]),
            "gradient_norm": float(self.newest["gradient_norm"]),
            "skipped_updates": self.notes["skipped_updates"],
            "tokens_per_second": self.tokens / self.seconds,
            "step_seconds": seconds,
            "mfu": self.job.mfu(self.flops, self.seconds),
            "data_wait_fraction": self.waited / self.seconds,
            "padding_fraction": self.padding,
        }
        self.metrics.log(self.notes["step"], "train", line)
        self.seconds, self.waited, self.steps, self.tokens, self.flops = 0.0, 0.0, 0, 0, 0.0

    def _evaluate(self, state: TrainState) -> bool:
        """Logs the validation figures; whether they are the best so far."""
        self._catch_up()
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
        self.checkpoints.save(self.notes["step"], state, self.notes, measured)
        self.resumed = time.perf_counter()


def finish(job: Job, state: TrainState, metrics: Metrics, figures: dict) -> None:
    """The table beside the unigram baseline, a few samples, and the picture."""
    experiment = job.experiment
    baseline = unigram_baseline(
        (job.train_batches[i] for i in range(min(50, experiment.train.steps))),
        job.validation_batches(),
        experiment.model.vocab_size,
    )
    metrics.finish(figures, baseline)
    for text in samples(job.model, state.params, job.valid_batches[0], job.prepared.tokenizer):
        metrics.note(f"  · {text}")
