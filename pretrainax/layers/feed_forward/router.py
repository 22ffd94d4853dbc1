"""The router: which experts a token is given to, by what weights, and how evenly that spreads the tokens."""

from typing import NamedTuple, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import MixtureOfExperts, ModelConfig
from pretrainax.layers.by_layer import BY_LAYER, EXPERT_TOKENS, ROUTER_ENTROPY
from pretrainax.layers.linear import normal_init
from pretrainax.layers.sums import Sums


class Routing(NamedTuple):
    """Says where each token goes; k experts each."""

    experts: jax.Array  # [B, T, k] int32, the best first
    weights: jax.Array  # [B, T, k] float32


class Router(nn.Module):
    """A linear map to a logit for each expert, in float32 whatever the compute dtype (Fedus et al. 2021, section
    2.4)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, real: Optional[jax.Array]) -> tuple[Routing, Sums]:
        """Returns where the tokens x [B, T, D] go, and the sums of `balance`; real: as of FeedForward."""
        settings = self.config.experts
        assert settings is not None
        shape = (self.config.d_model, settings.num_experts)
        kernel = self.param("kernel", normal_init(self.config, self.config.d_model), shape, jnp.float32)
        # [B, T, D] -> [B, T, E]; a TPU would round both to bfloat16
        logits = jnp.matmul(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
        routing = route(settings, logits)
        counted = jnp.ones(x.shape[:2]) if real is None else real.astype(jnp.float32)
        return routing, balance(settings, logits, routing, counted)


def route(settings: MixtureOfExperts, logits: jax.Array) -> Routing:
    """Returns the experts with the largest logits, [B, T, E] -> [B, T, k]."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits), settings.top_k)
    if settings.normalized:
        weights /= weights.sum(axis=-1, keepdims=True)
    return Routing(experts, weights)


def balance(settings: MixtureOfExperts, logits: jax.Array, routing: Routing, counted: jax.Array) -> Sums:
    """Returns the losses of a layer's router, and how it spreads the tokens.

    The balance loss is E · sum over experts of f · P, with f the share of assignments that an expert gets, and P its
    mean probability (Fedus et al. 2021, equations 4 to 6): 1 where both are even. Of several layers it is the mean.

    NOTE Those of transformers take f k times as large, and f and P over all layers together.

    Args:
      counted: [B, T], 1 at tokens of a text; others are routed, and count for nothing here.
    """
    probabilities, tokens = jax.nn.softmax(logits), counted.sum()
    # [B, T, k, E] -> [E]
    assigned = jnp.einsum("BTKE,BT->E", jax.nn.one_hot(routing.experts, settings.num_experts), counted)
    nonzero = jnp.maximum(tokens, 1.0)
    share = assigned / (nonzero * settings.top_k)
    probability = jnp.einsum("BTE,BT->E", probabilities, counted) / nonzero
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    entropy = jnp.einsum("BTE,BT->", -probabilities * jax.nn.log_softmax(logits), counted)
    one = jnp.ones(())
    sums = {
        f"{BY_LAYER}{EXPERT_TOKENS}": (assigned, one),
        f"{BY_LAYER}{ROUTER_ENTROPY}": (entropy, tokens),
    }
    if settings.balance_weight:
        loss = settings.num_experts * jnp.sum(share * probability)
        sums["balance_loss"] = (settings.balance_weight * loss, one)
    if settings.z_weight:
        sums["router_z_loss"] = (settings.z_weight * jnp.sum(counted * normaliser**2) / nonzero, one)
    return sums
