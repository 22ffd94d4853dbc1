"""Implements a linear-chain conditional random field (CRF) over the tags of a row (Lafferty et al. 2001).

The score of the tags y of a row with n words is start[y_1] + sum_t emissions[t, y_t] + sum_t between[y_(t-1), y_t] +
end[y_n], and the probability is p(y) = exp(score(y)) / exp(log_partition). Scores are float32. The words of a row come
first, then the padding. B is the number of rows, W the number of word positions, and L the number of tags.
"""

from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp


class Transitions(NamedTuple):
    """The transition scores, which depend only on the tags and not on the words."""

    between: jax.Array  # [L, L]: [i, j] is the score of tag j directly after tag i
    start: jax.Array  # [L]: score of the first tag
    end: jax.Array  # [L]: score of the last tag


def score(emissions: jax.Array, tags: jax.Array, real: jax.Array, transitions: Transitions) -> jax.Array:
    """Computes the score [B] of each row's tags; the score of a row without words is 0.

    Args:
      emissions: [B, W, L] float32, the score of each tag for each word.
      tags: [B, W] int32.
      real: [B, W] bool, True for words, which occupy the first positions of each row; False for padding.
    """
    word_scores = jnp.take_along_axis(emissions, tags[..., None], axis=2).squeeze(2)  # [B, W, L] -> [B, W]
    pair_scores = transitions.between[tags[:, :-1], tags[:, 1:]]  # [B, W - 1]
    last = jnp.maximum(real.sum(1) - 1, 0)  # [B]
    boundary_scores = (
        transitions.start[tags[:, 0]] + transitions.end[jnp.take_along_axis(tags, last[:, None], axis=1)[:, 0]]
    )
    inner_scores = jnp.where(real, word_scores, 0.0).sum(1) + jnp.where(real[:, 1:], pair_scores, 0.0).sum(1)
    return jnp.where(real[:, 0], inner_scores + boundary_scores, 0.0)


def log_partition(emissions: jax.Array, real: jax.Array, transitions: Transitions) -> jax.Array:
    """Computes the log of the sum of exp(score) over all tag sequences of each row, [B]; 0 for rows without words.

    Uses the forward algorithm. The arguments are as in `score`.
    """

    def step(forward, inputs):  # forward: [B, L], log of the sum over all tag prefixes that end in each tag
        emission, is_real = inputs
        next_forward = jax.nn.logsumexp(forward[:, :, None] + transitions.between[None], axis=1) + emission
        return jnp.where(is_real[:, None], next_forward, forward), None

    first, *rest = transitions.start[None] + emissions[:, 0], emissions[:, 1:].swapaxes(0, 1), real[:, 1:].T
    forward, _ = jax.lax.scan(step, first, tuple(rest))
    return jnp.where(real[:, 0], jax.nn.logsumexp(forward + transitions.end[None], axis=1), 0.0)


def marginals(emissions: jax.Array, real: jax.Array, transitions: Transitions) -> jax.Array:
    """Computes the marginal probability of each tag for each word, [B, W, L]; 0 in padding.

    The marginal probabilities are the gradient of `log_partition` with respect to the emissions.
    """
    return jax.grad(lambda x: log_partition(x, real, transitions).sum())(emissions)


def best_tags(
    emissions: jax.Array, real: jax.Array, transitions: Transitions, allowed: Optional[jax.Array] = None
) -> jax.Array:
    """Finds each row's highest-scoring tags with the Viterbi algorithm, [B, W] int32; 0 in padding.

    Args:
      emissions, real, transitions: as in `score`.
      allowed: [L + 1, L] bool. [i, j] is True if tag j may follow tag i; [L, j] is True if the first word may have tag
        j. If None, all transitions are allowed.
    """
    between, start, end = transitions
    if allowed is not None:
        between, start = jnp.where(allowed[:-1], between, -jnp.inf), jnp.where(allowed[-1], start, -jnp.inf)
    same_tag = jnp.arange(emissions.shape[2])[None]  # [1, L]

    def step(best, inputs):  # best: [B, L], the highest score of a tag prefix that ends in each tag
        emission, is_real = inputs
        scores = best[:, :, None] + between[None]  # [B, L before, L]
        next_best = jnp.where(is_real[:, None], scores.max(1) + emission, best)
        return next_best, jnp.where(is_real[:, None], scores.argmax(1), same_tag)

    rest = emissions[:, 1:].swapaxes(0, 1), real[:, 1:].T
    best, backpointers = jax.lax.scan(step, start[None] + emissions[:, 0], rest)
    last = (best + end[None]).argmax(1)  # [B]

    def backtrack(tag, backpointers):
        previous_tag = jnp.take_along_axis(backpointers, tag[:, None], axis=1)[:, 0]
        return previous_tag, tag

    first, rest = jax.lax.scan(backtrack, last, backpointers, reverse=True)
    return jnp.where(real, jnp.concatenate([first[None], rest]).T, 0).astype(jnp.int32)  # [W, B] -> [B, W]
