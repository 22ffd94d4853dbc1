"""Implements the language-model head: the output matrix over the vocabulary, and the extra layer of a masked LM."""

import dataclasses
import math
from typing import Optional, Unpack

import chex
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.config.metric import FRACTION, OF_RECORDS, Metric
from pretrainax.data.batch import REPLACEMENTS, is_gathered
from pretrainax.layers.feed_forward import ACTIVATIONS
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.norm import Norm
from pretrainax.layers.sum_by_id import vectors_at
from pretrainax.layers.sums import Sums
from pretrainax.models.heads.base import (
    Answers,
    Batch,
    Head,
    flat_answers,
    loss_denominator,
    register_head,
    sampled,
)
from pretrainax.models.heads.vocabulary_loss import PER_TARGET, LossOptions, loss_sums


@flax.struct.dataclass
class LanguageModelOutput:
    """The features and the output matrix, whose product is the logits; the loss never holds all logits in memory."""

    features: jax.Array  # [B, N, D] in the compute dtype; N = T, or K with masked_positions [B, K]
    unembedding: jax.Array  # the output matrix, [D, V] float32
    bias: Optional[jax.Array] = None  # [V] float32
    logit_cap: Optional[float] = flax.struct.field(pytree_node=False, default=None)  # config.model.final_logit_cap

    def logits(self) -> jax.Array:
        """Computes the logits, [B, N, V] float32. With a large vocabulary, they are the largest array of a step."""
        logits = jnp.einsum(
            "BND,DV->BNV",
            self.features,
            self.unembedding.astype(self.features.dtype),
            preferred_element_type=jnp.float32,
        )
        logits = logits if self.bias is None else logits + self.bias[None, None]
        return logits if self.logit_cap is None else self.logit_cap * jnp.tanh(logits / self.logit_cap)


