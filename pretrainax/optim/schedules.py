"""Learning-rate schedules: a warm-up to the peak, then a fall."""

import abc
import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from pretrainax.config import Experiment, kinds

Rate = Callable[[jax.typing.ArrayLike], jax.Array]  # step (0 is the first) -> learning rate of its update


@dataclasses.dataclass
class Schedule(kinds.Schedule):
    """A rise from peak / warmup_steps at step 0 (an update with rate 0 would be wasted) to the peak, then a fall.

    Where warmup_steps exceeds train.steps, as in a short trial of a long run, the rate rises until the end.
    """

    warmup_steps: int = 1000  # steps of the rise

    def build(self, peak: float, steps: int) -> Rate:
        """Returns the learning rate of a run of `steps` updates; `self.after` says how it goes on from the peak."""

        def rate(step):
            step = jnp.asarray(step, jnp.float32)
            rising = (step + 1.0) / max(self.warmup_steps, 1)
            return peak * jnp.where(step < self.warmup_steps, rising, self.after(step, steps))

        return rate

    @abc.abstractmethod  # no ABC, which a dataclass that is also a Choice need not be: it marks what cannot be chosen
    def after(self, step: jax.Array, steps: int) -> jax.Array:
        """Returns the fraction of the peak at `step`, from warmup_steps on."""
        raise NotImplementedError

    def progress(self, step: jax.Array, steps: int) -> jax.Array:
        """Returns 0 at the end of the warm-up, 1 at `steps`: the first one not taken, so that the last rate is > 0."""
        return jnp.clip((step - self.warmup_steps) / max(steps - self.warmup_steps, 1), 0.0, 1.0)

    def problems(self, experiment: Experiment) -> Iterator[str]:
        if self.warmup_steps < 0:
            yield f"config.schedule.warmup_steps is {self.warmup_steps}, it must be at least 0"
        final = getattr(self, "final_fraction", 0.0)
        if not 0 <= final <= 1:
            yield f"config.schedule.final_fraction is {final}, it must be in [0, 1]"


@dataclasses.dataclass
class WarmupCosine(Schedule):
    """Half a cosine from the peak to final_fraction of it (Loshchilov and Hutter 2016, section 3)."""

    final_fraction: float = 0.1  # of the peak, at the last step

    def after(self, step, steps):
        cosine = 0.5 + 0.5 * jnp.cos(jnp.pi * self.progress(step, steps))
        return self.final_fraction + (1.0 - self.final_fraction) * cosine


@dataclasses.dataclass
class WarmupLinear(Schedule):
    """A straight line from the peak to final_fraction of it (Devlin et al. 2018, appendix A.2)."""

    final_fraction: float = 0.0  # of the peak, at the last step

    def after(self, step, steps):
        return 1.0 - (1.0 - self.final_fraction) * self.progress(step, steps)


@dataclasses.dataclass
class WarmupInverseSquareRoot(Schedule):
    """peak · sqrt(warmup_steps / (step + 1)) (Vaswani et al. 2017, section 5.3). It does not depend on train.steps.

    NOTE T5 (Raffel et al. 2020, section 3.1.2) holds the peak, 0.01, for its first 10,000 steps instead of rising.
    """

    warmup_steps: int = 10_000  # steps of the rise

    def after(self, step, steps):
        return jnp.sqrt(max(self.warmup_steps, 1) / (step + 1.0))


@dataclasses.dataclass
class WarmupConstant(Schedule):
    """The peak, after the warm-up."""

    def after(self, step, steps):
        return jnp.ones_like(step)


@dataclasses.dataclass
class WarmupStableDecay(Schedule):
    """The peak until decay_steps before the end, then down to final_fraction of it, by 1 - sqrt (Hägele et al. 2024,
    arXiv 2405.18392, section 4). Runs of several lengths share all but their decay."""

    decay_steps: int = 1000  # the last ones, over which the rate falls
    final_fraction: float = 0.0  # of the peak, at the last step

    def after(self, step, steps):
        progress = jnp.clip((step - (steps - self.decay_steps)) / max(self.decay_steps, 1), 0.0, 1.0)
        return 1.0 - (1.0 - self.final_fraction) * jnp.sqrt(progress)

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.decay_steps < 0:
            yield f"config.schedule.decay_steps is {self.decay_steps}, it must be at least 0"
