"""Computes distances between the states of a student and of a teacher, one value per token."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pretrainax.layers.attention_mask import FORBIDDEN


def squares(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Computes the mean squared difference between two states over the width D, [B, T, D] -> [B, T] float32."""
    return jnp.square(student.astype(jnp.float32) - teacher.astype(jnp.float32)).mean(-1)


def cosine(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Computes the cosine distance (1 - cosine similarity) between two states, [B, T, D] -> [B, T] float32."""
    student, teacher = student.astype(jnp.float32), teacher.astype(jnp.float32)
    product = (student * teacher).sum(-1)
    lengths = jnp.square(student).sum(-1) * jnp.square(teacher).sum(-1)
    return 1.0 - product * jax.lax.rsqrt(jnp.maximum(lengths, 1e-12))


def attention_squares(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Computes the mean squared difference of attention logits, over heads and over the keys visible to each query.

    [B, G, R, T, S] -> [B, T] float32 (Jiao et al. 2020, arXiv 1909.10351, equation 7).
    """
    visible = (student > FORBIDDEN) & (teacher > FORBIDDEN)
    difference = jnp.where(visible, student, 0.0) - jnp.where(visible, teacher, 0.0)
    keys = jnp.maximum(visible.sum(-1, dtype=jnp.float32), 1.0)
    return (jnp.square(difference).sum(-1) / keys).mean((1, 2))


def relations(student: jax.Array, teacher: jax.Array, heads: int, seen: jax.Array) -> jax.Array:
    """Computes KL(teacher || student) of the self-attention relations of queries, keys or values, averaged over heads.

    A relation head is a slice x of the concatenated attention heads. Its relations are softmax(x xᵀ / sqrt(width))
    (Wang et al. 2021, arXiv 2012.15828, section 3.1).

    Args:
      student: [B, T, H, K], queries, keys or values of the student.
      teacher: the queries, keys or values of the teacher; H and K may differ from the student.
      heads: number of relation heads.
      seen: [B, T, T] bool, True if a token (axis 1) attends to another token (axis 2).

    Returns:
      [B, T] float32.
    """

    def log_relations(x: jax.Array) -> jax.Array:  # -> [B, A, T, T]
        x = x.reshape(*x.shape[:2], heads, -1)
        products = jnp.einsum("BTAK,BSAK->BATS", x, x, preferred_element_type=jnp.float32) * x.shape[-1] ** -0.5
        return jax.nn.log_softmax(jnp.where(seen[:, None], products, FORBIDDEN), axis=-1)

    return divergence(log_relations(student), log_relations(teacher)).mean(1)


def over_layers(
    distance: Callable[[jax.Array, jax.Array], jax.Array], student: jax.Array, teacher: jax.Array
) -> jax.Array:
    """Sums a distance over the layers of the student, [M, B, …] and [N, B, …] -> [B, T].

    The student has M layers and the teacher has N. Student layer m, counted from 1, is compared with teacher layer
    m · N / M.
    """
    step = len(teacher) // len(student)
    return jax.vmap(distance)(student, teacher[step - 1 :: step]).sum(0)


def divergence(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Computes KL(teacher || student) over the last axis, from log-probabilities, […, V] -> […] float32."""
    probabilities = jnp.exp(teacher)
    return jnp.where(probabilities > 0, probabilities * (teacher - student), 0.0).sum(-1)
