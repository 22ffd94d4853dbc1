"""The router, which selects the experts of each token and their weights, and measures the load balance."""

from typing import NamedTuple, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import MixtureOfExperts, ModelConfig
from pretrainax.config.metric import FRACTION, Metric, declare
from pretrainax.layers.by_layer import BY_LAYER, EXPERT_TOKENS, ROUTER_ENTROPY
from pretrainax.layers.linear import normal_init
from pretrainax.layers.sums import Sums

declare(
    Metric("balance_loss", "load-balancing loss of the routers, times its weight: the mean over layers"),
    Metric("router_z_loss", "mean square of the routers' log-normalisers, times its weight"),
    Metric("expert_imbalance", "tokens of the busiest expert divided by the mean: the mean over layers; 1 is balanced"),
    Metric("dead_experts", "number of experts in all layers that received no token", is_count=True),
    Metric("router_entropy", "entropy of a router over experts, in nats per token: the mean over layers"),
    Metric("dropped_fraction", "fraction of assignments dropped because the expert was full", unit=FRACTION),
)


class Routing(NamedTuple):
    """The k experts of each token, and their weights."""

    experts: jax.Array  # [B, T, k] int32, in descending order of score
    weights: jax.Array  # [B, T, k] float32, factors of the experts' outputs


class Router(nn.Module):
    """A linear layer that computes one logit per expert for each token.

    It computes in float32, whatever the compute dtype is (Fedus et al. 2021, section 2.4).
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, real: Optional[jax.Array]) -> tuple[Routing, Sums]:
        """Returns the routing of the tokens x [B, T, D], and the losses and metrics of `balance`.

        Args:
          real: optional [B, T] mask, True at tokens that are not padding. If None, no token is padding.
        """
        settings = self.config.experts
        assert settings is not None
        shape = (self.config.d_model, settings.num_experts)
        kernel = self.param("kernel", normal_init(self.config, self.config.d_model), shape, jnp.float32)
        # [B, T, D] -> [B, T, E]; by default, a TPU would round both factors to bfloat16
        logits = jnp.matmul(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
        if self.config.use_bias:
            logits += self.param("bias", nn.initializers.zeros, shape[1:], jnp.float32)[None, None]
        balance_bias = None
        if settings.bias_rate is not None:  # no gradient updates this bias: see optim.balancing
            balance_bias = self.param("balance", nn.initializers.zeros, shape[1:], jnp.float32)
        routing = route(settings, logits, balance_bias)
        counted = jnp.ones(x.shape[:2]) if real is None else real.astype(jnp.float32)
        return routing, balance(settings, logits, routing, counted)


def route(settings: MixtureOfExperts, logits: jax.Array, bias: Optional[jax.Array] = None) -> Routing:
    """Selects the k experts with the largest scores for each token, and their weights: [B, T, E] -> [B, T, k] each.

    The scores are computed from the logits by a softmax or a sigmoid. The weights are the scores, optionally normalized
    and scaled.

    Args:
      bias: optional [E] array, added to the scores when experts are selected, but not to the weights.
    """
    scores = _scores(settings, logits)
    ranking = scores if bias is None else scores + bias[None, None]
    if settings.groups is not None:
        ranking = jnp.where(_in_best_groups(settings, ranking), ranking, -jnp.inf)
    _, experts = jax.lax.top_k(ranking, settings.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if settings.normalized:
        weights /= weights.sum(axis=-1, keepdims=True) + 1e-20  # with sigmoids, all scores may be 0
    return Routing(experts, weights if settings.scale is None else settings.scale * weights)


def _scores(settings: MixtureOfExperts, logits: jax.Array) -> jax.Array:
    return jax.nn.softmax(logits) if settings.scores == "softmax" else jax.nn.sigmoid(logits)


def _in_best_groups(settings: MixtureOfExperts, scores: jax.Array) -> jax.Array:
    """Returns a bool mask [B, T, E] of the experts that belong to each token's best expert groups.

    The best `top_groups` groups are selected. `group_score` ranks a group by its best score or by the sum of its two
    best scores.
    """
    assert settings.groups is not None and settings.top_groups is not None
    # [B, T, E] -> [B, T, G, E/G] -> [B, T, G]
    grouped = scores.reshape(*scores.shape[:-1], settings.groups, -1)
    best, _ = jax.lax.top_k(grouped, 1 if settings.group_score == "best" else 2)
    _, groups = jax.lax.top_k(best.sum(axis=-1), settings.top_groups)
    # [B, T, g, G] -> [B, T, G] -> [B, T, E]
    is_selected = jax.nn.one_hot(groups, settings.groups, dtype=jnp.bool_).any(axis=-2)
    return jnp.repeat(is_selected, grouped.shape[-1], axis=-1)


def balance(settings: MixtureOfExperts, logits: jax.Array, routing: Routing, counted: jax.Array) -> Sums:
    """Computes the losses of a layer's router, and the load metrics of its experts.

    The balance loss is E · sum over experts of f · P. f is the fraction of assignments that an expert gets, and P is
    its mean probability (Fedus et al. 2021, equations 4 to 6). The loss is 1 if f and P are uniform. Sigmoid scores are
    normalized to sum to 1 per token (DeepSeek-V3, equations 17 to 20). The loss is averaged over rows, weighted by
    their numbers of tokens, and over layers. With `balance_over` "batch", the whole batch counts as one row.

    NOTE In transformers, f is k times as large, and f and P are computed over all layers together.

    Args:
      counted: [B, T] float32, 1 at tokens that are not padding. Padding is not counted in losses and metrics.
    """
    scores = _scores(settings, logits)
    probabilities = scores if settings.scores == "softmax" else scores / (scores.sum(-1, keepdims=True) + 1e-20)
    # [B, T, k, E] -> [B, E]; [B, T, E] -> [B, E]
    assigned = jnp.einsum("BTKE,BT->BE", jax.nn.one_hot(routing.experts, settings.num_experts), counted)
    probability = jnp.einsum("BTE,BT->BE", probabilities, counted)
    tokens = counted.sum()
    token_count = jnp.maximum(tokens, 1.0)
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    entropy = jnp.einsum("BTE,BT->", -probabilities * jnp.log(probabilities + 1e-20), counted)
    unit_count = jnp.ones(())
    sums = {
        f"{BY_LAYER}{EXPERT_TOKENS}": (assigned.sum(axis=0), unit_count),
        f"{BY_LAYER}{ROUTER_ENTROPY}": (entropy, tokens),
    }
    if settings.balance_weight:
        row_tokens = counted.sum(axis=1, keepdims=True)  # [B, 1]
        if settings.balance_over == "batch":  # the batch counts as one row
            assigned, probability, row_tokens = (
                x.sum(axis=0, keepdims=True) for x in (assigned, probability, row_tokens)
            )
        even_assignments = settings.top_k * jnp.maximum(row_tokens, 1.0)
        loss = settings.num_experts * jnp.sum(assigned / even_assignments * probability) / token_count
        sums["balance_loss"] = (settings.balance_weight * loss, unit_count)
    if settings.z_weight:
        sums["router_z_loss"] = (settings.z_weight * jnp.sum(counted * log_normaliser**2) / token_count, unit_count)
    return sums
