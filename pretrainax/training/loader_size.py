"""Decides how many processes make batches: as many as keep up with the devices."""

import math
import os
import statistics
import time
from typing import NamedTuple, Optional

from pretrainax.config import UserError
from pretrainax.data.preparation.workers import check_shared_memory
from pretrainax.reporting.units import short_time
from pretrainax.training.run import Run

MFU = 0.6  # that a step is taken to reach: it needs its batches no faster
BUSY = 0.5  # of the time, that a thread of the training process may take: beside it that process starts the steps
SPARE = 1.5  # times what is needed, for batches that take longer than others


class LoaderSize(NamedTuple):
    """Says what the loader is asked for, and with how many processes it works."""

    batch: float  # seconds that one process takes to make a batch
    step: float  # seconds that the devices take for a step, at MFU
    workers: int  # loader processes; 0: a thread of the training process
    wanted: int  # that keep up

    def row(self) -> tuple[str, str]:
        """Returns the name and the value of the header's row."""
        by = f"{self.workers} processes" if self.workers else "a thread"
        short = f", TOO FEW: set config.data.workers to {self.wanted}" if self.workers < self.wanted else ""
        batch, step = short_time(self.batch), short_time(self.step)
        return "loader", f"a batch takes {batch} to make, a step {step} at {MFU:.0%} MFU: {by}{short}"


def size_loader(run: Run) -> Optional[LoaderSize]:
    """Sets `config.data.workers` where it is None; returns what that goes by, or None on devices of unknown speed."""
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
    """Returns how many processes make batches that take one process `busy` of a step each; 0: a thread does."""
    return 0 if busy <= BUSY else max(min(math.ceil(SPARE * busy), cores - 1), 1)


def seconds_to_make(run: Run, count: int = 3) -> float:
    """Returns the median seconds of making a batch, once what the first one opens is open."""
    first, taken = run.stop - run.steps, []
    for i in range(count + 1):
        began = time.perf_counter()
        run.train_batches[first + i % run.steps]
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])
