"""Parameter-efficient tuning methods that train a subset of the model's own parameters: biases or heads."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from pretrainax.adapt.tuning import Tuning, abstract_params
from pretrainax.config import Experiment
from pretrainax.models.heads.base import head_modules
from pretrainax.sharding.param_paths import flat


class _SubsetTuning(Tuning):
    """Base class of tuning methods that add no parameters."""

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        heads = head_modules(experiment.model)
        if not any(self.trains(path, heads) for path in flat(abstract_params(experiment.model))):
            yield f"config.tuning is {self}, but this config.model has none of the parameters that it trains"


@dataclasses.dataclass
class BitFit(_SubsetTuning):
    """Trains only the biases, including the biases of norms and heads (Ben Zaken et al. 2021, arXiv 2106.10199)."""

    def trains(self, path, heads):
        return path.rpartition("/")[2] == "bias"


@dataclasses.dataclass
class HeadAlone(_SubsetTuning):
    """Trains only the heads.

    An output matrix that is tied to the token embeddings remains frozen.
    """

    passes: ClassVar[int] = 1  # only the forward pass, because nothing before the heads is trained

    def trains(self, path, heads):
        return path.partition("/")[0] in heads
