"""Implements the head for row classification, multi-label classification, regression and multiple choice."""

from typing import Optional, Unpack

import chex
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import Classify, Extract, ModelConfig, Tag, UserError
from pretrainax.data.batch import has_labels
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.feed_forward import ACTIVATIONS
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.norm import Norm
from pretrainax.layers.sums import Sums
from pretrainax.models.heads.base import Answers, Batch, Head, non_empty_rows, register_head
from pretrainax.models.heads.vocabulary_loss import LossOptions
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.axes import logical_spec


@flax.struct.dataclass
class ClassifierOutput:
    logits: jax.Array  # [B, L] float32; the predicted numbers for a regression
    kind: str = flax.struct.field(pytree_node=False, default="single")  # config.model.head.kind


@register_head
class Classifier(Head):
    """The classifier head. `predictions` returns logits (or the predicted numbers, in a regression), [B, L] float32.

    The loss of a row is the cross-entropy ("single", "choice"), the mean binary cross-entropy over labels ("multi"), or
    the mean squared error ("regression").
    """

    name, loss_name = "classify", "label_loss"
    partition_rules = (
        (r"classifier/dense/kernel", "d_model features"),
        (r"classifier/norm/(scale|bias)", "features"),
        (r"classifier/output/kernel", "d_model labels"),
        (r"classifier/(dense|output)/bias", "features"),
    )

    def is_in(self, config: ModelConfig) -> bool:
        return isinstance(config.head, Classify)

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        return {"classifier": ClassifierHead(config)}

    def output(self, model: nn.Module, x: jax.Array, batch: Batch, *, deterministic: bool) -> ClassifierOutput:
        logits = model.classifier(x, batch["segment_ids"], deterministic)
        return ClassifierOutput(logits, model.config.head.kind)

    def predictions(self, output: ClassifierOutput, batch: Batch) -> jax.Array:
        return output.logits

    def count(self, batch: Batch) -> Optional[jax.Array]:
        return non_empty_rows(batch).sum() if has_labels(batch) else None

    def check(self, output: Optional[ClassifierOutput], batch: Batch) -> None:
        if (output is None) == has_labels(batch):
            mismatch = "labels have no head" if has_labels(batch) else "the head has no labels to learn from"
            raise UserError(f"config.model.head and config.objective do not fit: {mismatch}")

    def sums(self, output: ClassifierOutput, batch: Batch, **options: Unpack[LossOptions]) -> tuple[jax.Array, Sums]:
        logits, real, correct = output.logits, non_empty_rows(batch), None
        if output.kind in ("single", "choice"):
            labels = batch["labels"]
            chex.assert_shape(labels, logits.shape[:1], custom_message="logits are [B, L], labels [B]")
            target_logits = jnp.take_along_axis(logits, labels[:, None], axis=1).squeeze(1)  # [B, L] -> [B]
            loss, correct = jax.nn.logsumexp(logits, axis=-1) - target_logits, jnp.argmax(logits, axis=-1) == labels
        else:
            truth = batch["label_values"]
            chex.assert_shape(truth, logits.shape, custom_message="logits and label_values are [B, L]")
            if output.kind == "multi":  # mean of -log sigmoid(±logit); a row is correct if all its labels are correct
                loss = (jax.nn.softplus(logits) - truth * logits).mean(-1)
                correct = ((logits > 0) == (truth > 0)).all(-1)
            else:
                loss = jnp.square(logits - truth).mean(-1)
        loss, count = (loss * real).sum(), real.sum()
        sums = {"label_loss": (jax.lax.stop_gradient(loss), count)}
        if correct is not None:
            sums["label_accuracy"] = (jnp.where(correct, real, 0.0).sum(), count)
        return loss, sums

    def answers(self, output: ClassifierOutput, batch: Batch) -> Answers:
        if output.kind in ("single", "choice"):
            predictions, targets = output.logits.argmax(-1), batch["labels"]
        elif output.kind == "multi":
            predictions, targets = output.logits > 0, batch["label_values"] > 0
        else:  # numbers that agree to two decimals are one prediction
            predictions, targets = jnp.round(100 * output.logits), jnp.round(100 * batch["label_values"])
        return Answers(predictions, targets, non_empty_rows(batch) > 0)

    def flops(self, config: ModelConfig, inputs: int, targets: int) -> int:
        assert isinstance(config.head, Classify)
        hidden = 0 if config.head.hidden == "none" else config.d_model
        if config.head.kind == "choice":  # one logit per choice
            return 2 * config.stream_width * (hidden + 1) * int(config.head.num_labels)
        return 2 * config.stream_width * (hidden + config.head.num_labels)


