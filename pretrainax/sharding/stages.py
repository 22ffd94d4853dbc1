"""Plans pipeline parallelism: the stages, the pipeline microbatches, the bubble, and which models are supported."""

import math
from collections.abc import Mapping
from typing import NamedTuple, Optional

from pretrainax.config import DisentangledPositions, Experiment, ModelConfig, TrainConfig, UserError
from pretrainax.files.errors import counted
from pretrainax.sharding.axes import BATCH_AXES, DATA_AXIS, FSDP_AXIS, LENGTH_AXIS, PIPELINE_AXIS


class Stages(NamedTuple):
    """The stages of a pipeline, and the pipeline microbatches that pass through them (`layers/pipeline.py`)."""

    count: int  # number of stages; 1: no pipeline, and one pipeline microbatch
    # Number of pipeline microbatches. With gradient accumulation, this is the number per accumulated microbatch.
    parts: int
    rows: int  # rows of a pipeline microbatch on one device
    recompute: float = 0.0  # time of the forward pass that 1F1B recomputes / time of the layers; 0: GPipe

    @property
    def ticks(self) -> int:
        """Returns the number of microbatches that each stage processes, including those wasted in the bubble."""
        return self.parts + self.count - 1

    @property
    def bubble(self) -> float:
        """Returns the pipeline bubble: the fraction of ticks with unused results (Huang et al. 2018, section 2.3)."""
        return (self.count - 1) / self.ticks

    @property
    def compute_factor(self) -> float:
        """Returns the number of rows that the layers compute per batch row, which exceeds 1 because of the bubble."""
        return self.ticks / self.parts

    @property
    def relative_layer_time(self) -> float:
        """Returns the time that the layers take, relative to their time without a pipeline."""
        return self.compute_factor * (1 + self.recompute)


def pipeline_stages(experiment: Experiment, sizes: Mapping[str, int]) -> Stages:
    """Computes the pipeline stages of a run from its config and the sizes of the mesh axes, {axis: size}."""
    rows, count, train = _rows_per_pipeline(experiment, sizes), sizes[PIPELINE_AXIS], experiment.train
    parts = count_parts(train.pipeline_microbatches, rows) if count > 1 else 1
    # A backward pass costs as much as two forward passes.
    recompute = 1 / (train.layer_forwards + 2) if uses_1f1b(train, sizes) else 0.0
    return Stages(count, parts, rows // parts, recompute)


def describe_stages(experiment: Experiment, sizes: Mapping[str, int]) -> str:
    """Describes the pipeline of a run for the log; returns "" if the run has no pipeline."""
    stages, layers = pipeline_stages(experiment, sizes), experiment.model.num_layers
    if stages.count == 1:
        return ""
    order = ", 1F1B schedule" if stages.recompute else ""
    return (
        f"{stages.count} stages of {layers // stages.count} of {layers} layers, {counted(stages.parts, 'part')} of "
        f"{counted(stages.rows, 'row')} per device{order}; the bubble is {stages.bubble:.0%} of the time of the layers"
    )


def count_parts(wanted: int, rows: int) -> int:
    """Returns the number of equal pipeline microbatches: the greatest common divisor of `wanted` and `rows`.

    Args:
      wanted: requested number of pipeline microbatches, where 0 means one per row.
      rows: number of rows to split.
    """
    return math.gcd(wanted, rows) or rows


def uses_1f1b(train: TrainConfig, sizes: Mapping[str, int]) -> bool:
    """Returns True if a training step uses the 1F1B pipeline schedule (`layers/one_forward_one_backward.py`)."""
    return train.pipeline_schedule == "1f1b" and sizes[PIPELINE_AXIS] > 1


def _rows_per_pipeline(experiment: Experiment, sizes: Mapping[str, int]) -> int:
    """Returns the number of rows of a gradient-accumulation microbatch that pass through one pipeline."""
    pipelines = math.prod(sizes[axis] for axis in BATCH_AXES if axis != PIPELINE_AXIS)
    return experiment.train.global_batch_size // (experiment.train.accumulate * pipelines)


def check_stages(experiment: Experiment, sizes: Mapping[str, int]) -> None:
    """Raises UserError if the config, including its number of layers and batch size, cannot run as a pipeline."""
    if (count := sizes[PIPELINE_AXIS]) == 1:
        return
    setting = f"config.mesh.{PIPELINE_AXIS} is {count}"
    remedy = f"set it to 1, and config.mesh.{FSDP_AXIS} or {DATA_AXIS} to more"
    if obstacle := stages_obstacle(experiment.model):
        raise UserError(f"{setting}, and {obstacle}; the stages of a pipeline are equal layers of a decoder: {remedy}")
    for name in ("tuning", "distill"):
        if getattr(experiment, name) is not None:
            raise UserError(f"{setting}, and config.{name} is set, which a pipeline does not support: {remedy}")
    if products := experiment.train.products:
        raise UserError(
            f"{setting}, and config.train.products is {products!r}, which a pipeline does not support: {remedy}"
        )
    if uses_1f1b(experiment.train, sizes):
        setting = f"config.train.pipeline_schedule is {experiment.train.pipeline_schedule!r}"
        if experiment.model.head is not None:
            raise UserError(f"{setting}, and config.model.head is set, which needs whole rows: set it to 'gpipe'")
        if experiment.optimizer.needs_gradient_function:
            kind = type(experiment.optimizer).__name__
            raise UserError(
                f"{setting}, and config.optimizer is {kind}, which differentiates gradients: set it to 'gpipe'"
            )
        if (split := sizes[LENGTH_AXIS]) > 1:
            raise UserError(
                f"{setting}, and config.mesh.{LENGTH_AXIS} is {split}, which already splits the tokens that stages "
                f"share for the loss: set it to 'gpipe', or config.mesh.{LENGTH_AXIS} to 1"
            )
    if (layers := experiment.model.num_layers) % count:
        raise UserError(f"{setting}, and does not divide config.model.num_layers {layers}: set it to a divisor")
    rows, parts = _rows_per_pipeline(experiment, sizes), experiment.train.pipeline_microbatches
    if parts and rows % parts:
        raise UserError(
            f"config.train.pipeline_microbatches is {parts}, and {rows} rows of a microbatch pass through stages: "
            "set it to a divisor of that number, or to 0 for one part per row"
        )


def stages_obstacle(model: ModelConfig) -> Optional[str]:
    """Returns the reason why a model does not support pipeline stages, or None if it supports them."""
    if model.family != "decoder":
        return f"config.model.family is {model.family!r}"
    for name in ("experts", "multi_token"):
        if getattr(model, name) is not None:
            return f"config.model.{name} is set"
    if model.share_layers:
        return "config.model.share_layers is set"
    if isinstance(model.position, DisentangledPositions):
        return "config.model.position is DisentangledPositions"
    return None
