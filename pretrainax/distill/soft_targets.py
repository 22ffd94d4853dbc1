"""Soft targets: how far the answers of a student's heads are from those of a teacher (Hinton et al. 2015)."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pretrainax.data.batch import Batch
from pretrainax.distill.distances import divergence
from pretrainax.models.heads import chain
from pretrainax.models.heads.base import rows_with_text
from pretrainax.models.heads.classify import ClassifierOutput
from pretrainax.models.heads.embed import EmbedOutput, scores
from pretrainax.models.heads.extract import ExtractorOutput
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.heads.tag import TaggerOutput, real_words
from pretrainax.sharding.axes import BATCH_AXES
from pretrainax.sharding.mesh import axis_size

_LEAST = 1e-30  # of a marginal, so that its logarithm is finite


def softened(student: jax.Array, teacher: jax.Array, temperature: float) -> jax.Array:
    """Returns T² · KL(teacher || student) of softmax(logits / T), […, V] -> […] float32."""
    logs = [jax.nn.log_softmax(logits / temperature, axis=-1) for logits in (student, teacher)]
    return temperature**2 * divergence(*logs)


def of_tokens(
    student: LanguageModelOutput, teacher: LanguageModelOutput, batch: Batch, temperature: float, chunk: int
) -> jax.Array:
    """Returns the sum over the targets of a batch, by their weights. Logits exist for some tokens at a time.

    chunk: tokens of a device.
    """
    weights = batch["loss_weights"]  # [B, N]
    rows, length = weights.shape
    pieces = math.ceil(length / max(chunk * axis_size(BATCH_AXES) // rows, 1))
    step = math.ceil(length / pieces)

    def cut(x: jax.Array) -> jax.Array:  # [B, N, …] -> [pieces, B, step, …]
        x = jnp.pad(x, [(0, 0), (0, step * pieces - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, pieces, step, *x.shape[2:]), 1, 0)

    @jax.checkpoint  # so that the backward makes the logits of a piece again
    def add(total: jax.Array, piece: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        ours, theirs, weights = piece
        ours, theirs = (dataclasses.replace(s, features=x).logits() for s, x in ((student, ours), (teacher, theirs)))
        return total + (softened(ours, theirs, temperature) * weights).sum(), None

    cuts = cut(student.features), cut(teacher.features), cut(weights)
    return jax.lax.scan(add, jnp.zeros((), jnp.float32), cuts)[0]


def of_labels(
    student: ClassifierOutput, teacher: ClassifierOutput, batch: Batch, temperature: float, chunk: int
) -> jax.Array:
    """Returns the sum over the rows: of one label of several, or a choice, of each by itself, or squares of numbers."""
    del chunk
    ours, theirs = student.logits, teacher.logits
    if student.kind in ("single", "choice"):
        found = softened(ours, theirs, temperature)
    elif student.kind == "multi":  # a label and its absence are two classes of logits ±x / 2
        found = softened(*(jnp.stack([x / 2, -x / 2], axis=-1) for x in (ours, theirs)), temperature).mean(-1)
    else:
        found = jnp.square(ours - theirs).mean(-1)
    return (found * rows_with_text(batch)).sum()


def of_pairs(student: jax.Array, teacher: jax.Array, batch: Batch, temperature: float, chunk: int) -> jax.Array:
    """Returns the sum over the rows, of logits [B, 2]."""
    del chunk
    return (softened(student, teacher, temperature) * rows_with_text(batch)).sum()


def of_words(student: TaggerOutput, teacher: TaggerOutput, batch: Batch, temperature: float, chunk: int) -> jax.Array:
    """Returns the sum over the words of a batch; a chain's answer for a word is the marginal of its softened tags."""
    del chunk
    real = real_words(batch)

    def logs(said: TaggerOutput) -> jax.Array:  # -> [B, W, L]
        logits = said.logits / temperature
        if said.transitions is None:
            return jax.nn.log_softmax(logits, axis=-1)
        chances = chain.marginals(logits, real, jax.tree.map(lambda x: x / temperature, said.transitions))
        return jnp.log(jnp.maximum(chances, _LEAST))

    return (temperature**2 * jnp.where(real, divergence(logs(student), logs(teacher)), 0.0)).sum()


def of_spans(
    student: ExtractorOutput, teacher: ExtractorOutput, batch: Batch, temperature: float, chunk: int
) -> jax.Array:
    """Returns the sum over the rows, of each the mean of the begin and the end of an answer."""
    del chunk
    ours, theirs = (said.logits.swapaxes(1, 2) for said in (student, teacher))  # [B, T, 2] -> [B, 2, T]
    return (softened(ours, theirs, temperature).mean(1) * rows_with_text(batch)).sum()


def of_passages(student: EmbedOutput, teacher: EmbedOutput, batch: Batch, temperature: float, chunk: int) -> jax.Array:
    """Returns the sum over the queries, whose classes are the passages of the batch: vectors may differ in width."""
    del chunk
    ours, theirs = (scores(said, batch).reshape(len(said.vectors), -1) for said in (student, teacher))
    return jnp.where(batch["texts"] > 0, softened(ours, theirs, temperature), 0.0).sum()


# Name of a head -> (student's output, teacher's, batch, temperature, chunk) -> sum over what the head's `count` counts
SOFT_TARGETS: dict[str, Callable[..., jax.Array]] = {
    "lm": of_tokens,
    "pair": of_pairs,
    "classify": of_labels,
    "tag": of_words,
    "extract": of_spans,
    "embed": of_passages,
}
