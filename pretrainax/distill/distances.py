"""Distances of a student's states from a teacher's, a number for each token."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pretrainax.layers.attention_mask import FORBIDDEN


def squares(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Returns the mean square of the difference over the width, [B, T, D] -> [B, T] float32."""
    return jnp.square(student.astype(jnp.float32) - teacher.astype(jnp.float32)).mean(-1)


def cosine(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Returns 1 - cosine of states, [B, T, D] -> [B, T] float32."""
    student, teacher = student.astype(jnp.float32), teacher.astype(jnp.float32)
    product = (student * teacher).sum(-1)
    lengths = jnp.square(student).sum(-1) * jnp.square(teacher).sum(-1)
    return 1.0 - product * jax.lax.rsqrt(jnp.maximum(lengths, 1e-12))


def attention_squares(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Returns the mean square of the difference of logits over heads and the keys that a query sees.

    [B, G, R, T, S] -> [B, T] float32 (Jiao et al. 2020, arXiv 1909.10351, equation 7).
    """
    seen = (student > FORBIDDEN) & (teacher > FORBIDDEN)
    difference = jnp.where(seen, student, 0.0) - jnp.where(seen, teacher, 0.0)
    keys = jnp.maximum(seen.sum(-1, dtype=jnp.float32), 1.0)
    return (jnp.square(difference).sum(-1) / keys).mean((1, 2))


def relations(student: jax.Array, teacher: jax.Array, heads: int, seen: jax.Array) -> jax.Array:
    """Returns KL(teacher || student) of the relations among vectors of one kind, the mean over relation heads.

    A relation is softmax(x xᵀ / sqrt(width)) of a part of the vectors (Wang et al. 2021, arXiv 2012.15828, 3.1).

    Args:
      student: [B, T, H, K] of its queries, keys or values; teacher: likewise, of any heads and width.
      heads: parts that the vectors, heads side by side, are cut into.
      seen: [B, T, T] bool, which tokens a token is related to.

    Returns:
      [B, T] float32.
    """

    def logs(x: jax.Array) -> jax.Array:  # -> [B, A, T, T]
        x = x.reshape(*x.shape[:2], heads, -1)
        products = jnp.einsum("BTAK,BSAK->BATS", x, x, preferred_element_type=jnp.float32) * x.shape[-1] ** -0.5
        return jax.nn.log_softmax(jnp.where(seen[:, None], products, FORBIDDEN), axis=-1)

    return divergence(logs(student), logs(teacher)).mean(1)


def over_layers(
    distance: Callable[[jax.Array, jax.Array], jax.Array], student: jax.Array, teacher: jax.Array
) -> jax.Array:
    """Returns the sum of a distance over layers, [M, B, …] and [N, B, …] -> [B, T]: of N each m · N / M, m from 1."""
    step = len(teacher) // len(student)
    return jax.vmap(distance)(student, teacher[step - 1 :: step]).sum(0)


def divergence(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Returns KL(teacher || student) of log-probabilities over the last axis, […, V] -> […] float32."""
    probabilities = jnp.exp(teacher)
    return jnp.where(probabilities > 0, probabilities * (teacher - student), 0.0).sum(-1)
