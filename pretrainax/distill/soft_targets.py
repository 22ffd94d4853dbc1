"""Soft targets: how far the answers of a student's heads are from those of a teacher (Hinton et al. 2015)."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pretrainax.data.batch import Batch
from pretrainax.distill.distances import divergence
from pretrainax.models.heads.classify import ClassifierOutput
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.sharding.axes import BATCH_AXES
from pretrainax.sharding.mesh import axis_size


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
    """Returns the sum over the rows: of one label of several, of each by itself, or of numbers their squares."""
    del chunk
    ours, theirs = student.logits, teacher.logits
    if student.kind == "single":
        found = softened(ours, theirs, temperature)
    elif student.kind == "multi":  # a label and its absence are two classes of logits ±x / 2
        found = softened(*(jnp.stack([x / 2, -x / 2], axis=-1) for x in (ours, theirs)), temperature).mean(-1)
    else:
        found = jnp.square(ours - theirs).mean(-1)
    return (found * _rows(batch)).sum()


def of_pairs(student: jax.Array, teacher: jax.Array, batch: Batch, temperature: float, chunk: int) -> jax.Array:
    """Returns the sum over the rows, of logits [B, 2]."""
    del chunk
    return (softened(student, teacher, temperature) * _rows(batch)).sum()


def _rows(batch: Batch) -> jax.Array:
    """Returns 1 for each row that is not all padding, [B] float32."""
    return (batch["segment_ids"][:, 0] > 0).astype(jnp.float32)


# Name of a head -> (student's output, teacher's, batch, temperature, chunk) -> sum over what the head's `count` counts
SOFT_TARGETS: dict[str, Callable[..., jax.Array]] = {"lm": of_tokens, "pair": of_pairs, "classify": of_labels}
