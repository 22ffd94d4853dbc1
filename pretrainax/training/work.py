"""Computes the tokens, the FLOPs and the model FLOPs utilization (MFU) of training steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Optional

import jax

from pretrainax.config import Experiment, ModelConfig
from pretrainax.data.batch import Lengths, tokens_read
from pretrainax.data.pipeline import Batches
from pretrainax.layers.attention_spec import AttentionSpec
from pretrainax.models import AnyModel, flops
from pretrainax.runtime.chips import peak_flops
from pretrainax.sharding.mesh import platform
from pretrainax.training.wrapped import teacher_config


@dataclasses.dataclass
class Work:
    """The work of one update of a phase, summed over all devices."""

    experiment: Experiment  # config of the phase
    model: AnyModel
    attention_specs: list[AttentionSpec]  # specs of all attention layers of the model, in order; []: unknown
    lengths: Lengths  # lengths of the longest rows
    batch_shapes: dict[str, jax.ShapeDtypeStruct]  # shapes of the global batch
    batches: Batches
    devices: int  # number of devices

    @functools.cached_property
    def tokens_per_step(self) -> int:
        """Returns the number of tokens that the encoder and decoder read in one update, including padding."""
        return tokens_read(self.batch_shapes)

    @functools.cached_property
    def flops_per_step(self) -> float:
        """Returns the FLOPs of one update with the longest rows, as counted by `flops.flops_per_step`."""
        return self.flops_at(self.lengths)

    @functools.cached_property
    def flops_done_per_step(self) -> float:
        """Returns the FLOPs of one update with the longest rows, excluding the blocks that attention skips."""
        return self._flops_done(self.lengths)

    def flops_of(self, step: int) -> float:
        """Returns the FLOPs of the step with batch index `step`, whose rows may belong to a shorter bucket."""
        return self.flops_at(self.batches.lengths_of(step))

    def flops_done_of(self, step: int) -> float:
        """Returns the FLOPs of the step with batch index `step`, excluding the blocks that attention skips."""
        return self._flops_done(self.batches.lengths_of(step))

    def mfu(self, flops: float, seconds: float) -> Optional[float]:
        """Computes the MFU of running `flops` FLOPs in `seconds`; returns None if the chip's peak FLOP/s is unknown."""
        peak = peak_flops(jax.devices()[0].device_kind)
        return peak and flops / (seconds * peak * self.devices)

    def least_seconds(self, mfu: float) -> Optional[float]:
        """Estimates the seconds per step at utilization `mfu`; returns None if the chip's peak FLOP/s is unknown."""
        mfu_in_one_second = self.mfu(self.flops_done_per_step, 1.0)
        return mfu_in_one_second and mfu_in_one_second / mfu

    @functools.cached_property
    def flops_at(self) -> Callable[[Lengths], float]:
        """Returns the cached function from the lengths of the rows of an update to its FLOPs."""
        return functools.cache(
            lambda lengths: flops.flops_per_step(*self._arguments(lengths), teacher_config(self.model), self._cost)
        )

    @functools.cached_property
    def _flops_done(self) -> Callable[[Lengths], float]:
        if not self.attention_specs:  # a model without attention, or a user's model whose attention is unknown
            return self.flops_at
        work = flops.work_of(self.attention_specs, self.model.compute.attention, platform())
        teacher = teacher_config(self.model)
        return functools.cache(
            lambda lengths: flops.executed_flops(*self._arguments(lengths), work, teacher, self._cost)
        )

    @functools.cached_property
    def _cost(self) -> flops.UpdateCost:
        return flops.update_cost(self.experiment)

    def _arguments(self, lengths: Lengths) -> tuple[ModelConfig, float, int, int]:
        return self.experiment.model, self.experiment.rows_per_update, lengths.inputs, lengths.targets
