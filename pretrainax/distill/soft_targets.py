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

_LEAST = 1e-30  # smallest marginal probability, so that its logarithm is finite


def softened(student: jax.Array, teacher: jax.Array, temperature: float) -> jax.Array:
    """Returns T² · KL(teacher || student) of softmax(logits / T), from logits, […, V] -> […] float32."""
    logs = [jax.nn.log_softmax(logits / temperature, axis=-1) for logits in (student, teacher)]
    return temperature**2 * divergence(*logs)


def token_loss(
    student: LanguageModelOutput, teacher: LanguageModelOutput, batch: Batch, temperature: float, chunk: int
) -> jax.Array:
    """Returns the soft-target loss of language model heads, a weighted sum over the targets of a batch.

    The sum is computed in chunks to limit the memory for logits.

    chunk: tokens per device whose logits are in memory at a time.
    """
    weights = batch["loss_weights"]  # [B, N]
    rows, length = weights.shape
    pieces = math.ceil(length / max(chunk * axis_size(BATCH_AXES) // rows, 1))
    step = math.ceil(length / pieces)

    def cut(x: jax.Array) -> jax.Array:  # [B, N, …] -> [pieces, B, step, …]
        x = jnp.pad(x, [(0, 0), (0, step * pieces - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, pieces, step, *x.shape[2:]), 1, 0)

    @jax.checkpoint  # the backward pass recomputes the logits of a chunk
    def add(total: jax.Array, piece: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        ours, theirs, weights = piece
        ours, theirs = (dataclasses.replace(s, features=x).logits() for s, x in ((student, ours), (teacher, theirs)))
        return total + (softened(ours, theirs, temperature) * weights).sum(), None

    cuts = cut(student.features), cut(teacher.features), cut(weights)
    return jax.lax.scan(add, jnp.zeros((), jnp.float32), cuts)[0]


def label_loss(
    student: ClassifierOutput, teacher: ClassifierOutput, batch: Batch, temperature: float, chunk: int
) -> jax.Array:
    """Returns the soft-target loss of `Classify` heads, summed over rows.

    Multi-label losses are means over labels. Regression uses the squared differences of the outputs.
    """
    del chunk
    ours, theirs = student.logits, teacher.logits
    if student.kind in ("single", "choice"):
        losses = softened(ours, theirs, temperature)
    elif student.kind == "multi":  # each label is a two-class problem with logits ±x / 2
        losses = softened(*(jnp.stack([x / 2, -x / 2], axis=-1) for x in (ours, theirs)), temperature).mean(-1)
    else:
        losses = jnp.square(ours - theirs).mean(-1)
    return (losses * non_empty_rows(batch)).sum()


def pair_loss(student: jax.Array, teacher: jax.Array, batch: Batch, temperature: float, chunk: int) -> jax.Array:
    """Returns the soft-target loss of heads for pairs of segments, summed over rows; logits are [B, 2]."""
    del chunk
    return (softened(student, teacher, temperature) * non_empty_rows(batch)).sum()


def tag_loss(student: TaggerOutput, teacher: TaggerOutput, batch: Batch, temperature: float, chunk: int) -> jax.Array:
    """Returns the soft-target loss of `Tag` heads, summed over the words of a batch.

    With a CRF (conditional random field), it compares the marginal probabilities of the tags, at this temperature.
    """
    del chunk
    real = real_words(batch)

    def logs(output: TaggerOutput) -> jax.Array:  # -> [B, W, L]
        logits = output.logits / temperature
        if output.transitions is None:
            return jax.nn.log_softmax(logits, axis=-1)
        marginals = chain.marginals(logits, real, jax.tree.map(lambda x: x / temperature, output.transitions))
        return jnp.log(jnp.maximum(marginals, _LEAST))

    return (temperature**2 * jnp.where(real, divergence(logs(student), logs(teacher)), 0.0)).sum()


def span_loss(
    student: ExtractorOutput, teacher: ExtractorOutput, batch: Batch, temperature: float, chunk: int
) -> jax.Array:
    """Returns the soft-target loss of `Extract` heads, summed over rows.

    The loss of a row is the mean of the losses for the first and for the last token of the answer.
    """
    del chunk
    ours, theirs = (output.logits.swapaxes(1, 2) for output in (student, teacher))  # [B, T, 2] -> [B, 2, T]
    return (softened(ours, theirs, temperature).mean(1) * non_empty_rows(batch)).sum()


def retrieval_loss(
    student: EmbedOutput, teacher: EmbedOutput, batch: Batch, temperature: float, chunk: int
) -> jax.Array:
    """Returns the soft-target loss of `Embed` heads, summed over queries.

    The classes are the passages of the batch, so the embeddings of student and teacher may differ in width.
    """
    del chunk
    ours, theirs = (scores(output, batch).reshape(len(output.vectors), -1) for output in (student, teacher))
    return jnp.where(batch["texts"] > 0, softened(ours, theirs, temperature), 0.0).sum()


# head name -> function (student output, teacher output, batch, temperature, chunk) that returns the soft-target loss,
# summed over the items that the `count` of the head counts
SOFT_TARGETS: dict[str, Callable[..., jax.Array]] = {
    "lm": token_loss,
    "pair": pair_loss,
    "classify": label_loss,
    "tag": tag_loss,
    "extract": span_loss,
    "embed": retrieval_loss,
}
