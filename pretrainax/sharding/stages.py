"""The stages of a pipeline: which models have them, how many parts pass through them, and how long stages wait."""

import math
from collections.abc import Mapping
from typing import NamedTuple, Optional

from pretrainax.config import DisentangledPositions, Experiment, ModelConfig, TrainConfig, UserError
from pretrainax.sharding.axes import BATCH_AXES, DATA_AXIS, FSDP_AXIS, LENGTH_AXIS, PIPELINE_AXIS


class Stages(NamedTuple):
    """Says how the rows of a micro-batch pass through a pipeline (`layers/pipeline.py`)."""

    count: int  # P; 1: there is no pipeline, and one part
    parts: int  # M
    rows: int  # of a part, on one device
    again: float = 0.0  # of the layers' time, what 1F1B adds as it makes their forward once more; 0: GPipe

    @property
    def ticks(self) -> int:
        """Counts how often a stage computes a part, or something in its place."""
        return self.parts + self.count - 1

    @property
    def bubble(self) -> float:
        """Returns the share of these in which nobody reads what is computed (Huang et al. 2018, section 2.3)."""
        return (self.count - 1) / self.ticks

    @property
    def seen(self) -> float:
        """Returns how many times as many rows as there are the layers see."""
        return self.ticks / self.parts

    @property
    def stretch(self) -> float:
        """Returns how many times as long the layers take as without a pipeline."""
        return self.seen * (1 + self.again)


def stages_of(experiment: Experiment, sizes: Mapping[str, int]) -> Stages:
    """Returns the stages of a run on a mesh {axis: size}."""
    rows, count, train = _shared_rows(experiment, sizes), sizes[PIPELINE_AXIS], experiment.train
    parts = count_parts(train.pipeline_parts, rows) if count > 1 else 1
    again = 1 / (train.layer_forwards + 2) if turns_round(train, sizes) else 0.0  # a backward takes as long as two
    return Stages(count, parts, rows // parts, again)


def describe_stages(experiment: Experiment, sizes: Mapping[str, int]) -> str:
    """Returns what a pipeline is, for people; "": there is none."""
    stages, layers = stages_of(experiment, sizes), experiment.model.num_layers
    if stages.count == 1:
        return ""
    order = ", one forward, one backward" if stages.again else ""
    return (
        f"{stages.count} stages of {layers // stages.count} of {layers} layers, {stages.parts} parts of {stages.rows} "
        f"rows a device{order}; {stages.bubble:.0%} of the time of the layers is the bubble"
    )


def count_parts(wanted: int, rows: int) -> int:
    """Returns the number of parts that rows are cut into: of as many rows each, so that it may be less than wanted; 0
    wants one of each row."""
    return math.gcd(wanted, rows) or rows


def turns_round(train: TrainConfig, sizes: Mapping[str, int]) -> bool:
    """Returns True if a step has the parts of a pipeline go back one by one (`layers/one_forward_one_backward.py`)."""
    return train.pipeline_schedule == "1f1b" and sizes[PIPELINE_AXIS] > 1


def _shared_rows(experiment: Experiment, sizes: Mapping[str, int]) -> int:
    """Counts the rows of a micro-batch that pass through the stages of one pipeline."""
    pipelines = math.prod(sizes[axis] for axis in BATCH_AXES if axis != PIPELINE_AXIS)
    return experiment.train.global_batch_size // (experiment.train.accumulate * pipelines)


def check_stages(experiment: Experiment, sizes: Mapping[str, int]) -> None:
    """Raises UserError for layers that do not lie on the stages of a pipeline, or rows that are not so many parts."""
    if (count := sizes[PIPELINE_AXIS]) == 1:
        return
    asked = f"config.mesh.{PIPELINE_AXIS} is {count}"
    without = f"set it to 1, and config.mesh.{FSDP_AXIS} or {DATA_AXIS} to more"
    if obstacle := stages_obstacle(experiment.model):
        raise UserError(f"{asked}, and {obstacle}; the stages of a pipeline are equal layers of a decoder: {without}")
    for name in ("tuning", "distill"):
        if getattr(experiment, name) is not None:
            raise UserError(f"{asked}, and config.{name} is set, which a pipeline does not know: {without}")
    if turns_round(experiment.train, sizes):
        asked = f"config.train.pipeline_schedule is {experiment.train.pipeline_schedule!r}"
        if experiment.model.head is not None:
            raise UserError(f"{asked}, and config.model.head is set, which reads whole rows: set it to 'gpipe'")
        if experiment.optimizer.asks_for_gradients:
            kind = type(experiment.optimizer).__name__
            raise UserError(
                f"{asked}, and config.optimizer is {kind}, which differentiates gradients: set it to 'gpipe'"
            )
        if (split := sizes[LENGTH_AXIS]) > 1:
            raise UserError(
                f"{asked}, and config.mesh.{LENGTH_AXIS} is {split}, by which the tokens that stages share for the "
                f"loss are split already: set it to 'gpipe', or config.mesh.{LENGTH_AXIS} to 1"
            )
    if (layers := experiment.model.num_layers) % count:
        raise UserError(f"{asked}, and does not divide config.model.num_layers {layers}: set it to a divisor of that")
    rows, parts = _shared_rows(experiment, sizes), experiment.train.pipeline_parts
    if parts and rows % parts:
        raise UserError(
            f"config.train.pipeline_parts is {parts}, and {rows} rows of a micro-batch pass through a pipeline: set it "
            "to a divisor of that, or to 0 for one part of each row"
        )


def stages_obstacle(model: ModelConfig) -> Optional[str]:
    """Says why the layers of a model cannot be on stages; None if they can."""
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
