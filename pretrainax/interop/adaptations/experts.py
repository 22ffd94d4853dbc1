"""Makes a mixture of experts of each dense feed-forward."""

import dataclasses
import re
from collections.abc import Iterator

import jax.numpy as jnp

from pretrainax.config import Experiment, ModelConfig
from pretrainax.interop.adaptations.base import Adaptation, Making, Way

_EXPERTS = re.compile(r"/mlp/experts_(up|gate|down)/")


@dataclasses.dataclass
class DenseToExperts(Adaptation):
    """Makes each expert a copy of the dense feed-forward; the router is fresh (Komatsuzaki et al. 2022, section 3)."""

    fields = ("experts",)

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if experiment.model.experts is None:
            yield (
                f"config.checkpoint.adapt has {self}, and config.model.experts is None: set it, as to "
                "MixtureOfExperts(num_experts=8, top_k=2)"
            )

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        if theirs.experts is not None:
            yield (
                f"config.checkpoint.adapt has {self}, and there are {theirs.experts.num_experts} experts already: "
                "leave it out"
            )
        elif (width := _width(ours)) != theirs.d_ff:
            yield (
                f"config.checkpoint.adapt has {self}, whose experts are copies of a feed-forward {theirs.d_ff} wide, "
                f"and those of config.model are {width} wide: set config.model.experts.d_ff to {theirs.d_ff}"
            )

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        return dataclasses.replace(ours, experts=None, d_ff=_width(ours))

    def way(self, path: str, before: ModelConfig, ours: ModelConfig) -> Way:
        assert ours.experts is not None
        if "/mlp/router/" in path:
            return Way(None)
        if not _EXPERTS.search(path):
            return Way(path)
        experts = ours.experts.num_experts
        # [L, D, F] -> [L, E, D, F]
        copies = Making(f"{experts} copies", lambda x: jnp.repeat(x[:, None], experts, axis=1))
        return Way(_EXPERTS.sub(r"/mlp/\1/", path), (copies,))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        settings = ours.experts
        assert settings is not None
        lost = ["experts have no biases, which are left out"] * ours.use_bias
        if not settings.normalized:
            share = f"{settings.top_k} of {settings.num_experts}"
            lost.append(
                f"the weights of a token's experts do not add up to 1 (normalized=False), of a fresh router to about "
                f"{share}: each feed-forward adds so much less"
            )
        if settings.scale is not None:
            lost.append(f"each feed-forward adds {settings.scale:g} times as much (config.model.experts.scale)")
        if settings.capacity is not None:
            lost.append("for a token that is dropped for want of room an expert adds nothing")
        return "; ".join(lost) or "whatever the router says, the same is computed at first"


def _width(model: ModelConfig) -> int:
    """Returns the width inside an expert; of a model without any, which `problems` has refused, that it would have."""
    own = model.experts and model.experts.d_ff
    return own or model.d_ff
