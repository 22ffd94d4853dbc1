"""Defines learning-rate schedules, which warm up to the peak rate and then decay, built from Optax schedules."""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Optional

import jax
import jax.numpy as jnp
import optax

from pretrainax.config import AUTO, Experiment, kinds
from pretrainax.config.auto import Size

Rate = Callable[[jax.typing.ArrayLike], jax.Array]  # number of completed updates -> learning rate of the next update


@dataclasses.dataclass
class Schedule(kinds.Schedule):
    """Base class of schedules: a linear warmup to the peak rate, then a decay, which a subclass defines in `fall`.

    The rate of step 0 is peak / warmup_steps, because a rate of 0 would waste an update. If warmup_steps exceeds
    train.steps, as in a short trial of a long run, the rate increases until the end of the run.

    NOTE Most released code starts at 0 and reaches the peak one step later, at step warmup_steps. start_fraction=0 does
    the same: `WarmupCosine` then has exactly the rates of `optax.warmup_cosine_decay_schedule`. Since version 0.5.0,
    Optax computes rates in float32, which differ from those of earlier versions by at most 2e-7 of the peak.
    """

    warmup_steps: Size = 1000  # number of steps of the warmup; auto: a tenth of train.steps (BERT's fine-tuning)
    # rate of step 0 / peak (nanoT5: 0.5); the peak is then reached one step later; None: 1 / warmup_steps
    start_fraction: Optional[float] = dataclasses.field(default=None, kw_only=True)
    # number of last steps of the run in which the rate falls linearly to 0, from the rate that it has then (OLMoE)
    anneal_steps: int = dataclasses.field(default=0, kw_only=True)

    def build(self, peak: float, steps: int) -> Rate:
        """Builds the learning-rate schedule for `steps` updates: a warmup, then the decay that `fall` builds."""
        if self.warmup_steps == AUTO:
            return dataclasses.replace(self, warmup_steps=self.resolved_warmup(steps)).build(peak, steps)
        start_fraction, steps_to_peak = self.start_fraction, self.warmup_steps
        if start_fraction is None:
            start_fraction, steps_to_peak = 1 / max(self.warmup_steps, 1), self.warmup_steps - 1
        warmup = optax.linear_schedule(start_fraction * peak, peak, max(steps_to_peak, 1))
        fall = self.fall(peak, max(steps - self.warmup_steps, 1))
        rate = optax.join_schedules([warmup, fall], [self.warmup_steps])
        start = steps - self.anneal_steps
        factor = optax.linear_schedule(1.0, 0.0, self.anneal_steps)
        annealed = optax.join_schedules([rate, lambda step: rate(start) * factor(step)], [start])
        return annealed if self.anneal_steps else rate

    def resolved_warmup(self, steps: int) -> int:
        """Returns the number of warmup steps in a run of `steps` steps, also if `warmup_steps` is "auto"."""
        return steps // 10 if self.warmup_steps == AUTO else self.warmup_steps

    @abc.abstractmethod  # the class is no ABC; the decorator only prevents a config from selecting this class
    def fall(self, peak: float, steps: int) -> optax.Schedule:
        """Builds the part of the schedule after the warmup, as a function of the steps since the warmup ended.

        The decay reaches the final rate one step after the last step of the run.

        Args:
          peak: the peak rate.
          steps: the number of steps after the warmup.
        """
        raise NotImplementedError

    def problems(self, experiment: Experiment) -> Iterator[str]:
        if self.warmup_steps != AUTO and self.warmup_steps < 0:
            yield f"config.schedule.warmup_steps is {self.warmup_steps}, it must be at least 0"
        if self.anneal_steps and not 0 < self.anneal_steps <= (experiment.train.steps or self.anneal_steps):
            yield (
                f"config.schedule.anneal_steps is {self.anneal_steps}, it must be from 0 to config.train.steps, "
                f"{experiment.train.steps}"
            )
        for name in ("start_fraction", "final_fraction"):
            fraction = getattr(self, name, None)
            if fraction is not None and not 0 <= fraction <= 1:
                yield f"config.schedule.{name} is {fraction}, it must be in [0, 1]"
        if self.start_fraction is not None and self.warmup_steps == 0:
            yield (
                f"config.schedule.start_fraction is {self.start_fraction}, and there is no warmup: "
                "config.schedule.warmup_steps is 0"
            )


