"""A linear-chain conditional random field over the tags of a row (Lafferty et al. 2001).

The score of tags y of a row with n words is start[y_1] + sum_t emissions[t, y_t] + sum_t between[y_(t-1), y_t] +
end[y_n], and p(y) = exp(score(y)) / exp(log_partition). All arrays are float32. Padding follows the words of a row.
"""

from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp


class Transitions(NamedTuple):
    """Transition scores between tags, independent of the words."""

    between: jax.Array  # [L, L]: score of the row's tag before the column's tag
    start: jax.Array  # [L]: score of the first tag
    end: jax.Array  # [L]: score of the last tag


def score(emissions: jax.Array, tags: jax.Array, real: jax.Array, transitions: Transitions) -> jax.Array:
    """Returns the score of the tags of each row, [B].

    Args:
      emissions: [B, W, L] float32, scores of each tag at each word.
      tags: [B, W] int32.
      real: [B, W] bool, True for the words, the first n positions of each row.
    """
    word_scores = jnp.take_along_axis(emissions, tags[..., None], axis=2).squeeze(2)  # [B, W, L] -> [B, W]
    pair_scores = transitions.between[tags[:, :-1], tags[:, 1:]]  # [B, W - 1]
    last = jnp.maximum(real.sum(1) - 1, 0)  # [B]
    ends = transitions.start[tags[:, 0]] + transitions.end[jnp.take_along_axis(tags, last[:, None], axis=1)[:, 0]]
    inside = jnp.where(real, word_scores, 0.0).sum(1) + jnp.where(real[:, 1:], pair_scores, 0.0).sum(1)
    return jnp.where(real[:, 0], inside + ends, 0.0)


def log_partition(emissions: jax.Array, real: jax.Array, transitions: Transitions) -> jax.Array:
    """Returns the log of the sum of exp(score) over all tag sequences of each row, [B]; 0 for a row without words.

    Uses the forward algorithm.
    """

    def step(forward, inputs):  # forward: [B, L], log of the sum over all tag prefixes that end in each tag
        emission, is_real = inputs
        following = jax.nn.logsumexp(forward[:, :, None] + transitions.between[None], axis=1) + emission
        return jnp.where(is_real[:, None], following, forward), None

    first, *rest = transitions.start[None] + emissions[:, 0], emissions[:, 1:].swapaxes(0, 1), real[:, 1:].T
    forward, _ = jax.lax.scan(step, first, tuple(rest))
    return jnp.where(real[:, 0], jax.nn.logsumexp(forward + transitions.end[None], axis=1), 0.0)


def marginals(emissions: jax.Array, real: jax.Array, transitions: Transitions) -> jax.Array:
    """Returns the probability of each tag at each word, [B, W, L], the gradient of `log_partition`; 0 in padding."""
    return jax.grad(lambda x: log_partition(x, real, transitions).sum())(emissions)


def best_tags(
    emissions: jax.Array, real: jax.Array, transitions: Transitions, allowed: Optional[jax.Array] = None
) -> jax.Array:
    """Returns the highest-scoring tags of each row, [B, W] int32, by the Viterbi algorithm; 0 in padding.

    Args:
      allowed: [L + 1, L] bool, True if the column's tag may follow the row's tag; the last row is for the first word.
        None: no constraints.
    """
    between, start, end = transitions
    if allowed is not None:
        between, start = jnp.where(allowed[:-1], between, -jnp.inf), jnp.where(allowed[-1], start, -jnp.inf)
    stay = jnp.arange(emissions.shape[2])[None]  # [1, L]

    def step(best, inputs):  # best: [B, L], the highest score of a tag prefix that ends in each tag
        emission, is_real = inputs
        scores = best[:, :, None] + between[None]  # [B, L before, L]
        following = jnp.where(is_real[:, None], scores.max(1) + emission, best)
        return following, jnp.where(is_real[:, None], scores.argmax(1), stay)

    rest = emissions[:, 1:].swapaxes(0, 1), real[:, 1:].T
    best, before = jax.lax.scan(step, start[None] + emissions[:, 0], rest)
    last = (best + end[None]).argmax(1)  # [B]

    def back(tag, before):
        tag_before = jnp.take_along_axis(before, tag[:, None], axis=1)[:, 0]
        return tag_before, tag

    first, rest = jax.lax.scan(back, last, before, reverse=True)
    return jnp.where(real, jnp.concatenate([first[None], rest]).T, 0).astype(jnp.int32)  # [W, B] -> [B, W]
