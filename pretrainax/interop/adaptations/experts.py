"""Converts each dense feed-forward layer to a mixture of experts."""

import dataclasses
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import Experiment, ModelConfig
from pretrainax.interop.adaptations.base import Adaptation, Operation, ParameterRule
from pretrainax.layers.feed_forward import layer_groups
from pretrainax.sharding.param_paths import split_stack_path, stack_of

_EXPERTS = re.compile(r"/mlp/experts_(up|gate|down)/")


@dataclasses.dataclass
class DenseToExperts(Adaptation):
    """Copies each dense feed-forward layer to all experts, and initializes the routers.

    Source: Komatsuzaki et al. 2022, section 3. An additional feed-forward layer after the experts (`dense_after`) is
    also initialized, with an output projection of zero.
    """

    fields = ("experts",)

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if experiment.model.experts is None:
            yield (
                f"config.checkpoint.adapt has {self}, and config.model.experts is None: set it, for example to "
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
                f"{ours.experts.shared_experts}, which would apply one more copy to all tokens: set it to None"
            )
        dense_layers, _ = layer_groups(ours, ours.num_layers)
        if dense_layers.numbers and ours.d_ff != theirs.d_ff:
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

    def parameter_rule(self, path: str, before: ModelConfig, ours: ModelConfig) -> ParameterRule:
        """Initializes routers, and copies feed-forward parameters to all experts; see `Adaptation.parameter_rule`."""
        assert ours.experts is not None
        if "/mlp/router/" in path or "/mlp_after" in path and "/mlp_after/down/" not in path:
            return ParameterRule(None)
        experts, operations = ours.experts.num_experts, []
        dense_layers, _ = layer_groups(ours, ours.num_layers)
        if dense_layers.numbers and (stack := stack_of(path)):  # layers with and without experts are separate stacks
            _, part = split_stack_path(stack)

            def select(x: jax.Array) -> jax.Array:
                (group,) = (group for group in layer_groups(ours, len(x)) if group.part == part)
                return x[np.array(group.numbers)]  # [L, …] -> [l, …]

            operations.append(Operation(f"the layers {'without' if part else 'with'} experts", select))
            path = path.replace(f"/{part}/blocks/", "/blocks/")
        if _EXPERTS.search(path):
            # [L, D, F] -> [L, E, D, F]
            operations.append(Operation(f"{experts} copies", lambda x: jnp.repeat(x[:, None], experts, axis=1)))
        if (width := ours.experts.dense_after) is not None and "/mlp_after/" in path:
            # [L, F, D] -> [L, W, D]; a bias remains [L, D]
            operations.append(
                Operation("zero", lambda x: jnp.zeros((len(x), *(width,) * (x.ndim - 2), x.shape[-1]), x.dtype))
            )
            path = path.replace("/mlp_after/", "/mlp/")
        return ParameterRule(_EXPERTS.sub(r"/mlp/\1/", path), tuple(operations))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        settings = ours.experts
        assert settings is not None
        effects = []
        scale = settings.scale or 1.0
        if not settings.normalized or scale != 1.0:
            # The score of each expert if all logits of the router are 0.
            score = 1 / settings.num_experts if settings.scores == "softmax" else 1 / 2
            total = scale * (1.0 if settings.normalized else settings.top_k * score)
            effects.append(
                "the weights of a token's experts do not sum to 1 (normalized, scale) but to about "
                f"{total:.3g} with a fresh router, which scales the output of each feed-forward layer"
            )
        if settings.capacity is not None:
            effects.append("experts drop tokens above their capacity, and add nothing for them")
        if settings.dense_after is not None and ours.norm_at == "post":
            effects.append("the stream passes through an additional norm after the experts")
        return "; ".join(effects) or "the initial function is unchanged for any router output"


def _width(model: ModelConfig) -> int:
    """Returns the hidden width of each expert, or of each feed-forward layer if the model has no experts."""
    d_ff = model.experts and model.experts.d_ff
    return d_ff or model.d_ff
