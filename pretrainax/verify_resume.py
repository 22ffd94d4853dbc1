"""Proves that a config resumes: `python -m pretrainax.verify_resume --config=… [--steps=20 --kills=3 --processes=2]`.

Runs the first steps of the config in a temporary folder: once undisturbed; once ended by SIGKILL at random moments and
started again each time; once ended half-way and resumed by another number of processes. Then compares the batches that
were made, the losses and the last parameters with those of the undisturbed run. With the same number of processes all
must be equal bit for bit. With another number the batches must be, and losses within a relative 2e-5: their sums over
devices are taken in another order. Exit code 0 if all is so, 1 if not.

It runs on what the machine has; without an accelerator, or with JAX_PLATFORMS=cpu, on CPU devices that XLA makes up.
Several processes are compared on CPU devices only: they could not share an accelerator.
"""

import hashlib
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import numpy as np
from absl import flags

from pretrainax import cli
from pretrainax.config import Experiment, MeshConfig, RunFailed, UserError
from pretrainax.training import metrics

_STEPS = flags.DEFINE_integer("steps", 20, "Steps of each run", lower_bound=2)
_KILLS = flags.DEFINE_integer("kills", 3, "SIGKILLs at random moments", lower_bound=1)
_PROCESSES = flags.DEFINE_integer("processes", 2, "Of the other process count; 1: leave that run out", lower_bound=1)
_RECORD = flags.DEFINE_string("record", None, "A run as of pretrainax.main, with digests of its batches in this folder")
LOSSES_AGREE = 2e-5  # relative


