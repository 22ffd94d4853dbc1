"""Compares a run that was killed and resumed with an uninterrupted run.

A `Trial` is a workdir and the processes that train in it. Each process runs `pretrainax.verify_resume --record`, which
calls `record`.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config import Experiment, RunFailed
from pretrainax.files.json_files import JsonObject
from pretrainax.training.metrics import read_metrics

LOSS_RTOL = 2e-5  # relative tolerance of losses


class Trial:
    """A workdir and the processes that train in it."""

    def __init__(self, folder: str, arguments: list[str], devices: int):
        os.mkdir(folder)
        self.workdir, self.record, self.devices = os.path.join(folder, "run"), os.path.join(folder, "record"), devices
        record_flags = [f"--workdir={self.workdir}", f"--record={self.record}"]
        self.command = [sys.executable, "-m", "pretrainax.verify_resume", *arguments, *record_flags]
        self.log = os.path.join(folder, "log")

    def copy_programs(self, other: "Trial") -> None:
        """Copies the compiled programs of `other`, as a GPU stores them: a new compilation may choose other kernels."""
        from pretrainax.runtime.determinism import PROGRAMS  # local import, because it imports JAX

        programs = os.path.join(other.workdir, PROGRAMS)
        if os.path.isdir(programs):
            shutil.copytree(programs, os.path.join(self.workdir, PROGRAMS))

    def start(self, processes: int = 1) -> list[subprocess.Popen]:
        """Starts or resumes the run in `processes` new processes that share the devices equally; returns them."""
        variables = [{}]
        if processes > 1:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{s.getsockname()[1]}"
            distributed = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
            variables = [distributed | {"JAX_PROCESS_ID": str(i)} for i in range(processes)]
        count = f"--xla_force_host_platform_device_count={self.devices // processes}"
        xla = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()}
        with open(self.log, "a", encoding="utf-8") as log:
            return [
                subprocess.Popen(
                    self.command, env=os.environ | xla | env, stdout=log, stderr=log, start_new_session=True
                )
                for env in variables
            ]

    def finish(self, processes: int = 1) -> float:
        """Trains until the run ends and returns the elapsed seconds.

        Raises:
          RunFailed: the run failed; the message contains the last line of its log.
        """
        start_time = time.perf_counter()
        children = self.start(processes)
        try:
            codes = [child.wait() for child in children]
        finally:
            _kill(children)
        if any(codes):
            with open(self.log, encoding="utf-8", errors="replace") as log:
                last_line = [line.strip() for line in log if line.strip()][-1:]
            raise RunFailed(f"a run ended with exit code {max(codes, key=abs)}: {' '.join(last_line)}")
        return time.perf_counter() - start_time

    def kill_at(self, moments: list[int], seconds: float, resume: bool = True) -> None:
        """Starts or resumes the run once per step in `moments`, and kills it within `seconds` after it logs that step.

        Args:
          resume: whether to train until the run ends after the last kill.
        """
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

    def platform(self) -> JsonObject:
        """Reads the platform that `record` wrote: "name", "kind" and "devices" (the number of devices)."""
        with open(os.path.join(self.record, "platform.json"), encoding="utf-8") as f:
            return json.load(f)

    def losses(self, split: str) -> dict[int, Optional[float]]:
        """Reads {step: loss} for a split ("train" or "valid") from metrics.jsonl; a non-finite loss is None."""
        path = os.path.join(self.workdir, "metrics.jsonl")
        lines = read_metrics(path) if os.path.exists(path) else []
        return {line["step"]: line["loss"] for line in lines if line["split"] == split}

    def batches(self) -> dict[tuple[int, int], set[str]]:
        """Reads the recorded row digests as {(step, row index): digests}.

        There are several digests if a repeated step had a different row at the same index.
        """
        digests: dict[tuple[int, int], set[str]] = {}
        for name in os.listdir(self.record):
            if name.endswith(".jsonl"):
                with open(os.path.join(self.record, name), encoding="utf-8") as f:
                    lines = [json.loads(line) for line in f if line.endswith("\n")]  # skips an incomplete line
                for line in lines:
                    for row, digest in enumerate(line["rows"], line["first_row"]):
                        digests.setdefault((line["step"], row), set()).add(digest)
        return digests

    def parameters(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yields the final parameters, as `read_params` does, and then their moving average if it exists."""
        from pretrainax.checkpoints.params import EMA, read_params  # local import, because it imports JAX
        from pretrainax.checkpoints.steps import find_checkpoint

        checkpoint = find_checkpoint(self.workdir)
        yield from read_params(checkpoint)
        yield from read_params(checkpoint, folder=EMA)


