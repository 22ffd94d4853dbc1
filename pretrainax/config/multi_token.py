"""The configuration of multi-token prediction."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pretrainax.config.choice import Choice

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment


@dataclasses.dataclass
class MultiTokenPrediction(Choice):
    """Each token also tells those after the next one, by blocks of their own (DeepSeek-V3, arXiv 2412.19437, section
    2.2). It is for training alone: an export has none of it."""

    depth: int = 1  # tokens more that are told, each by a block that reads what the one before made
    weight: float = 0.3  # of the mean of their losses (DeepSeek-V3: 0.3, and 0.1 for the last third of its tokens)

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path, model = "config.model.multi_token", experiment.model
        if self.depth < 1:
            yield f"{path}.depth is {self.depth}, it must be at least 1; for none set {path} to None"
        if self.weight <= 0:
            yield f"{path}.weight is {self.weight}, it must be greater than 0"
        if model.family != "decoder":
            yield f"{path} is of decoders, config.model.family is {model.family!r}: set it to None"
        if model.head is not None:
            yield f"{path} is of pretraining, and config.model.head is that of a task: set it to None"
        if model.share_layers:
            yield f"{path} adds blocks of its own, and config.model.share_layers makes all blocks one: set one to False"
        if experiment.layers != type(experiment.layers)():
            yield f"{path} has blocks that config.layers has no numbers for: leave config.layers as it is"
