"""Chooses the number of data-loader processes so that batches are ready as fast as the devices need them."""

import math
import os
import statistics
import time
from typing import NamedTuple, Optional

from pretrainax.config import UserError
from pretrainax.data.preparation.workers import check_shared_memory
from pretrainax.files.errors import counted
from pretrainax.reporting.units import short_time
from pretrainax.training.run import Run

MFU = 0.6  # assumed model FLOPs utilization of a step, which bounds the rate at which batches are needed
# A loader thread, in the process that also dispatches the steps, suffices if it is busy for at most this fraction.
MAX_THREAD_SHARE = 0.5
SAFETY_FACTOR = 1.5  # multiplies the number of processes, because some batches take longer than the median


class LoaderSize(NamedTuple):
    """The measured speed of the data loader, and the number of loader processes."""

    batch: float  # seconds to build a batch in one process
    step: float  # expected seconds per step on the devices, at the utilization MFU
    workers: int  # number of loader processes; 0: a thread of the training process
    wanted: int  # number of loader processes that build batches as fast as the devices need them

    def row(self) -> tuple[str, str]:
        """Returns the (name, value) row that describes the loader in the run's header."""
        loader = counted(self.workers, "process") if self.workers else "a thread"
        warning = f", TOO FEW: set config.data.workers to {self.wanted}" if self.workers < self.wanted else ""
        batch, step = short_time(self.batch), short_time(self.step)
        return "loader", f"a batch takes {batch}, a step {step} at {MFU:.0%} MFU: {loader}{warning}"


def size_loader(run: Run) -> Optional[LoaderSize]:
    """Sets `config.data.workers` if it is None; returns the measurements, or None if the chip's peak is unknown."""
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
    """Returns the number of loader processes, or 0 for a thread; `busy` is the build time of a batch / step time."""
    return 0 if busy <= MAX_THREAD_SHARE else max(min(math.ceil(SAFETY_FACTOR * busy), cores - 1), 1)


def seconds_to_make(run: Run, count: int = 3) -> float:
    """Returns the median seconds to build a batch, over `count` batches; an untimed first batch opens the files."""
    first, seconds = run.stop - run.steps, []
    for i in range(count + 1):
        start = time.perf_counter()
        run.train_batches[first + i % run.steps]
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
