"""Makes a mixture of experts of each dense feed-forward."""

import dataclasses
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import Experiment, ModelConfig
from pretrainax.interop.adaptations.base import Adaptation, Making, Way
from pretrainax.layers.feed_forward import kinds_of_layers
from pretrainax.sharding.param_paths import part_of, stack_of

_EXPERTS = re.compile(r"/mlp/experts_(up|gate|down)/")


@dataclasses.dataclass
class DenseToExperts(Adaptation):
    """Makes each expert a copy of the dense feed-forward; the router is fresh (Komatsuzaki et al. 2022, section 3).

    So is a feed-forward behind the experts (`dense_after`), but that it adds nothing to the stream at first.
    """

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
            return
        if ours.experts is not None and ours.experts.shared_experts:
            yield (
                f"config.checkpoint.adapt has {self}, and config.model.experts.shared_experts is "
                f"{ours.experts.shared_experts}, by which tokens would pass through a copy more: set it to None"
            )
        plain, _ = kinds_of_layers(ours, ours.num_layers)
        if plain.numbers and ours.d_ff != theirs.d_ff:
            yield (
                f"config.checkpoint.adapt has {self}, and config.model.d_ff, of the layers without experts, is "
                f"{ours.d_ff}, there {theirs.d_ff}: set it to that"
            )
        if (width := _width(ours)) != theirs.d_ff:
            yield (
                f"config.checkpoint.adapt has {self}, whose experts are copies of a feed-forward {theirs.d_ff} wide, "
                f"and those of config.model are {width} wide: set config.model.experts.d_ff to {theirs.d_ff}"
            )

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        decoder = ours.decoder and dataclasses.replace(ours.decoder, d_ff=_width(ours.last_stack))
        return dataclasses.replace(ours, experts=None, d_ff=_width(ours), decoder=decoder)

    def way(self, path: str, before: ModelConfig, ours: ModelConfig) -> Way:
        assert ours.experts is not None
        if "/mlp/router/" in path or "/mlp_after" in path and "/mlp_after/down/" not in path:
            return Way(None)
        experts, made = ours.experts.num_experts, []
        plain, _ = kinds_of_layers(ours, ours.num_layers)
        if plain.numbers and (stack := stack_of(path)):  # two stacks are made of one
            _, part = part_of(stack)

            def taken(x: jax.Array) -> jax.Array:
                (kind,) = (kind for kind in kinds_of_layers(ours, len(x)) if kind.part == part)
                return x[np.array(kind.numbers)]  # [L, …] -> [l, …]

            made.append(Making(f"the layers {'without' if part else 'with'} experts", taken))
            path = path.replace(f"/{part}/blocks/", "/blocks/")
        if _EXPERTS.search(path):
            # [L, D, F] -> [L, E, D, F]
            made.append(Making(f"{experts} copies", lambda x: jnp.repeat(x[:, None], experts, axis=1)))
        if (width := ours.experts.dense_after) is not None and "/mlp_after/" in path:
            # [L, F, D] -> [L, W, D]; a bias stays [L, D]
            made.append(Making("zero", lambda x: jnp.zeros((len(x), *(width,) * (x.ndim - 2), x.shape[-1]), x.dtype)))
            path = path.replace("/mlp_after/", "/mlp/")
        return Way(_EXPERTS.sub(r"/mlp/\1/", path), tuple(made))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        settings = ours.experts
        assert settings is not None
        lost = []
        scale = settings.scale or 1.0
        if not settings.normalized or scale != 1.0:
            # of a router without an opinion, all of whose logits are 0
            score = 1 / settings.num_experts if settings.scores == "softmax" else 1 / 2
            total = scale * (1.0 if settings.normalized else settings.top_k * score)
            lost.append(
                "the weights of a token's experts do not add up to 1 (normalized, scale), of a fresh router to about "
                f"{total:.3g}: each feed-forward adds so many times what it did"
            )
        if settings.capacity is not None:
            lost.append("for a token that is dropped for want of room an expert adds nothing")
        if settings.dense_after is not None and ours.norm_at == "post":
            lost.append("behind the experts the stream passes through a norm more")
        return "; ".join(lost) or "whatever the router says, the same is computed at first"


def _width(model: ModelConfig) -> int:
    """Returns the width inside an expert; of a model without any, which `problems` has refused, that it would have."""
    own = model.experts and model.experts.d_ff
    return own or model.d_ff