def main() -> int:
    experiment = cli.experiment()
    if _RECORD.value:
        return _recorded(experiment, cli.WORKDIR.value, _RECORD.value)
    devices = _devices(experiment.mesh, _PROCESSES.value)
    steps = min(_STEPS.value, experiment.train.steps)
    arguments = [*_config_arguments(sys.argv[1:]), *_overrides(experiment, steps)]
    with tempfile.TemporaryDirectory(prefix="verify_resume-") as folder:

        def trial(name: str) -> Trial:
            return Trial(os.path.join(folder, name), arguments, devices)

        whole = trial("whole")
        seconds = whole.finish()
        platform = whole.platform()
        print(
            f"never killed: {steps} steps in {seconds:.0f} s on {platform['devices']} × {platform['kind']}", flush=True
        )
        rows = []
        killed = trial("killed")
        moments = sorted(random.sample(range(steps), min(_KILLS.value, steps)))
        killed.kill_at(moments, seconds / steps)
        rows += _compare(f"killed {len(moments)} times, near steps {_list(moments)}", whole, killed, same=True)
        if _PROCESSES.value > 1 and platform["name"] == "cpu":
            other = trial("other")
            other.kill_at([half := steps // 2], 0.0, resume=False)
            other.finish(_PROCESSES.value)
            name = f"killed at step {half}, resumed by {_PROCESSES.value} processes"
            rows += _compare(name, whole, other, same=False)
        elif _PROCESSES.value > 1:
            print("other process counts: not compared on this platform, see JAX_PLATFORMS=cpu in --help")
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print(
            "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)) + ("" if row[3] else "  ✗")
        )
    good = all(row[3] for row in rows)
    print("it resumes as it should" if good else "it does NOT resume as it should")
    return 0 if good else 1


# --- a run ---------------------------------------------------------------------------------------------------------


class Trial:
    """One workdir, and the processes that are at work in it."""

    def __init__(self, folder: str, arguments: list[str], devices: int):
        os.mkdir(folder)
        self.workdir, self.record, self.devices = os.path.join(folder, "run"), os.path.join(folder, "record"), devices
        own = [f"--workdir={self.workdir}", f"--record={self.record}"]
        self.command = [sys.executable, "-m", "pretrainax.verify_resume", *arguments, *own]
        self.log = os.path.join(folder, "log")

    def start(self, processes: int = 1) -> list[subprocess.Popen]:
        variables = [{}]
        if processes > 1:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{s.getsockname()[1]}"
            many = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
            variables = [many | {"JAX_PROCESS_ID": str(i)} for i in range(processes)]
        count = f"--xla_force_host_platform_device_count={self.devices // processes}"
        xla = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()}
        with open(self.log, "a", encoding="utf-8") as log:
            return [
                subprocess.Popen(
                    self.command, env=os.environ | xla | own, stdout=log, stderr=log, start_new_session=True
                )
                for own in variables
            ]

    def finish(self, processes: int = 1) -> float:
        """Runs to the end; the seconds it took. RunFailed, with the last line, where it does not get there."""
        before = time.perf_counter()
        children = self.start(processes)
        try:
            codes = [child.wait() for child in children]
        finally:
            _kill(children)
        if any(codes):
            with open(self.log, encoding="utf-8", errors="replace") as log:
                last = [line.strip() for line in log if line.strip()][-1:]
            raise RunFailed(f"a run ended with exit code {max(codes, key=abs)}: {' '.join(last)}")
        return time.perf_counter() - before

    def kill_at(self, moments: list[int], seconds: float, resume: bool = True) -> None:
        """For each of the steps: starts, and kills up to `seconds` after the step was logged. Then to the end."""
        for moment in moments:
            children = self.start()
            try:
                while children[0].poll() is None and len(self.losses("train")) < moment:
                    time.sleep(0.01)
                time.sleep(random.uniform(0.0, seconds))
            finally:
                _kill(children)
        if resume:
            self.finish()

    def platform(self) -> dict:
        with open(os.path.join(self.record, "platform.json"), encoding="utf-8") as f:
            return json.load(f)

    def losses(self, split: str) -> dict[int, Optional[float]]:
        path = os.path.join(self.workdir, "metrics.jsonl")
        lines = metrics.read(path) if os.path.exists(path) else []
        return {line["step"]: line["loss"] for line in lines if line["split"] == split}

    def batches(self) -> dict[tuple[int, int], set[str]]:
        """(step, row) -> the digests of what it was made of; more than one where it changed."""
        found: dict[tuple[int, int], set[str]] = {}
        for name in os.listdir(self.record):
            if name.endswith(".jsonl"):
                for line in metrics.read(os.path.join(self.record, name)):
                    for row, digest in enumerate(line["rows"], line["first_row"]):
                        found.setdefault((line["step"], row), set()).add(digest)
        return found

    def parameters(self) -> Iterator[tuple[str, int, np.ndarray]]:
        from pretrainax.checkpoints.params import read_params  # it imports JAX
        from pretrainax.checkpoints.steps import find_checkpoint  # it imports JAX

        return read_params(find_checkpoint(self.workdir))


def _kill(children: list[subprocess.Popen]) -> None:
    for child in children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _recorded(experiment: Experiment, workdir: str, folder: str) -> int:
    """What `pretrainax.main` does, and a line in `folder` for each batch that is made."""
    from pretrainax.runtime import host
    from pretrainax.training import loop

    host.tune_malloc()
    host.start_jax(experiment)
    import jax

    os.makedirs(folder, exist_ok=True)
    if jax.process_index() == 0:
        platform = {"name": jax.default_backend(), "kind": jax.devices()[0].device_kind, "devices": jax.device_count()}
        with open(os.path.join(folder, "platform.json"), "w", encoding="utf-8") as f:
            json.dump(platform, f)
    with open(os.path.join(folder, f"{time.time_ns()}-{os.getpid()}.jsonl"), "w", encoding="utf-8") as f:

        def observe(step: int, batch: dict[str, np.ndarray]) -> None:
            digests = _digests(batch)
            line = {"step": step, "first_row": jax.process_index() * len(digests), "rows": digests}
            f.write(json.dumps(line) + "\n")
            f.flush()

        return loop.train(experiment, workdir, observe=observe)


def _digests(batch: dict[str, np.ndarray]) -> list[str]:
    """Of each row, over all its arrays."""
    digests = [hashlib.blake2b(digest_size=8) for _ in next(iter(batch.values()))]
    for name in sorted(batch):
        for digest, row in zip(digests, batch[name], strict=True):
            digest.update(f"{name} {row.dtype} {row.shape}".encode() + row.tobytes())
    return [digest.hexdigest() for digest in digests]


# --- what it is run with -------------------------------------------------------------------------------------------


def _devices(mesh: MeshConfig, processes: int) -> int:
    """CPU devices that the mesh can be laid over, as many in each process."""
    sizes = list(vars(mesh).values())
    fixed = math.prod(size for size in sizes if size != -1)
    devices = math.lcm(fixed, processes) if -1 in sizes else fixed
    if devices % processes:
        raise UserError(
            f"--processes={processes} do not divide the {devices} devices of config.mesh; give another number"
        )
    return devices


def _config_arguments(words: list[str]) -> list[str]:
    """--config and the overrides, as they were given."""
    kept = []
    for word, after in zip(words, [*words[1:], "-"], strict=True):
        name = word.lstrip("-").split("=")[0]
        if word.startswith("-") and (name == "config" or name.removeprefix("no").startswith("config.")):
            kept += [word] if "=" in word or after.startswith("-") else [word, after]
    return kept


def _overrides(experiment: Experiment, steps: int) -> list[str]:
    """A short run that logs each step and saves five times; the rest is the user's."""
    every = max(steps // 5, 1)
    changes = {
        "train.steps": steps,
        "train.log_every": 1,
        "evaluate.every": steps,
        "evaluate.batches": 1,
        "checkpoint.every": every,
    }
    if experiment.train.on_spike == "rollback":
        changes["checkpoint.keep"] = 1 + math.ceil(experiment.train.rollback_steps / every)
    return [f"--config.{name}={value}" for name, value in changes.items()]


# --- what comes out ------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    run: str
    what: str
    found: str
    good: bool


def _compare(run: str, whole: Trial, other: Trial, same: bool) -> Iterator[Row]:
    """same: bit for bit."""
    expected, got = whole.batches(), other.batches()
    wrong = {step for (step, row), found in expected.items() if not got.get((step, row), set()) <= found}
    wrong |= {step for step, row in expected.keys() ^ got.keys()}
    steps = {step for step, _ in expected}
    yield Row(run, "batches", _equal(len(steps), len(wrong), "steps"), not wrong)

    pairs = [(whole.losses(split), other.losses(split)) for split in ("train", "valid")]
    missing = any(a.keys() != b.keys() for a, b in pairs)
    values = [(a[step], b[step]) for a, b in pairs for step in a.keys() & b.keys()]
    yield _figures("", "losses", values, missing, 0.0 if same else LOSSES_AGREE)

    blocks = zip(whole.parameters(), other.parameters(), strict=True)
    largest, different, count = 0.0, 0, 0
    for (_, _, a), (_, _, b) in blocks:
        count, different = count + a.size, different + int(np.count_nonzero(a != b))
        largest = max(largest, float(np.max(np.abs(a - b), initial=0.0)))
    text = (
        f"{count:,} bit-identical" if not different else f"{different:,} of {count:,} differ, by {largest:.2g} at most"
    )
    yield Row("", "parameters", text, not (same and different))


def _figures(run: str, what: str, pairs: list[tuple[Any, Any]], missing: bool, tolerance: float) -> Row:
    """Of numbers that may be None, where they were not finite."""
    different = [(a, b) for a, b in pairs if a != b]
    if missing:
        return Row(run, what, "not of the same steps", False)
    if not different:
        return Row(run, what, f"{len(pairs)} bit-identical", True)
    if any(None in pair for pair in different):
        return Row(run, what, "not finite in one of the two", False)
    largest = max(abs(a - b) / max(abs(a), abs(b)) for a, b in different)
    text = f"{len(different)} of {len(pairs)} differ, by {largest:.2g} of their value at most; allowed: {tolerance:g}"
    return Row(run, what, text, largest <= tolerance)


def _equal(count: int, wrong: int, unit: str) -> str:
    return f"{wrong} of {count} {unit} differ" if wrong else f"{count} {unit} bit-identical"


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


if __name__ == "__main__":
    cli.run(main)
