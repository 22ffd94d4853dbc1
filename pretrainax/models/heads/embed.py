"""Implements the embedding head, which is trained to find the passage that answers a query in a batch of passages."""

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

_NO_CANDIDATE = -1e9  # score of the passages in empty rows, which pad the last validation batch


@flax.struct.dataclass
class EmbedOutput:
    vectors: jax.Array  # [B, S, D] float32, of the S sequences of a row: query, correct passage, hard negatives
    head: Embed = flax.struct.field(pytree_node=False)  # config.model.head


@register_head
class Embedder(Head):
    """The embedding head. `predictions` returns the embeddings [B, S, D] of the S sequences of each row.

    The first sequence of a row is a query, the others are passages. The score of a passage for a query is the dot
    product of their embeddings. The negatives of a query are all other passages of the batch, on all devices.
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
        return _normalize(output.vectors, output.head)

    def count(self, batch: Batch) -> Optional[jax.Array]:
        return (batch["texts"] > 0).sum() if has_retrieval_rows(batch) else None

    def check(self, output: Optional[EmbedOutput], batch: Batch) -> None:
        if (output is None) == has_retrieval_rows(batch):
            mismatch = (
                "queries and passages have no head"
                if has_retrieval_rows(batch)
                else "the head has no queries to learn from"
            )
            raise UserError(f"config.model.head and config.objective do not fit: {mismatch}")

    def sums(self, output: EmbedOutput, batch: Batch, **options: Unpack[LossOptions]) -> tuple[jax.Array, Sums]:
        vectors, head, real = output.vectors, output.head, batch["texts"] > 0
        chex.assert_shape(real, vectors.shape[:1], custom_message="vectors are [B, S, D], texts [B]")
        # Matryoshka training: the sum of the losses of several prefixes of the vectors. The full vectors come last.
        losses = [_contrastive_loss(scores(output, batch, n), head, real) for n in (*head.dimensions, None)]
        weights = real.astype(jnp.float32)
        loss = sum(loss for loss, _ in losses) * weights
        return loss.sum(), mean_sums("label", loss, losses[-1][1], weights)


def _normalize(vectors: jax.Array, head: Embed) -> jax.Array:
    """Normalizes vectors [..., D] to length 1 if `head.normalize` is set; otherwise, returns the vectors unchanged."""
    if not head.normalize:
        return vectors
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.square(vectors).sum(-1, keepdims=True), 1e-24))


def scores(output: EmbedOutput, batch: Batch, dimensions: Optional[int] = None) -> jax.Array:
    """Computes the scores of all queries with all passages of the batch, [B, B, S - 1]: dot product / temperature.

    Args:
      dimensions: number of leading vector dimensions to compare. If None, all dimensions are compared.
    """
    vectors, real = _normalize(output.vectors[..., :dimensions], output.head), batch["texts"] > 0
    # [B, D], [B, S - 1, D] -> [B, B, S - 1]
    products = jnp.einsum("BD,CPD->BCP", vectors[:, 0], vectors[:, 1:]) / output.head.temperature
    return jnp.where(real[None, :, None], products, _NO_CANDIDATE)


def _contrastive_loss(scores: jax.Array, head: Embed, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the contrastive loss of each row, [B], and whether the correct passage has the best score, [B] bool.

    Args:
      scores: the result of `scores`.
      real: [B] bool, False for empty rows.
    """
    row_scores, correct_scores = scores.reshape(len(scores), -1), jnp.einsum("BB->B", scores[..., 0])
    loss = jax.nn.logsumexp(row_scores, axis=-1) - correct_scores
    if head.symmetric:
        to_passages = jnp.where(real[:, None], scores[..., 0], _NO_CANDIDATE)  # [B, B], one column per passage
        loss = (loss + jax.nn.logsumexp(to_passages, axis=0) - correct_scores) / 2
    return loss, correct_scores >= row_scores.max(-1)
