"""Chooses the number of loader processes so that batches arrive as fast as the devices need them."""

import math
import os
import statistics
import time
from typing import NamedTuple, Optional

from pretrainax.config import UserError
from pretrainax.data.preparation.workers import check_shared_memory
from pretrainax.reporting.units import short_time
from pretrainax.training.run import Run

MFU = 0.6  # assumed model FLOPs utilization of a step, which bounds the rate at which batches are needed
MAX_THREAD_SHARE = (
    0.5  # a loader thread, in the process that also launches the steps, is used up to this share of the time
)
SAFETY_FACTOR = 1.5  # factor of the number of processes, because some batches take longer than the median


class LoaderSize(NamedTuple):
    """The measured speed of the data loader and its number of processes."""

    batch: float  # seconds to make a batch in one process
    step: float  # expected seconds per step on the devices, at a utilization of MFU
    workers: int  # number of loader processes; 0: a thread of the training process
    wanted: int  # number of loader processes that make batches as fast as the devices need them

    def row(self) -> tuple[str, str]:
        """Returns the name and the value of the loader's row in the header of a run."""
        loader = f"{self.workers} processes" if self.workers else "a thread"
        warning = f", TOO FEW: set config.data.workers to {self.wanted}" if self.workers < self.wanted else ""
        batch, step = short_time(self.batch), short_time(self.step)
        return "loader", f"a batch takes {batch}, a step {step} at {MFU:.0%} MFU: {loader}{warning}"


def size_loader(run: Run) -> Optional[LoaderSize]:
    """Sets `config.data.workers` if it is None. Returns the measurements; None if the devices' speed is unknown."""
    data = run.experiment.data
    steps = [(part, seconds) for part in run.parts if (seconds := part.work.least_seconds(MFU)) is not None]
    if not steps:
        data.workers = data.workers or 0
        return None
    batch, step = max(((seconds_to_make(part), step) for part, step in steps), key=lambda pair: pair[0] / pair[1])
    wanted = processes_for(batch / step, os.cpu_count() or 1)
    if data.workers is None:
        data.workers = wanted
        try:
            check_shared_memory("workers", wanted, alone=0)
        except UserError:
            data.workers = 0
    return LoaderSize(batch, step, data.workers, wanted)


def processes_for(busy: float, cores: int) -> int:
    """Returns the number of loader processes; 0: use a thread. `busy` is (seconds per batch) / (seconds per step)."""
    return 0 if busy <= MAX_THREAD_SHARE else max(min(math.ceil(SAFETY_FACTOR * busy), cores - 1), 1)


def seconds_to_make(run: Run, count: int = 3) -> float:
    """Returns the median seconds to make one of `count` batches, after a first batch, which also opens files."""
    first, seconds = run.stop - run.steps, []
    for i in range(count + 1):
        start = time.perf_counter()
        run.train_batches[first + i % run.steps]
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