def _kill(children: list[subprocess.Popen]) -> None:
    for child in children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


# --- recording -------------------------------------------------------------------------------------------------------


def record(experiment: Experiment, workdir: str, folder: str) -> int:
    """Trains as `pretrainax.main` does, writes digests of the batches to `folder`, and returns the exit code."""
    import jax  # local import, because the process that compares runs must not occupy the devices

    from pretrainax.planning.current_devices import ResolveRemat
    from pretrainax.runs.row_recorder import RowRecorder
    from pretrainax.runs.train import train
    from pretrainax.runtime import host

    host.tune_malloc()
    host.start_jax(experiment)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"{time.time_ns()}-{os.getpid()}.jsonl"), "w", encoding="utf-8") as f:
        code = train(experiment, workdir, callbacks=[ResolveRemat(), RowRecorder(experiment, f)])
    if jax.process_index() == 0:
        platform = {"name": jax.default_backend(), "kind": jax.devices()[0].device_kind, "devices": jax.device_count()}
        with open(os.path.join(folder, "platform.json"), "w", encoding="utf-8") as f:
            json.dump(platform, f)
    return code


# --- comparison ------------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """A row of the result table: one comparison of two runs."""

    run: str
    what: str
    found: str
    good: bool


def compare(run: str, whole: Trial, other: Trial, same: bool) -> Iterator[Check]:
    """Compares the batches, losses and parameters of two trials; yields one table row per comparison.

    Args:
      run: label of the first row.
      same: whether the trials must be bit-identical. If False, only the batches must be identical, and the losses may
        have a relative difference of at most LOSS_RTOL.
    """
    expected, actual = whole.batches(), other.batches()
    different_steps = {step for (step, row), rows in expected.items() if not actual.get((step, row), set()) <= rows}
    different_steps |= {step for step, row in expected.keys() ^ actual.keys()}
    steps = {step for step, _ in expected}
    yield Check(run, "batches", _equal(len(steps), len(different_steps), "steps"), not different_steps)

    pairs = [(whole.losses(split), other.losses(split)) for split in ("train", "valid")]
    missing = any(a.keys() != b.keys() for a, b in pairs)
    values = [(a[step], b[step]) for a, b in pairs for step in a.keys() & b.keys()]
    yield compare_losses("", "losses", values, missing, 0.0 if same else LOSS_RTOL)

    blocks = zip(whole.parameters(), other.parameters(), strict=True)
    largest, different, count = 0.0, 0, 0
    for (_, _, a), (_, _, b) in blocks:
        count, different = count + a.size, different + int(np.count_nonzero(a != b))
        largest = max(largest, float(np.max(np.abs(a - b), initial=0.0)))
    text = (
        f"{count:,} bit-identical" if not different else f"{different:,} of {count:,} differ, by at most {largest:.2g}"
    )
    yield Check("", "parameters", text, not (same and different))


def compare_losses(
    run: str, what: str, pairs: list[tuple[Optional[float], Optional[float]]], missing: bool, tolerance: float
) -> Check:
    """Compares pairs of losses and returns a row of the result table.

    Args:
      run, what: the first two cells of the row.
      pairs: both trials' losses at each step, where None is a non-finite loss.
      missing: whether some step has only one of the two losses.
      tolerance: largest relative difference that passes the check.
    """
    different = [(a, b) for a, b in pairs if a != b]
    if missing:
        return Check(run, what, "different steps", False)
    if not different:
        return Check(run, what, f"{len(pairs)} bit-identical", True)
    finite = [(a, b) for a, b in different if a is not None and b is not None]
    if len(finite) < len(different):
        return Check(run, what, "not finite in one of the two runs", False)
    largest = max(abs(a - b) / max(abs(a), abs(b)) for a, b in finite)
    text = f"{len(different)} of {len(pairs)} differ, relative difference at most {largest:.2g}; allowed: {tolerance:g}"
    return Check(run, what, text, largest <= tolerance)


def _equal(count: int, different: int, unit: str) -> str:
    return f"{different} of {count} {unit} differ" if different else f"{count} {unit} bit-identical"
