"""Defines the config of multi-token prediction."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pretrainax.config.choice import Choice

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment


@dataclasses.dataclass
class MultiTokenPrediction(Choice):
    """Config of multi-token prediction, which predicts additional tokens after the next token.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.

    The additional blocks are used only in training; exports do not contain them.
    """

    # number of additional tokens to predict. Each token has an additional block, which reads
    # the output of the previous block
    depth: int = 1
    # weight of the mean loss of the additional tokens (DeepSeek-V3: 0.3, and 0.1 for the last third of its training)
    weight: float = 0.3

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path, model = "config.model.multi_token", experiment.model
        if self.depth < 1:
            yield f"{path}.depth is {self.depth}, it must be at least 1; set {path} to None to disable it"
        if self.weight <= 0:
            yield f"{path}.weight is {self.weight}, it must be greater than 0"
        if model.family != "decoder":
            yield f"{path} requires a decoder, config.model.family is {model.family!r}: set it to None"
        if model.head is not None:
            yield f"{path} is for pretraining, and config.model.head is a task head: set {path} to None"
        if model.masked_lm_head:
            yield (
                f"{path} predicts tokens without a masked_lm_head, and config.model.masked_lm_head is True: set it to "
                f"False, or {path} to None"
            )
        if model.share_layers:
            yield f"{path} adds blocks, and config.model.share_layers shares one: set it to False, or {path} to None"
        if experiment.layers != type(experiment.layers)():
            yield f"{path} adds blocks that config.layers does not support: leave config.layers at its default"
