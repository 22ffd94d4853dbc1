"""Sees a spike of the loss, and says which data to leave out when the run goes back to before it.

The largest PaLM met about 20 spikes at irregular intervals, with clipped gradients. What helped was to start again from
a checkpoint roughly 100 steps before the spike, and to skip roughly 200 to 500 batches, those seen before and during
the spike among them; the same batches did no harm from another checkpoint (Chowdhery et al. 2022, arXiv 2204.02311,
section 5.1).

Batches are index arithmetic, so a rollback is two numbers: from which step on, and how many batches to skip. The list
of them is in the loop state of every checkpoint. The steps between an older checkpoint and that step are run once more,
on the same batches: which checkpoint there was to start from changes nothing.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Optional

from pretrainax.config import RunFailed, TrainConfig
from pretrainax.data.batch import HostBatch
from pretrainax.data.pipeline import PhaseBatches
from pretrainax.training.loop_state import Rollback

_TO_SIGMA = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation
_SMALLEST_DEVIATION = 0.01, 0.1  # deviations count as no less: 1 % of the loss, 10 % of the gradient norm
Observation = list[float]  # of a step: loss, log of the gradient norm


class Spike(Exception):
    """The first step of a spike, and what was seen, as the start of a line."""

    def __init__(self, step: int, what: str):
        super().__init__(what)
        self.step, self.what = step, what


def find_spike(recent: Sequence[Observation], train: TrainConfig) -> Optional[str]:
    """Describes what makes the newest `spike_steps` of the `recent` steps a spike; None where they are none.

    Each of them lies above the median of the `spike_window` steps before them by more than `spike_deviations` robust
    deviations (1.4826 × the median absolute deviation, which a few outliers do not move), all by their loss or all by
    their gradient norm. A single step is no spike: gradient clipping answers a bad batch, and a rollback is dear.
    OLMo leaves out an update from 6 standard deviations on, over 128 steps (OLMo-core, `SkipStepOptimizer`).
    """
    past, newest = recent[: -train.spike_steps], recent[-train.spike_steps :]
    if len(past) < train.spike_window:
        return None
    for i, name in enumerate(("loss", "gradient norm")):
        values = [observation[i] for observation in past]
        median = statistics.median(values)
        deviation = _TO_SIGMA * statistics.median(abs(value - median) for value in values)
        deviation = max(deviation, _SMALLEST_DEVIATION[i] * (abs(median) if i == 0 else 1.0))
        limit = median + train.spike_deviations * deviation
        if all(observation[i] > limit for observation in newest):
            shown = [math.exp(x) if i else x for x in (newest[0][i], median, limit)]
            return "{} {:.4g} is a spike: the median before is {:.4g}, the limit {:.4g}".format(name, *shown)
    return None


def observe_step(recent: list[Observation], step: int, loss: float, gradient_norm: float, train: TrainConfig) -> None:
    """Adds a step to `recent`, which it keeps as long as needed; raises Spike, or RunFailed, as `on_spike` says.

    Every process sees the same numbers, which are sums over all of them, and so comes to the same end.
    """
    if train.on_spike == "ignore":
        return
    recent.append([loss, math.log(max(gradient_norm, 1e-30))])
    del recent[: -train.spike_window - train.spike_steps]
    what = find_spike(recent, train)
    if what is None:
        return
    first = step - train.spike_steps + 1
    if train.on_spike == "stop":
        raise RunFailed(
            f"step {first}: {what}; lower config.optimizer.learning_rate in a new --workdir, or resume with "
            "--config.train.on_spike=rollback"
        )
    raise Spike(first, f"step {first}: {what}")


def plan_rollback(found: Spike, rollbacks: Sequence[Rollback], train: TrainConfig) -> Rollback:
    """Returns the next rollback, which answers the spike that was found.

    Raises:
      RunFailed: it would be one more than `max_rollbacks`.
    """
    if len(rollbacks) >= train.max_rollbacks:
        raise RunFailed(
            f"{found.what}; the run was taken back {len(rollbacks)} times, which is config.train.max_rollbacks: lower "
            "config.optimizer.learning_rate in a new --workdir, or go on with a higher config.train.max_rollbacks"
        )
    step = max(found.step - 1 - train.rollback_steps, 0)
    return Rollback(spike=found.step, step=step, skipped=train.rollback_skip)


def skipped(step: int, rollbacks: Sequence[Rollback]) -> int:
    """Counts the batches left out before that of the update after `step` updates.

    With a rollback that skips 200 after step 100 they are 200 from 100 on. Each rollback starts where all skipped by
    those before it end, also where it goes back to before them.
    """
    total = now = 0
    for rollback in rollbacks:
        total += rollback.skipped
        if step >= rollback.step:
            now = total
    return now


class Skipping:
    """Looks `batches` up by the number of updates before: `self[step]` is `batches[step + skipped]`.

    It is the phase of the step that makes it, also where what is left out ends in the next one.
    """

    def __init__(self, batches: PhaseBatches, rollbacks: Sequence[Rollback]):
        self.batches, self.rollbacks = batches, list(rollbacks)

    def index(self, step: int) -> int:
        """Returns the number of the batch that the update after `step` updates takes."""
        return step + skipped(step, self.rollbacks)

    def __getitem__(self, step: int) -> HostBatch:
        return self.batches.at(step)[self.index(step)]