@dataclasses.dataclass
class WarmupCosine(Schedule):
    """Cosine decay from the peak rate to final_fraction of the peak (Loshchilov and Hutter 2016, section 3)."""

    final_fraction: float = 0.1  # final rate / peak
    # number of steps, including warmup, after which the cosine has its final rate. If it exceeds train.steps, the run
    # ends at a higher rate (OLMo 2); otherwise the rate is constant afterwards (GPT-3). None: train.steps
    cosine_steps: Optional[int] = None

    def fall(self, peak, steps):
        if self.cosine_steps is not None:
            steps = max(self.cosine_steps - self.warmup_steps, 1)
        return optax.cosine_decay_schedule(peak, steps, self.final_fraction)

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.cosine_steps is not None and self.cosine_steps < self.resolved_warmup(experiment.train.steps):
            yield (
                f"config.schedule.cosine_steps is {self.cosine_steps}, it must be at least "
                f"config.schedule.warmup_steps, {self.resolved_warmup(experiment.train.steps)}; None means "
                "config.train.steps"
            )


@dataclasses.dataclass
class WarmupLinear(Schedule):
    """Linear decay from the peak rate to final_fraction of the peak (Devlin et al. 2018, appendix A.2)."""

    final_fraction: float = 0.0  # final rate / peak

    def fall(self, peak, steps):
        return optax.linear_schedule(peak, self.final_fraction * peak, steps)


@dataclasses.dataclass
class WarmupInverseSquareRoot(Schedule):
    """Inverse-square-root decay: the rate is peak · sqrt(warmup_steps / (step + 1)) (Vaswani et al. 2017, section 5.3).

    The rates do not depend on train.steps.

    NOTE T5 (Raffel et al. 2020, section 3.1.2) keeps the peak rate, 0.01, for its first 10,000 steps. For this
    schedule, set start_fraction=1.
    """

    warmup_steps: Size = 10_000  # number of steps of the warmup; auto: a tenth of train.steps

    def fall(self, peak, steps):  # Optax has no inverse-square-root schedule
        return lambda step: peak * jnp.sqrt(max(self.warmup_steps, 1) / (step + self.warmup_steps + 1.0))


@dataclasses.dataclass
class WarmupConstant(Schedule):
    """Constant schedule: after the warmup, the rate stays at its peak."""

    def fall(self, peak, steps):
        return optax.constant_schedule(peak)


@dataclasses.dataclass
class WarmupStableDecay(Schedule):
    """The constant peak rate, then a decay to final_fraction of the peak in the last decay_steps of the run.

    The decay is peak · (1 - (1 - final_fraction) · sqrt(progress of the decay)) (Hägele et al. 2024, arXiv 2405.18392,
    section 4). Runs of different lengths have the same rates in all steps before the decay.
    """

    decay_steps: int = 1000  # number of steps of the decay, at the end of the run
    final_fraction: float = 0.0  # final rate / peak

    def fall(self, peak, steps):
        def decay(step):  # Optax's polynomial schedule of power 1/2 differs: sqrt(1 - progress)
            progress = jnp.clip((step - (steps - self.decay_steps)) / max(self.decay_steps, 1), 0.0, 1.0)
            return peak * (1.0 - (1.0 - self.final_fraction) * jnp.sqrt(progress))

        return decay

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.decay_steps < 0:
            yield f"config.schedule.decay_steps is {self.decay_steps}, it must be at least 0"
        elif 0 < (rest := (steps := experiment.train.steps) - self.resolved_warmup(steps)) < self.decay_steps:
            yield (
                f"config.schedule.decay_steps is {self.decay_steps}, it must be at most {rest}, the steps after the "
                f"warmup (config.train.steps {steps} - config.schedule.warmup_steps {steps - rest}): set "
                f"--config.schedule.decay_steps={rest}"
            )


@dataclasses.dataclass
class WarmupSteps(Schedule):
    """Step decay: multiplies the rate by `factor` after each of the fractions `shares` of the run.

    Source: DeepSeek-V2, arXiv 2405.04434, section 3.1.2. The fractions refer to all steps of the run, including warmup.

    NOTE DeepSeek's fractions refer to all tokens, which is equivalent if all batches have the same size.
    """

    shares: tuple[float, ...] = (0.6, 0.9)  # fractions of the run after which the rate decreases
    factor: float = 0.316  # factor of the rate at each decrease

    def fall(self, peak, steps):
        total_steps = self.warmup_steps + steps
        factors = {round(fraction * total_steps) - self.warmup_steps: self.factor for fraction in self.shares}
        return optax.piecewise_constant_schedule(peak, factors)

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if not all(0 < fraction < 1 for fraction in self.shares):
            yield f"config.schedule.shares is {self.shares}, each must be above 0 and below 1"
        if not 0 < self.factor <= 1:
            yield f"config.schedule.factor is {self.factor}, it must be above 0 and at most 1"
