"""Detects loss spikes and chooses the batches to skip after a rollback.

The largest PaLM had about 20 spikes at irregular intervals, despite gradient clipping. Its authors restarted from a
checkpoint roughly 100 steps before the spike and skipped roughly 200 to 500 batches, including the batches before and
during the spike. The same batches caused no spike when training started from another checkpoint (Chowdhery et al.
2022, arXiv 2204.02311, section 5.1).

A batch is a function of its index, so a rollback is defined by the step after which batches are skipped and by their
number. The loop state of each checkpoint contains the list of rollbacks. If the run returns to an older checkpoint, it
reads the same batches again up to the skipped ones, so the choice of the checkpoint does not change the result.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Optional

from pretrainax.config import Diverged, TrainConfig
from pretrainax.data.batch import HostBatch
from pretrainax.data.pipeline import PhaseBatches
from pretrainax.training.loop_state import Rollback

_TO_SIGMA = 1.4826  # standard deviation / median absolute deviation of a normal distribution
_SMALLEST_DEVIATION = 0.01, 0.1  # lower bounds of the deviation: 1 % of the loss, 10 % of the gradient norm
Observation = list[float]  # [loss, log of the gradient norm] of a step


class Spike(Exception):
    """Signals a loss spike that began at `step`; `what` describes it in messages."""

    def __init__(self, step: int, what: str):
        super().__init__(what)
        self.step, self.what = step, what


def find_spike(recent: Sequence[Observation], train: TrainConfig) -> Optional[str]:
    """Describes the loss spike that the last `spike_steps` steps of `recent` form; returns None if there is none.

    The steps are a spike if all their losses, or all their gradient norms, exceed the median of the `spike_window`
    preceding steps by more than `spike_deviations` robust deviations. A robust deviation is 1.4826 × the median
    absolute deviation, which is insensitive to a few outliers. By default, a single step is not a spike, because
    gradient clipping handles a bad batch and a rollback is expensive. OLMo skips updates beyond 6 standard deviations
    over 128 steps (OLMo-core, `SkipStepOptimizer`).
    """
    earlier, newest = recent[: -train.spike_steps], recent[-train.spike_steps :]
    if len(earlier) < train.spike_window:
        return None
    for i, name in enumerate(("loss", "gradient norm")):
        values = [observation[i] for observation in earlier]
        median = statistics.median(values)
        deviation = _TO_SIGMA * statistics.median(abs(value - median) for value in values)
        deviation = max(deviation, _SMALLEST_DEVIATION[i] * (abs(median) if i == 0 else 1.0))
        limit = median + train.spike_deviations * deviation
        if all(observation[i] > limit for observation in newest):
            numbers = [math.exp(x) if i else x for x in (newest[0][i], median, limit)]
            return "{} {:.4g} is a spike: the median before is {:.4g}, the limit {:.4g}".format(name, *numbers)
    return None


def observe_step(recent: list[Observation], step: int, loss: float, gradient_norm: float, train: TrainConfig) -> None:
    """Appends a step to `recent`, removes old steps, and handles a spike according to `config.train.on_spike`.

    Loss and gradient norm are computed over all processes, so every process makes the same decision.

    Raises:
      Spike: a spike was found and on_spike="rollback".
      Diverged: a spike was found and on_spike="stop".
    """
    if train.on_spike == "ignore":
        return
    recent.append([loss, math.log(max(gradient_norm, 1e-30))])
    del recent[: -train.spike_window - train.spike_steps]
    description = find_spike(recent, train)
    if description is None:
        return
    first = step - train.spike_steps + 1
    if train.on_spike == "stop":
        raise Diverged(
            f"step {first}: {description}; lower config.optimizer.learning_rate in a new --workdir, or resume with "
            "--config.train.on_spike=rollback"
        )
    raise Spike(first, f"step {first}: {description}")


def plan_rollback(found: Spike, rollbacks: Sequence[Rollback], train: TrainConfig) -> Rollback:
    """Chooses the step to roll back to after a spike, and the number of batches to skip after that step.

    Raises:
      Diverged: the run has already rolled back `max_rollbacks` times.
    """
    if len(rollbacks) >= train.max_rollbacks:
        raise Diverged(
            f"{found.what}; the run was rolled back {len(rollbacks)} times, which is config.train.max_rollbacks: lower "
            "config.optimizer.learning_rate in a new --workdir, or resume with a higher config.train.max_rollbacks"
        )
    step = max(found.step - 1 - train.rollback_steps, 0)
    return Rollback(spike=found.step, step=step, skipped=train.rollback_skip)


def skipped(step: int, rollbacks: Sequence[Rollback]) -> int:
    """Counts the batches that rollbacks skip before the batch of update `step` + 1.

    After a rollback that skips 200 batches after step 100, the result is 200 for `step` >= 100. Each rollback adds to
    the batches that earlier rollbacks skip, even if it returns to an earlier step.
    """
    total = skipped_now = 0
    for rollback in rollbacks:
        total += rollback.skipped
        if step >= rollback.step:
            skipped_now = total
    return skipped_now


class SkippingBatches:
    """The batches that a run trains on, without the skipped ones: `self[step]` is the batch of update `step` + 1.

    The step's phase builds the batch, even if skipping has shifted the batch index into the next phase.
    """

    def __init__(self, batches: PhaseBatches, rollbacks: Sequence[Rollback]):
        self.batches, self.rollbacks = batches, list(rollbacks)

    def index(self, step: int) -> int:
        """Returns the index of the batch of update `step` + 1: `step` plus the number of skipped batches."""
        return step + skipped(step, self.rollbacks)

    def __getitem__(self, step: int) -> HostBatch:
        return self.batches.at(step)[self.index(step)]
