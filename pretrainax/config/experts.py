"""The configuration of a mixture of experts."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Optional

from pretrainax.config.choice import Choice

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment


@dataclasses.dataclass
class MixtureOfExperts(Choice):
    """Feed-forwards of which a router gives each token to a few (Shazeer et al. 2017, arXiv 1701.06538)."""

    num_experts: int = 8  # feed-forwards of a block
    top_k: int = 2  # of them that a token is given to
    d_ff: Optional[int] = None  # width inside an expert; None: as config.model.d_ff
    # the weights of a token's experts add up to 1 (Mixtral); False: they are what softmax gives over all (OLMoE)
    normalized: bool = True
    # room of an expert, as a multiple of the tokens it gets where all get as many; for others it does nothing (GShard);
    # None: there is room for all
    capacity: Optional[float] = None
    balance_weight: float = 0.01  # of the loss that is 1 where all experts get as many (Fedus et al. 2021, section 2.2)
    z_weight: float = 0.0  # of the router's squared log-normaliser (ST-MoE: Zoph et al. 2022, section 3.3; 0.001)

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path = "config.model.experts"
        for name in ("num_experts", "top_k", "d_ff"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield f"{path}.{name} is {value}, it must be at least 1"
        if self.top_k > self.num_experts:
            yield f"{path}.top_k is {self.top_k}, it must be at most {path}.num_experts, {self.num_experts}"
        if self.capacity is not None and self.capacity < 1:
            yield (
                f"{path}.capacity is {self.capacity}, with which tokens are dropped even where all experts get as "
                "many: it must be at least 1, as 1.25; None drops none"
            )
        for name in ("balance_weight", "z_weight"):
            if getattr(self, name) < 0:
                yield f"{path}.{name} is {getattr(self, name)}, it must be at least 0"
