"""Implements the head of ELECTRA's discriminator, which predicts which tokens the generator replaced."""

from typing import Optional, Unpack

import chex
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig, UserError
from pretrainax.config.metric import FRACTION, Metric
from pretrainax.data.batch import has_replaced
from pretrainax.layers.feed_forward import ACTIVATIONS
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.norm import Norm
from pretrainax.layers.sums import Sums
from pretrainax.models.heads.base import Batch, Head, mean_sums, per_target_sums, register_head
from pretrainax.models.heads.vocabulary_loss import PER_TARGET, LossOptions


@flax.struct.dataclass
class ReplacedTokensOutput:
    logits: jax.Array  # [B, T] float32
    replaced: Optional[jax.Array] = None  # [B, T] bool, the labels; if None, they are batch["replaced"]
    weight: float = flax.struct.field(pytree_node=False, default=1.0)  # weight of the loss


@register_head
class ReplacedTokens(Head):
    name, loss_name = "replaced", "replaced_loss"
    # The task of the discriminator depends on the tokens that the generator proposes.
    metrics = tuple(
        m._replace(depends_on=("objective", "tokenizer", "text", "generator"))
        for m in (
            Metric("replaced_loss", "nats per token of the discriminator", unit="nats per token"),
            Metric(
                "replaced_accuracy",
                "tokens that the discriminator classifies correctly as replaced or original",
                larger_is_better=True,
                unit=FRACTION,
            ),
            Metric(
                "replaced_precision",
                "replaced tokens among the tokens that the discriminator classifies as replaced",
                larger_is_better=True,
                unit=FRACTION,
            ),
            Metric(
                "replaced_recall",
                "replaced tokens that the discriminator classifies as replaced",
                larger_is_better=True,
                unit=FRACTION,
            ),
            Metric("replaced_fraction", "replaced tokens among all tokens", unit=FRACTION),
        )
    )
    partition_rules = (
        (r"replaced_token_head/norm/(scale|bias)", "features"),
        (r"replaced_token_head/dense/kernel", "d_model features"),
        (r"replaced_token_head/output/kernel", "d_model labels"),
        (r"replaced_token_head/(dense|output)/bias", "features"),
    )

    def is_in(self, config: ModelConfig) -> bool:
        return config.replaced_token_head

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        return {"replaced_token_head": ReplacedTokenHead(config)}

    def output(self, model: nn.Module, x: jax.Array, batch: Batch, *, deterministic: bool) -> ReplacedTokensOutput:
        return ReplacedTokensOutput(model.replaced_token_head(x, batch["segment_ids"]))

    def count(self, batch: Batch) -> Optional[jax.Array]:
        return (batch["segment_ids"] > 0).sum() if "segment_ids" in batch else None

    def sums(
        self, output: ReplacedTokensOutput, batch: Batch, **options: Unpack[LossOptions]
    ) -> tuple[jax.Array, Sums]:
        logits, truth = output.logits, output.replaced
        if truth is None and not has_replaced(batch):
            raise UserError(
                "a replaced_token_head needs a generator to replace tokens in training: set config.model.generator"
            )
        truth = batch["replaced"] > 0 if truth is None else truth
        shapes = (logits, truth, batch["segment_ids"])
        chex.assert_equal_shape(shapes, custom_message="logits, replaced and segment_ids are [B, T]")
        real = (batch["segment_ids"] > 0).astype(jnp.float32)
        loss = (jax.nn.softplus(logits) - jnp.where(truth, logits, 0.0)) * real  # -log sigmoid(±logit)
        predicted, is_real = logits > 0, real > 0
        sums = mean_sums("replaced", loss, predicted == truth, real)
        true_positives, predicted, actual = (
            jnp.sum(x & is_real, dtype=jnp.float32) for x in (predicted & truth, predicted, truth)
        )
        sums |= {"replaced_precision": (true_positives, predicted), "replaced_recall": (true_positives, actual)}
        if options.get("per_target"):
            detections = truth.astype(jnp.float32), (logits > 0).astype(jnp.float32)
            sums[f"{PER_TARGET}replaced_precision"] = detections[0], detections[1] * real
            sums[f"{PER_TARGET}replaced_recall"] = detections[1], detections[0] * real
            sums |= per_target_sums("replaced", loss, (logits > 0) == truth, real)
        return output.weight * loss.sum(), sums

    def flops(self, config: ModelConfig, inputs: int, targets: int) -> int:
        return 2 * inputs * config.d_model * (config.d_model + 1)


class ReplacedTokenHead(nn.Module):
    """Computes a logit for whether each token was replaced, [B, T, D] -> [B, T] float32.

    A dense layer precedes the output, as in the released code of Clark et al. 2020 (section 2). With
    `config.replaced_token_context`, the state of a segment's first token is added to each state, as in the released
    code of DeBERTa v3.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: jax.Array) -> jax.Array:
        config, init = self.config, normal_init(self.config, self.config.d_model)
        if config.replaced_token_context:
            x = Norm(config, name="norm")(x + _first_of_segment(x, segment_ids))
        x = Linear((config.d_model,), ("d_model", "features"), init, name="dense")(x)
        x = Linear((1,), ("d_model", "labels"), init, name="output")(ACTIVATIONS[config.activation](x))
        return x[..., 0].astype(jnp.float32)  # [B, T, 1] -> [B, T]


def _first_of_segment(x: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Gathers, for each token, the hidden state of its segment's first token, [B, T, D] -> [B, T, D]."""
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    first = jax.lax.cummax(jnp.where(starts, jnp.arange(x.shape[1])[None], 0), axis=1)
    # A matmul, because the gradient of a gather would add up the tokens of a segment one at a time.
    return jnp.einsum("BTS,BSD->BTD", jax.nn.one_hot(first, x.shape[1], dtype=x.dtype), x)
