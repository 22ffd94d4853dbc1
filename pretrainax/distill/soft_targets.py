"""Soft-target losses: divergences between the outputs of student and teacher heads (Hinton et al. 2015)."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pretrainax.data.batch import Batch
from pretrainax.distill.distances import divergence
from pretrainax.models.heads import chain
from pretrainax.models.heads.base import non_empty_rows
from pretrainax.models.heads.classify import ClassifierOutput
from pretrainax.models.heads.embed import EmbedOutput, scores
from pretrainax.models.heads.extract import ExtractorOutput
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.heads.tag import TaggerOutput, real_words
from pretrainax.sharding.axes import BATCH_AXES
from pretrainax.sharding.mesh import axis_size

_MIN_PROBABILITY = 1e-30  # smallest marginal probability, so that its logarithm is finite


def softened(student: jax.Array, teacher: jax.Array, temperature: float) -> jax.Array:
    """Computes T² · KL(teacher || student) of softmax(logits / T), from logits, […, V] -> […] float32."""
    log_probabilities = [jax.nn.log_softmax(logits / temperature, axis=-1) for logits in (student, teacher)]
    return temperature**2 * divergence(*log_probabilities)


def token_loss(
    student: LanguageModelOutput, teacher: LanguageModelOutput, batch: Batch, temperature: float, chunk: int
) -> jax.Array:
    """Computes the soft-target loss of language-model heads, a weighted sum over the targets of a batch.

    The sum is computed in chunks to limit the memory for logits.

    Args:
      chunk: number of tokens per device whose logits are in memory at a time.
    """
    weights = batch["loss_weights"]  # [B, N]
    rows, length = weights.shape
    num_chunks = math.ceil(length / max(chunk * axis_size(BATCH_AXES) // rows, 1))
    size = math.ceil(length / num_chunks)

    def split(x: jax.Array) -> jax.Array:  # [B, N, …] -> [num_chunks, B, size, …]
        x = jnp.pad(x, [(0, 0), (0, size * num_chunks - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, num_chunks, size, *x.shape[2:]), 1, 0)

    @jax.checkpoint  # the backward pass recomputes the logits of a chunk
    def add_chunk(total: jax.Array, arrays: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        student_x, teacher_x, weights = arrays
        student_x, teacher_x = (
            dataclasses.replace(s, features=x).logits() for s, x in ((student, student_x), (teacher, teacher_x))
        )
        return total + (softened(student_x, teacher_x, temperature) * weights).sum(), None

    chunks = split(student.features), split(teacher.features), split(weights)
    return jax.lax.scan(add_chunk, jnp.zeros((), jnp.float32), chunks)[0]


def label_loss(
    student: ClassifierOutput, teacher: ClassifierOutput, batch: Batch, temperature: float, chunk: int
) -> jax.Array:
    """Computes the soft-target loss of `Classify` heads, summed over rows.

    Multi-label losses are means over labels. Regression uses the squared difference of the outputs.
    """
    del chunk
    student_logits, teacher_logits = student.logits, teacher.logits
    if student.kind in ("single", "choice"):
        losses = softened(student_logits, teacher_logits, temperature)
    elif student.kind == "multi":  # each label is a two-class problem with logits ±x / 2
        losses = softened(
            *(jnp.stack([x / 2, -x / 2], axis=-1) for x in (student_logits, teacher_logits)), temperature
        ).mean(-1)
    else:
        losses = jnp.square(student_logits - teacher_logits).mean(-1)
    return (losses * non_empty_rows(batch)).sum()


def pair_loss(student: jax.Array, teacher: jax.Array, batch: Batch, temperature: float, chunk: int) -> jax.Array:
    """Computes the soft-target loss of sentence-pair heads, summed over rows; logits are [B, 2]."""
    del chunk
    return (softened(student, teacher, temperature) * non_empty_rows(batch)).sum()


def tag_loss(student: TaggerOutput, teacher: TaggerOutput, batch: Batch, temperature: float, chunk: int) -> jax.Array:
    """Computes the soft-target loss of `Tag` heads, summed over the words of a batch.

    With a CRF (conditional random field), the loss compares the marginal probabilities of the tags at `temperature`.
    """
    del chunk
    real = real_words(batch)

    def log_marginals(output: TaggerOutput) -> jax.Array:  # -> [B, W, L]
        logits = output.logits / temperature
        if output.transitions is None:
            return jax.nn.log_softmax(logits, axis=-1)
        marginals = chain.marginals(logits, real, jax.tree.map(lambda x: x / temperature, output.transitions))
        return jnp.log(jnp.maximum(marginals, _MIN_PROBABILITY))

    return (temperature**2 * jnp.where(real, divergence(log_marginals(student), log_marginals(teacher)), 0.0)).sum()


def span_loss(
    student: ExtractorOutput, teacher: ExtractorOutput, batch: Batch, temperature: float, chunk: int
) -> jax.Array:
    """Computes the soft-target loss of `Extract` heads, summed over rows.

    The loss of a row is the mean of the losses for the first and for the last token of the answer.
    """
    del chunk
    # [B, T, 2] -> [B, 2, T]
    student_logits, teacher_logits = (output.logits.swapaxes(1, 2) for output in (student, teacher))
    return (softened(student_logits, teacher_logits, temperature).mean(1) * non_empty_rows(batch)).sum()


def retrieval_loss(
    student: EmbedOutput, teacher: EmbedOutput, batch: Batch, temperature: float, chunk: int
) -> jax.Array:
    """Computes the soft-target loss of `Embed` heads, summed over queries.

    The softmax is over the passages of the batch, so the embeddings of student and teacher may differ in width.
    """
    del chunk
    student_logits, teacher_logits = (
        scores(output, batch).reshape(len(output.vectors), -1) for output in (student, teacher)
    )
    return jnp.where(batch["texts"] > 0, softened(student_logits, teacher_logits, temperature), 0.0).sum()


# Soft-target losses by head name: functions of (student output, teacher output, batch, temperature, chunk). Each loss
# is a sum whose denominator is the `count` of the head.
SOFT_TARGETS: dict[str, Callable[..., jax.Array]] = {
    "lm": token_loss,
    "pair": pair_loss,
    "classify": label_loss,
    "tag": tag_loss,
    "extract": span_loss,
    "embed": retrieval_loss,
}
