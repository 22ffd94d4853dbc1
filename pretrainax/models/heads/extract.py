"""Implements the extractive question-answering head, which predicts the first and the last token of an answer."""

from typing import Optional, Unpack

import chex
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import Extract, ModelConfig, UserError
from pretrainax.data.batch import has_span
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.feed_forward import Dense
from pretrainax.layers.norm import Norm
from pretrainax.layers.sums import Sums
from pretrainax.models.heads.base import Answers, Batch, Head, non_empty_rows, register_head
from pretrainax.models.heads.classify import label_logits
from pretrainax.models.heads.vocabulary_loss import LossOptions

FORBIDDEN_LOGIT = -1e9  # logit of positions that cannot be in an answer, such as padding


@flax.struct.dataclass
class ExtractorOutput:
    logits: jax.Array  # [B, T, 2] float32, of the first and the last token of the answer


@register_head
class Extractor(Head):
    """The extraction head. `predictions` returns the logits of an answer's first and last token, [B, T, 2] float32.

    The loss is the mean of two cross-entropies, one for the first and one for the last token. Both are over the
    positions of the row (Devlin et al. 2018, section 4.2).
    """

    name, loss_name = "extract", "label_loss"
    partition_rules = (
        (r"extractor/dense/kernel", "d_model features"),
        (r"extractor/norm/(scale|bias)", "features"),
        (r"extractor/output/kernel", "d_model labels"),
        (r"extractor/(dense|output)/bias", "features"),
        (r"extractor/mlp/(up|gate)/kernel", "d_model d_ff"),
        (r"extractor/mlp/(up|gate)/bias", "d_ff"),
        (r"extractor/mlp/down/kernel", "d_ff d_model"),
        (r"extractor/(mlp/down/bias|mlp_norm/(scale|bias))", "features"),
    )

    def is_in(self, config: ModelConfig) -> bool:
        return isinstance(config.head, Extract)

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        return {"extractor": ExtractorHead(config)}

    def output(self, model: nn.Module, x: jax.Array, batch: Batch, *, deterministic: bool) -> ExtractorOutput:
        allowed, types = batch["segment_ids"] > 0, batch.get("token_types")
        if model.config.head.second_text and types is not None:
            allowed &= (types > 0) | (jnp.arange(x.shape[1])[None] == 0)
        return ExtractorOutput(model.extractor(x, allowed, deterministic))

    def predictions(self, output: ExtractorOutput, batch: Batch) -> jax.Array:
        return output.logits

    def count(self, batch: Batch) -> Optional[jax.Array]:
        return non_empty_rows(batch).sum() if has_span(batch) else None

    def check(self, output: Optional[ExtractorOutput], batch: Batch) -> None:
        if (output is None) == has_span(batch):
            mismatch = "answers to find have no head" if has_span(batch) else "the head has no answers to learn from"
            raise UserError(f"config.model.head and config.objective do not fit: {mismatch}")

    def sums(self, output: ExtractorOutput, batch: Batch, **options: Unpack[LossOptions]) -> tuple[jax.Array, Sums]:
        span, real = batch["span"], non_empty_rows(batch)
        chex.assert_shape(span, (output.logits.shape[0], 2), custom_message="span is [B, 2]")
        end_logits = output.logits.swapaxes(1, 2)  # [B, T, 2] -> [B, 2, T]
        target_logits = jnp.take_along_axis(end_logits, span[..., None], axis=2).squeeze(2)  # [B, 2]
        loss = ((jax.nn.logsumexp(end_logits, axis=-1) - target_logits).mean(1) * real).sum()
        correct, count = (end_logits.argmax(-1) == span).all(1), real.sum()
        sums = {"label_loss": (jax.lax.stop_gradient(loss), count)}
        return loss, sums | {"label_accuracy": (jnp.where(correct, real, 0.0).sum(), count)}

    def answers(self, output: ExtractorOutput, batch: Batch) -> Answers:
        return Answers(output.logits.argmax(1), batch["span"], non_empty_rows(batch) > 0)

    def flops(self, config: ModelConfig, inputs: int, targets: int) -> int:
        assert isinstance(config.head, Extract)
        hidden = 0 if config.head.hidden == "none" else config.d_model
        feed_forward = Dense.flops(config, targets) if config.head.feed_forward else 0
        return feed_forward + 2 * targets * config.stream_width * (hidden + config.head.num_labels)


class ExtractorHead(nn.Module):
    """Projects the last hidden states to logits, [B, T, D] -> [B, T, 2] float32.

    `allowed` [B, T] is False for positions that cannot be in an answer; their logit is `FORBIDDEN_LOGIT`.

    NOTE The Hugging Face Transformers classes include padding in the softmax, so their outputs depend on the padded
    length of the rows.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, allowed: jax.Array, deterministic: bool) -> jax.Array:
        config = self.config
        assert isinstance(config.head, Extract)
        if config.head.feed_forward:
            dropout = Dropout(config.dropout_rate, deterministic=deterministic)
            y, _ = Dense(config, name="mlp")(dropout(x))
            x = Norm(config, name="mlp_norm")(x + dropout(y))
        logits = label_logits(config, x, deterministic)
        return jnp.where(allowed[..., None], logits, FORBIDDEN_LOGIT)
