"""Counts a model's active parameters: all parameters except those of experts to which a token is not routed."""

import math

import jax

from pretrainax.config import ModelConfig
from pretrainax.models import abstract_params
from pretrainax.models.electra import component_configs
from pretrainax.models.heads import HEADS
from pretrainax.sharding.rules import axes_of_leaves


def active_parameters(config: ModelConfig) -> int:
    """Computes the number of parameters that process one token: all parameters, but only `top_k` experts per layer."""
    params = abstract_params(config)
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(params)]
    if config.experts is None:
        return sum(sizes)
    experts = sum(size for size, axes in zip(sizes, axes_of_leaves(params), strict=True) if "experts" in axes)
    return sum(sizes) - experts + experts * config.experts.top_k // config.experts.num_experts


def predicted_vocabulary(config: ModelConfig) -> int:
    """Computes the number of vocabulary logits per predicted token; for ELECTRA, summed over both encoders.

    The result is 0 for a model without a language-model head, such as a classifier.
    """
    return sum(model.vocab_size for model in component_configs(config) if HEADS["lm"].is_in(model))


def logits_per_target(config: ModelConfig) -> int:
    """Computes the number of vocabulary logits per predicted token, including multi-token prediction."""
    depths = 0 if config.multi_token is None else config.multi_token.depth
    return (1 + depths) * predicted_vocabulary(config)


def describe_experts(config: ModelConfig) -> str:
    """Describes the experts and the active parameters of a model in one line; returns "" if it has no experts."""
    if config.experts is None:
        return ""
    settings = config.experts
    count, top_k, shared, dense = (
        settings.num_experts,
        settings.top_k,
        settings.shared_experts,
        settings.first_dense,
    )
    blocks = f"each block except the first {dense}" if dense else "each block"
    blocks = blocks if settings.every is None else f"one block in {settings.every}"
    per_token = f"{top_k} per token" + (f" and {shared} shared" if shared else "")
    per_token += " and a feed-forward after them" if settings.dense_after else ""
    return f"{count} in {blocks}, {per_token}, {active_parameters(config) / 1e6:,.1f} M active parameters per token"
