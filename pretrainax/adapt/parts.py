"""Ways of tuning that train a part of the model's own parameters: the biases, the heads."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from pretrainax.adapt.tuning import Tuning, abstract_params
from pretrainax.config import Experiment
from pretrainax.models.heads.base import head_modules
from pretrainax.sharding.param_paths import flat


class _Part(Tuning):
    """A way of tuning that adds no parameter."""

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        heads = head_modules(experiment.model)
        if not any(self.trains(path, heads) for path in flat(abstract_params(experiment.model))):
            yield f"config.tuning is {self}, and this config.model has none of the parameters that it trains"


@dataclasses.dataclass
class BitFit(_Part):
    """Trains the biases alone, those of norms and heads too (Ben Zaken et al. 2021, arXiv 2106.10199)."""

    def trains(self, path, heads):
        return path.rpartition("/")[2] == "bias"


@dataclasses.dataclass
class HeadAlone(_Part):
    """Trains the heads alone: what they read is what the model was pretrained to say.

    Of an output matrix that is tied to the embeddings, nothing is trained.
    """

    passes: ClassVar[int] = 1  # forward: nothing is trained before the heads

    def trains(self, path, heads):
        return path.partition("/")[0] in heads
