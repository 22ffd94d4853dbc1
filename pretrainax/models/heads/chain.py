"""A linear-chain conditional random field: the tags of a row as a whole (Lafferty et al. 2001).

The score of tags y of a row with n words is start[y_1] + sum_t emissions[t, y_t] + sum_t between[y_(t-1), y_t] +
end[y_n], and p(y) = exp(score(y)) / exp(log_partition). All is float32. Rows are padded behind their words.
"""

from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp


class Transitions(NamedTuple):
    """Holds what tags score beside each other, whatever the words."""

    between: jax.Array  # [L, L]: of a tag, the row, before another
    start: jax.Array  # [L]: as the first
    end: jax.Array  # [L]: as the last


def score(emissions: jax.Array, tags: jax.Array, real: jax.Array, transitions: Transitions) -> jax.Array:
    """Returns the score of the tags of each row, [B].

    Args:
      emissions: [B, W, L] float32, of each tag at each word.
      tags: [B, W] int32.
      real: [B, W] bool, where there is a word: the first n of each row.
    """
    of_words = jnp.take_along_axis(emissions, tags[..., None], axis=2).squeeze(2)  # [B, W, L] -> [B, W]
    of_pairs = transitions.between[tags[:, :-1], tags[:, 1:]]  # [B, W - 1]
    last = jnp.maximum(real.sum(1) - 1, 0)  # [B]
    ends = transitions.start[tags[:, 0]] + transitions.end[jnp.take_along_axis(tags, last[:, None], axis=1)[:, 0]]
    inside = jnp.where(real, of_words, 0.0).sum(1) + jnp.where(real[:, 1:], of_pairs, 0.0).sum(1)
    return jnp.where(real[:, 0], inside + ends, 0.0)


def log_partition(emissions: jax.Array, real: jax.Array, transitions: Transitions) -> jax.Array:
    """Returns the logarithm of the sum of exp(score) over all tags of each row, [B], by the forward algorithm; of a row
    without words 0."""

    def step(forward, at):  # forward: [B, L], log of the sum over all tags of the words before that end in each
        emission, is_real = at
        following = jax.nn.logsumexp(forward[:, :, None] + transitions.between[None], axis=1) + emission
        return jnp.where(is_real[:, None], following, forward), None

    first, *rest = transitions.start[None] + emissions[:, 0], emissions[:, 1:].swapaxes(0, 1), real[:, 1:].T
    forward, _ = jax.lax.scan(step, first, tuple(rest))
    return jnp.where(real[:, 0], jax.nn.logsumexp(forward + transitions.end[None], axis=1), 0.0)


def marginals(emissions: jax.Array, real: jax.Array, transitions: Transitions) -> jax.Array:
    """Returns the probability of each tag at each word, [B, W, L]: the gradient of the log-partition; 0 in padding."""
    return jax.grad(lambda x: log_partition(x, real, transitions).sum())(emissions)


def best_tags(
    emissions: jax.Array, real: jax.Array, transitions: Transitions, allowed: Optional[jax.Array] = None
) -> jax.Array:
    """Returns the tags with the highest score of each row, [B, W] int32, by Viterbi's algorithm; 0 in padding.

    Args:
      allowed: [L + 1, L] bool, whether a tag may come after another, in the last row as the first; None: all may.
    """
    between, start, end = transitions
    if allowed is not None:
        between, start = jnp.where(allowed[:-1], between, -jnp.inf), jnp.where(allowed[-1], start, -jnp.inf)
    stay = jnp.arange(emissions.shape[2])[None]  # [1, L]

    def step(best, at):  # best: [B, L], the highest score of tags that end in each
        emission, is_real = at
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