class ClassifierHead(nn.Module):
    """Pools the last hidden states of each row, [B, T, D] -> [B, D], and projects them to logits [B, L] float32.

    For multiple choice, the states of each choice are pooled separately, [B, T, D] -> [B, L, D], and projected to one
    logit per choice. Choice i, counted from 0, is segment i + 1.

    The layers match the published classification heads: BERT's pooler and classifier (Devlin et al. 2018, section 4.1);
    two linear layers, each after dropout, for RoBERTa, ELECTRA and BART; one linear layer on the last token for
    decoders.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: jax.Array, deterministic: bool) -> jax.Array:
        head = self.config.head
        assert isinstance(head, Classify)
        if head.kind == "choice":
            x = pooled_segments(x, segment_ids, int(head.num_labels), head.pooling)
            logits = label_logits(self.config, constrain(x, logical_spec("batch")), deterministic, labels=1)
            return logits.squeeze(-1)  # [B, L, 1] -> [B, L]
        x = _pool(x, segment_ids > 0, head.pooling)
        return label_logits(self.config, constrain(x, logical_spec("batch")), deterministic)


def label_logits(config: ModelConfig, x: jax.Array, deterministic: bool, labels: Optional[int] = None) -> jax.Array:
    """Projects hidden states to logits, [..., D] -> [..., L] float32, with the layers that `config.head` describes.

    The layers become submodules of the Flax module that calls this function.

    Args:
      deterministic: disables dropout.
      labels: number of logits L. If None, `config.head.num_labels` is used.
    """
    head, init = config.head, normal_init(config, config.stream_width)
    assert isinstance(head, (Classify, Tag, Extract))
    rate = config.dropout_rate if head.dropout_rate is None else head.dropout_rate
    dropout = Dropout(rate, deterministic=deterministic)
    if head.hidden != "none":
        name = config.activation if head.hidden == "model" else head.hidden
        activation = jnp.tanh if name == "tanh" else ACTIVATIONS[name]
        dense = Linear((config.d_model,), ("d_model", "features"), init, head.hidden_bias, name="dense")
        x = constrain(activation(dense(dropout(x))), logical_spec("batch"))
        x = Norm(config, name="norm")(x) if head.hidden_norm else x
    output = Linear((labels or int(head.num_labels),), ("d_model", "labels"), init, head.output_bias, name="output")
    return output(dropout(x)).astype(jnp.float32)


def _pool(x: jax.Array, real: jax.Array, pooling: str) -> jax.Array:
    """Pools the hidden states of each row, [B, T, D] -> [B, D].

    Args:
      real: [B, T] bool, False for padding.
      pooling: "cls": the first position; "last": the last non-padding position; "max", "mean": over all non-padding
        positions.
    """
    if pooling == "cls":
        return x[:, 0]
    if pooling == "max":
        return jnp.where(real.any(1)[:, None], jnp.where(real[..., None], x, -jnp.inf).max(1), 0.0).astype(x.dtype)
    weights = real.astype(jnp.float32)  # [B, T]
    if pooling == "last":  # a matmul instead of a gather, because the length axis may be sharded
        weights = (jnp.cumsum(weights, axis=1) == weights.sum(1, keepdims=True)) * weights
    weights = weights / jnp.maximum(weights.sum(1, keepdims=True), 1.0)
    return jnp.einsum("BT,BTD->BD", weights.astype(x.dtype), x)


def pooled_segments(x: jax.Array, segment_ids: jax.Array, texts: int, pooling: str) -> jax.Array:
    """Pools the hidden states of each sequence in each row, [B, T, D] -> [B, L, D].

    Args:
      segment_ids: [B, T]; sequence i, counted from 0, is segment i + 1.
      texts: the number of sequences per row, L.
      pooling: as in `_pool`; "cls" is the first token of each sequence.
    """
    mask = segment_ids[:, None] == jnp.arange(1, texts + 1)[None, :, None]  # [B, T] -> [B, L, T]
    if pooling == "cls":  # the first token only
        mask, pooling = mask & (jnp.cumsum(mask, axis=-1) == 1), "mean"
    return jax.vmap(lambda real: _pool(x, real, pooling), in_axes=1, out_axes=1)(mask)
