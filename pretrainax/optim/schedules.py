"""Learning-rate schedules: a warm-up to the peak, then a fall, both by optax's own functions of the step."""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Optional

import jax
import jax.numpy as jnp
import optax

from pretrainax.config import Experiment, kinds

Rate = Callable[[jax.typing.ArrayLike], jax.Array]  # step (0 is the first) -> learning rate of its update


@dataclasses.dataclass
class Schedule(kinds.Schedule):
    """A rise from peak / warmup_steps at step 0 (an update with rate 0 would be wasted) to the peak, then a fall.

    Where warmup_steps exceeds train.steps, as in a short trial of a long run, the rate rises until the end.
    NOTE Released code mostly begins at 0 and has the peak one step later, at step warmup_steps. So it is here with a
    start_fraction, which gives the very rates of `optax.warmup_cosine_decay_schedule`. Optax interpolates in float32:
    rates are within 2e-7 of the peak from what they were when this file had formulas of its own.
    """

    warmup_steps: int = 1000  # steps of the rise
    # of the peak, at step 0 (nanoT5: 0.5); the rise then ends a step later; None: 1 / warmup_steps
    start_fraction: Optional[float] = dataclasses.field(default=None, kw_only=True)

    def build(self, peak: float, steps: int) -> Rate:
        """Returns the learning rate of a run of `steps` updates; `self.fall` says how it goes on from the peak."""
        start, rise = self.start_fraction, self.warmup_steps
        if start is None:
            start, rise = 1 / max(self.warmup_steps, 1), self.warmup_steps - 1
        rising = optax.linear_schedule(start * peak, peak, max(rise, 1))
        return optax.join_schedules([rising, self.fall(peak, max(steps - self.warmup_steps, 1))], [self.warmup_steps])

    @abc.abstractmethod  # no ABC, which a dataclass that is also a Choice need not be: it marks what cannot be chosen
    def fall(self, peak: float, steps: int) -> optax.Schedule:
        """Returns the rate by the steps since the warm-up, of which a run has `steps`.

        The end of the fall is the first step not taken, so that the last rate is above it.
        """
        raise NotImplementedError

    def problems(self, experiment: Experiment) -> Iterator[str]:
        if self.warmup_steps < 0:
            yield f"config.schedule.warmup_steps is {self.warmup_steps}, it must be at least 0"
        for name in ("start_fraction", "final_fraction"):
            fraction = getattr(self, name, None)
            if fraction is not None and not 0 <= fraction <= 1:
                yield f"config.schedule.{name} is {fraction}, it must be in [0, 1]"
        if self.start_fraction is not None and self.warmup_steps == 0:
            yield (
                f"config.schedule.start_fraction is {self.start_fraction}, and there is no rise that it starts: "
                "config.schedule.warmup_steps is 0"
            )


@dataclasses.dataclass
class WarmupCosine(Schedule):
    """Half a cosine from the peak to final_fraction of it (Loshchilov and Hutter 2016, section 3)."""

    final_fraction: float = 0.1  # of the peak, at the last step

    def fall(self, peak, steps):
        return optax.cosine_decay_schedule(peak, steps, self.final_fraction)


@dataclasses.dataclass
class WarmupLinear(Schedule):
    """A straight line from the peak to final_fraction of it (Devlin et al. 2018, appendix A.2)."""

    final_fraction: float = 0.0  # of the peak, at the last step

    def fall(self, peak, steps):
        return optax.linear_schedule(peak, self.final_fraction * peak, steps)


@dataclasses.dataclass
class WarmupInverseSquareRoot(Schedule):
    """peak · sqrt(warmup_steps / (step + 1)) (Vaswani et al. 2017, section 5.3). It does not depend on train.steps.

    NOTE T5 (Raffel et al. 2020, section 3.1.2) holds the peak, 0.01, for its first 10,000 steps: start_fraction=1.
    """

    warmup_steps: int = 10_000  # steps of the rise

    def fall(self, peak, steps):  # which optax does not have
        return lambda step: peak * jnp.sqrt(max(self.warmup_steps, 1) / (step + self.warmup_steps + 1.0))


@dataclasses.dataclass
class WarmupConstant(Schedule):
    """The peak, after the warm-up."""

    def fall(self, peak, steps):
        return optax.constant_schedule(peak)


@dataclasses.dataclass
class WarmupStableDecay(Schedule):
    """The peak until decay_steps before the end, then down to final_fraction of it, by 1 - sqrt (Hägele et al. 2024,
    arXiv 2405.18392, section 4). Runs of several lengths share all but their decay."""

    decay_steps: int = 1000  # the last ones, over which the rate falls
    final_fraction: float = 0.0  # of the peak, at the last step

    def fall(self, peak, steps):
        def decay(step):  # optax's polynomial of power 1/2 is sqrt(1 - progress), which falls the other way round
            progress = jnp.clip((step - (steps - self.decay_steps)) / max(self.decay_steps, 1), 0.0, 1.0)
            return peak * (1.0 - (1.0 - self.final_fraction) * jnp.sqrt(progress))

        return decay

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.decay_steps < 0:
            yield f"config.schedule.decay_steps is {self.decay_steps}, it must be at least 0"


@dataclasses.dataclass
class WarmupSteps(Schedule):
    """The peak, times `factor` for each share of the run that is past (DeepSeek-V2, arXiv 2405.04434, section 3.1.2).

    The shares are of all steps, warm-up and all. NOTE DeepSeek's are of all tokens: the same where batches are alike.
    """

    shares: tuple[float, ...] = (0.6, 0.9)  # of the run, after each of which the rate falls
    factor: float = 0.316  # by which it is multiplied then

    def fall(self, peak, steps):
        whole = self.warmup_steps + steps
        falls = {round(share * whole) - self.warmup_steps: self.factor for share in self.shares}
        return optax.piecewise_constant_schedule(peak, falls)

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if not all(0 < share < 1 for share in self.shares):
            yield f"config.schedule.shares is {self.shares}, each must be above 0 and below 1"
        if not 0 < self.factor <= 1:
            yield f"config.schedule.factor is {self.factor}, it must be above 0 and at most 1"
