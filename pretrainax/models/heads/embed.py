"""Implements the embedding head, which is trained to find the passage of a query among all passages of a batch."""

from typing import Optional, Unpack

import chex
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import Embed, ModelConfig, UserError
from pretrainax.data.batch import has_retrieval_rows
from pretrainax.layers.sums import Sums
from pretrainax.models.heads.base import Batch, Head, mean_sums, register_head
from pretrainax.models.heads.classify import pooled_segments
from pretrainax.models.heads.vocabulary_loss import LossOptions

_NO_CANDIDATE = -1e9  # score of the passages in empty rows, which fill the last batch of a validation


@flax.struct.dataclass
class EmbedOutput:
    vectors: jax.Array  # [B, S, D] float32, of the S sequences of a row: query, correct passage, hard negatives
    head: Embed = flax.struct.field(pytree_node=False)  # config.model.head


@register_head
class Embedder(Head):
    """The embedding head. `predictions` returns the embeddings [B, S, D]; their dot products are the scores.

    The negatives of a query are all other passages of the batch, on all devices.
    """

    name, loss_name = "embed", "label_loss"

    def is_in(self, config: ModelConfig) -> bool:
        return isinstance(config.head, Embed)

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        return {}

    def output(self, model: nn.Module, x: jax.Array, batch: Batch, *, deterministic: bool) -> EmbedOutput:
        head = model.config.head
        vectors = pooled_segments(x.astype(jnp.float32), batch["segment_ids"], head.num_texts, head.pooling)
        return EmbedOutput(vectors, head)

    def predictions(self, output: EmbedOutput, batch: Batch) -> jax.Array:
        return _compared(output.vectors, output.head)

    def count(self, batch: Batch) -> Optional[jax.Array]:
        return (batch["texts"] > 0).sum() if has_retrieval_rows(batch) else None

    def check(self, output: Optional[EmbedOutput], batch: Batch) -> None:
        if (output is None) == has_retrieval_rows(batch):
            lack = (
                "queries and passages have no head"
                if has_retrieval_rows(batch)
                else "the head has no queries to learn from"
            )
            raise UserError(f"config.model.head and config.objective do not fit: {lack}")

    def sums(self, output: EmbedOutput, batch: Batch, **options: Unpack[LossOptions]) -> tuple[jax.Array, Sums]:
        vectors, head, real = output.vectors, output.head, batch["texts"] > 0
        chex.assert_shape(real, vectors.shape[:1], custom_message="vectors are [B, S, D], texts [B]")
        # Matryoshka training: the sum of the losses of several prefixes of the vectors. The full vectors come last.
        losses = [_contrast(scores(output, batch, n), head, real) for n in (*head.dimensions, None)]
        weights = real.astype(jnp.float32)
        loss = sum(loss for loss, _ in losses) * weights
        return loss.sum(), mean_sums("label", loss, losses[-1][1], weights)


def _compared(vectors: jax.Array, head: Embed) -> jax.Array:
    """Returns the vectors [..., D] whose dot products are the scores: normalized if `head.normalize` is set."""
    if not head.normalize:
        return vectors
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.square(vectors).sum(-1, keepdims=True), 1e-24))


def scores(output: EmbedOutput, batch: Batch, dimensions: Optional[int] = None) -> jax.Array:
    """Returns the scores of all queries with all passages of the batch, [B, B, S - 1]: dot product / temperature.

    Args:
      dimensions: compares only this number of leading dimensions of the vectors; None: the full vectors.
    """
    vectors, real = _compared(output.vectors[..., :dimensions], output.head), batch["texts"] > 0
    # [B, D], [B, S - 1, D] -> [B, B, S - 1]
    products = jnp.einsum("BD,CPD->BCP", vectors[:, 0], vectors[:, 1:]) / output.head.temperature
    return jnp.where(real[None, :, None], products, _NO_CANDIDATE)


def _contrast(scores: jax.Array, head: Embed, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the contrastive loss of each row, [B], and [B] bool, True if its correct passage has the best score.

    Args:
      scores: the result of `scores`.
      real: [B] bool, False for empty rows.
    """
    rows, own = scores.reshape(len(scores), -1), jnp.einsum("BB->B", scores[..., 0])
    loss = jax.nn.logsumexp(rows, axis=-1) - own
    if head.symmetric:
        to_passages = jnp.where(real[:, None], scores[..., 0], _NO_CANDIDATE)  # [B, B], one column per passage
        loss = (loss + jax.nn.logsumexp(to_passages, axis=0) - own) / 2
    return loss, own >= rows.max(-1)