@register_head
class LanguageModel(Head):
    name, loss_name = "lm", "loss"
    metrics = (
        Metric("loss", "nats per target token", unit="nats per target"),
        Metric(
            "text_loss",
            "nats per target token of text, without sentinels, end tokens and [SEP]",
            unit="nats per target",
        ),
        Metric("masked_loss", "nats per target at [MASK], where the input hides the target", unit="nats per target"),
        Metric("random_loss", "nats per target where the input has another token", unit="nats per target"),
        Metric("unchanged_loss", "nats per target where the input still has the target", unit="nats per target"),
        Metric("perplexity", "exp(loss)"),
        Metric("bits_per_token", "loss in bits", unit="bits per target"),
        Metric(
            "bits_per_byte", "bits of the targets per byte of their text", unit="bits per byte", depends_on=OF_RECORDS
        ),
        Metric(
            "accuracy",
            "target tokens predicted correctly from the true context (teacher-forced)",
            larger_is_better=True,
            unit=FRACTION,
        ),
        Metric(
            "text_accuracy",
            "target tokens of text predicted correctly (teacher-forced)",
            larger_is_better=True,
            unit=FRACTION,
        ),
        Metric(
            "sequence_accuracy",
            "targets with all tokens predicted correctly, as greedy decoding would",
            larger_is_better=True,
            unit=FRACTION,
        ),
        Metric("loss_tokens", "target tokens", is_count=True, depends_on=()),
        Metric("total_loss", "sum of the loss and the losses of other heads", unit="nats"),
    )
    partition_rules = (
        (r"masked_lm_head/norm/(scale|bias)", "features"),
        (r"masked_lm_head/dense/kernel", "d_model embedding_dim"),
        (r"masked_lm_head/dense/bias", "features"),
        (r"unembedding/kernel", "d_model vocab_size"),
        (r"unembedding/bias", "vocab_size"),
    )

    def is_in(self, config: ModelConfig) -> bool:
        return not config.replaced_token_head and config.head is None

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        layer = {"masked_lm_head": MaskedLMHead(config)} if config.masked_lm_head else {}
        return {**layer, "unembedding": LMHead(config)}

    def output(self, model: nn.Module, x: jax.Array, batch: Batch, *, deterministic: bool) -> LanguageModelOutput:
        """Computes the predictions at the batch's `masked_positions` [B, K], or at all positions if there are none.

        With 15 % of the tokens masked, the head takes 15 % of the FLOPs of predictions at all positions.
        """
        x = x[..., : model.config.last_stack.d_model]  # the forward half of bidirectional hidden states
        if is_gathered(batch):
            chex.assert_rank(batch["masked_positions"], 2, custom_message="masked_positions are [B, K]")
            x = vectors_at(x, batch["masked_positions"])  # [B, T, D] -> [B, K, D]
        if model.config.masked_lm_head:
            x = model.masked_lm_head(x)
        return model.unembedding(x, model.output_embedding.embedding if model.config.tie_embeddings else None)

    def count(self, batch: Batch) -> Optional[jax.Array]:
        return loss_denominator(batch)

    def sums(self, output: LanguageModelOutput, batch: Batch, **options: Unpack[LossOptions]) -> tuple[jax.Array, Sums]:
        targets = batch["targets"], batch["loss_weights"], batch.get("segment_ids"), batch.get("text_weights")
        sums = loss_sums(output, *targets, **options)
        objective, _ = sums.pop("objective")
        if "replacements" in batch and (values := sums.get(f"{PER_TARGET}loss")) is not None:
            for number, kind in enumerate(REPLACEMENTS, start=1):
                weights = jnp.where(batch["replacements"] == number, values[1], 0.0)
                sums[f"{kind}_loss"] = (values[0] * weights).sum(), weights.sum()
        if "target_bytes" in batch:
            sums["bits_per_byte"] = sums["loss"][0] / math.log(2), batch["target_bytes"].sum()
        return objective, sums

    def answers(self, output: LanguageModelOutput, batch: Batch) -> Answers:
        predictions = dataclasses.replace(output, features=sampled(output.features)).logits().argmax(-1)  # [B, N]
        return flat_answers(predictions, sampled(batch["targets"]), sampled(batch["loss_weights"]) > 0)

    def flops(self, config: ModelConfig, inputs: int, targets: int) -> int:
        dense = 2 * targets * config.d_model * config.embedding_width if config.masked_lm_head else 0
        return dense + 2 * targets * config.embedding_width * config.vocab_size


class MaskedLMHead(nn.Module):
    """Computes norm(activation(dense(x))) before the output matrix, [B, N, D] -> [B, N, E].

    E is the width of the embeddings. Source: the released code of Devlin et al. 2018.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        init = normal_init(config, config.d_model)
        x = Linear((config.embedding_width,), ("d_model", "embedding_dim"), init, config.use_bias, name="dense")(x)
        return Norm(config, name="norm")(ACTIVATIONS[config.activation](x))


class LMHead(nn.Module):
    """The output matrix, tied to the token embedding or a separate parameter, with an optional bias.

    By default, only masked LMs have the bias. The input features are [B, N, D].
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, features: jax.Array, token_embedding: Optional[jax.Array]) -> LanguageModelOutput:
        config = self.config
        if config.logit_scale is not None:
            features = features * config.logit_scale
        vocabulary = (config.vocab_size,)
        has_bias = config.masked_lm_head if config.output_bias is None else config.output_bias
        bias = self.param("bias", nn.initializers.zeros, vocabulary, jnp.float32) if has_bias else None
        if config.tie_embeddings:
            if config.scale_tied_logits:
                features = features * config.d_model**-0.5
            assert token_embedding is not None
            matrix = token_embedding.T
        else:
            width = features.shape[-1]  # embedding_dim after a masked_lm_head, otherwise d_model
            matrix = self.param("kernel", normal_init(config, width), (width, *vocabulary), jnp.float32)
        return LanguageModelOutput(features, matrix, bias, config.final_logit_cap)
