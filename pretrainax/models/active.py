"""The part of a model that a token passes through: all of it but for the experts that it is not given to."""

import math

import jax

from pretrainax.config import ModelConfig
from pretrainax.models import abstract_params
from pretrainax.models.electra import models_of
from pretrainax.models.heads import HEADS
from pretrainax.sharding.rules import axes_of_leaves


def active_parameters(config: ModelConfig) -> int:
    """Counts the parameters that one token uses."""
    params = abstract_params(config)
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(params)]
    if config.experts is None:
        return sum(sizes)
    experts = sum(size for size, axes in zip(sizes, axes_of_leaves(params), strict=True) if "experts" in axes)
    return sum(sizes) - experts + experts * config.experts.top_k // config.experts.num_experts


def predicted_vocabulary(config: ModelConfig) -> int:
    """Counts the logits of a token that is to be predicted: those of a vocabulary, and none of a classifier."""
    return sum(model.vocab_size for model in models_of(config) if HEADS["lm"].is_in(model))


def describe_experts(config: ModelConfig) -> str:
    """Says how many experts there are, and how many parameters a token uses; "": there are none."""
    if config.experts is None:
        return ""
    settings = config.experts
    count, each, shared, first = settings.num_experts, settings.top_k, settings.shared_experts, settings.first_dense
    where = f"each block but the first {first}" if first else "each block"
    where = where if settings.every is None else f"one block of each {settings.every}"
    for_token = f"{each} for a token" + (f" and {shared} for all" if shared else "")
    for_token += " and a feed-forward behind them" if settings.dense_after else ""
    return f"{count} in {where}, {for_token}, which uses {active_parameters(config) / 1e6:,.1f} M parameters"
