"""Beam search: the likeliest texts that can be found with K beams a prompt, best first.

The K unfinished texts of a prompt that are most likely go on. A finished one is worth the sum of its log-probabilities
over its length to the power of `length_penalty` (Wu et al. 2016, arXiv 1609.08144, section 7, in the simple form that
is used everywhere); the K best are kept. A prompt is done when K are finished and the best unfinished one would, at its
length of now, be worth less than the worst of them: transformers' `early_stopping=False`, token for token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pretrainax.data.batch import Batch
from pretrainax.inference.sampling import History, Rules, history_of, limited
from pretrainax.inference.stepper import State, Stepper
from pretrainax.sharding.param_paths import PyTree

_NEVER = -1e9  # score of a beam that is not there yet: below any that is


class Texts(NamedTuple):
    """Holds K texts of each of B prompts, with room for N tokens."""

    tokens: jax.Array  # [B, K, N]
    log_probs: jax.Array  # [B, K, N] float32, of each token under the model itself
    scores: jax.Array  # [B, K] what they are worth
    lengths: jax.Array  # [B, K] tokens; 0: there is no text here

    def take(self, places: jax.Array) -> "Texts":
        """Returns those at places [B, K'] among the texts of each prompt."""
        pick = lambda x: jnp.take_along_axis(x, places.reshape(places.shape + (1,) * (x.ndim - 2)), axis=1)  # noqa: E731
        return jax.tree.map(pick, self)


class Beams(NamedTuple):
    """Holds the search as it stands; `ended` tells prompts of which nothing better will be found."""

    state: State  # of B · K rows
    history: History
    limits: jax.Array  # [B] tokens that a text may have
    count: jax.Array  # [] tokens of the running texts
    running: Texts
    finished: Texts  # best first
    ended: jax.Array  # [B] bool


def begin(
    stepper: Stepper,
    params: PyTree,
    batch: Batch,
    rules: Rules,
    length_penalty: float,
    limits: jax.Array,
    *,
    beams: int,
    room: int,
) -> Beams:
    """Reads prompts [B, T] and writes the first token of each of K = `beams` texts. limits: [B], at most `room`."""
    logits, state = stepper.start(params, batch, room)
    count = len(logits)
    rows = jnp.repeat(jnp.arange(count), beams)
    history = history_of(batch["tokens"], batch["segment_ids"] > 0, rules).take(rows)
    tokens, lengths = jnp.zeros((count, beams, room), jnp.int32), jnp.zeros((count, beams), jnp.int32)
    scores = jnp.full((count, beams), _NEVER)
    none = Texts(tokens, jnp.zeros(tokens.shape), scores, lengths)
    one = none._replace(scores=scores.at[:, 0].set(0.0))  # the beams of a prompt are all the same yet
    search = Beams(stepper.take(state, rows), history, limits, jnp.zeros((), jnp.int32), one, none, limits <= 0)
    return _extend(stepper, search, logits[rows], rules, length_penalty)


def go_on(stepper: Stepper, params: PyTree, search: Beams, rules: Rules, length_penalty: float, most: int) -> Beams:
    """Writes up to `most` tokens more of each running text."""
    until = search.count + most

    def step(search: Beams) -> Beams:
        last = jax.lax.dynamic_index_in_dim(search.running.tokens, search.count - 1, axis=2, keepdims=False)
        logits, state = stepper.step(params, search.state, last.reshape(-1))
        return _extend(stepper, search._replace(state=state), logits, rules, length_penalty)

    return jax.lax.while_loop(lambda s: (s.count < until) & ~jnp.all(s.ended), step, search)


def _extend(stepper: Stepper, search: Beams, logits: jax.Array, rules: Rules, length_penalty: float) -> Beams:
    """Writes a token more of each text: of all continuations of a prompt's beams the best run on, or are finished."""
    prompts, beams = search.running.scores.shape
    parents, candidates = _candidates(search, logits, rules)  # [B, 2K]: as many go on, should K of them end here
    new = jnp.take_along_axis(candidates.tokens, (candidates.lengths - 1)[..., None], axis=-1)[..., 0]
    ends = (new == rules.end) | (candidates.lengths >= search.limits[:, None])

    worth = candidates.scores / candidates.lengths.astype(jnp.float32) ** length_penalty
    counts = ends & (jnp.arange(2 * beams) < beams)[None] & (candidates.scores > _NEVER / 2) & ~search.ended[:, None]
    done = candidates._replace(
        scores=jnp.where(counts, worth, -jnp.inf), lengths=jnp.where(counts, candidates.lengths, 0)
    )
    both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), search.finished, done)
    finished = both.take(jax.lax.top_k(both.scores, beams)[1])

    unfinished = candidates._replace(scores=candidates.scores + jnp.where(ends, _NEVER, 0.0))
    best = jax.lax.top_k(unfinished.scores, beams)[1]  # [B, K]
    running = unfinished.take(best)
    rows = jnp.arange(prompts)[:, None] * beams + jnp.take_along_axis(parents, best, axis=1)
    rows, tokens = rows.reshape(-1), jnp.take_along_axis(new, best, axis=1).reshape(-1)

    count = search.count + 1
    hope = running.scores[:, 0] / count.astype(jnp.float32) ** length_penalty
    is_full = jnp.all(finished.lengths > 0, axis=1)
    beaten = is_full & (hope <= finished.scores[:, -1])
    return Beams(
        stepper.take(search.state, rows),
        search.history.take(rows).after(tokens, rules),
        search.limits,
        count,
        running,
        finished,
        search.ended | beaten | (count >= search.limits),
    )


def _candidates(search: Beams, logits: jax.Array, rules: Rules) -> tuple[jax.Array, Texts]:
    """Returns the 2K likeliest texts of one token more, best first, and which beam each goes on from, [B, 2K]."""
    prompts, beams = search.running.scores.shape
    flat = lambda x: x.reshape(prompts, -1)  # [B · K, V] -> [B, K · V]  # noqa: E731
    log_probs = jax.nn.log_softmax(logits)
    total = flat(limited(log_probs, rules, search.history)) + jnp.repeat(
        search.running.scores, logits.shape[-1], axis=1
    )
    scores, places = jax.lax.top_k(total, 2 * beams)
    parents, tokens = jnp.divmod(places, logits.shape[-1])
    texts = search.running.take(parents)
    at = search.count
    return parents, Texts(
        texts.tokens.at[:, :, at].set(tokens),
        texts.log_probs.at[:, :, at].set(jnp.take_along_axis(flat(log_probs), places, axis=1)),
        scores,
        jnp.full_like(texts.lengths, at + 1),
    )
