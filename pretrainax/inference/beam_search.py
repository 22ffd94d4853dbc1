"""Beam search with K beams per prompt; returns the K best sequences of each prompt, best first.

Each step extends the K most likely unfinished sequences of a prompt by one token. The score of a finished sequence is
its total log-probability divided by length ** `length_penalty`, a common simplification of Wu et al. 2016, arXiv
1609.08144, section 7. The search for a prompt ends when K sequences are finished and no unfinished sequence has a
higher score than the worst finished sequence. The score of an unfinished sequence is computed with its current length
or, if `Rules.stops_at_best` is set, with the maximum length if this gives a higher score. If `Rules.stops_when_full` is
set, the search ends when K sequences are finished. The three modes are transformers' `early_stopping=False`, "never"
and True; the results are equal token by token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pretrainax.data.batch import Batch
from pretrainax.inference.constraints import FORBIDDEN
from pretrainax.inference.sampling import History, Rules, history_of, processed_logits
from pretrainax.inference.stepper import State, Stepper
from pretrainax.sharding.param_paths import PyTree

_NEVER = -1e9  # score of a beam without a sequence, far below the score of any sequence


class BeamSequences(NamedTuple):
    """K sequences for each of B prompts, with at most N tokens per sequence."""

    tokens: jax.Array  # [B, K, N]
    log_probs: jax.Array  # [B, K, N] float32, from the logits of the model before penalties
    scores: jax.Array  # [B, K] total log-probability; for finished sequences, divided by length ** length_penalty
    lengths: jax.Array  # [B, K] number of tokens; 0: no sequence

    def take(self, places: jax.Array) -> "BeamSequences":
        """Selects each prompt's sequences at the indices `places` [B, K']."""
        select = lambda x: jnp.take_along_axis(x, places.reshape(places.shape + (1,) * (x.ndim - 2)), axis=1)  # noqa: E731
        return jax.tree.map(select, self)


class Beams(NamedTuple):
    """The search state for B prompts: K running sequences and up to K finished sequences per prompt."""

    state: State  # state of the decoder, with B · K rows
    history: History
    limits: jax.Array  # [B] maximum number of tokens per sequence
    count: jax.Array  # [] number of tokens of each running sequence
    running: BeamSequences
    finished: BeamSequences  # best first
    ended: jax.Array  # [B] bool: True for prompts whose result is final


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
    """Reads prompts [B, T] and generates the first token of K = `beams` sequences per prompt.

    Args:
      limits: [B] maximum number of tokens per sequence, for each prompt.
      room: N, the capacity of the arrays in tokens per sequence; at least the maximum of `limits`.
    """
    logits, state = stepper.start(params, batch, room)
    count = len(logits)
    rows = jnp.repeat(jnp.arange(count), beams)
    history = history_of(batch["tokens"], batch["segment_ids"] > 0, rules, limits, room).take(rows)
    tokens, lengths = jnp.zeros((count, beams, room), jnp.int32), jnp.zeros((count, beams), jnp.int32)
    scores = jnp.full((count, beams), _NEVER)
    empty = BeamSequences(tokens, jnp.zeros(tokens.shape), scores, lengths)
    running = empty._replace(scores=scores.at[:, 0].set(0.0))  # all beams of a prompt are equal, so one is enough
    search = Beams(stepper.take(state, rows), history, limits, jnp.zeros((), jnp.int32), running, empty, limits <= 0)
    return _extend(stepper, search, logits[rows], rules, length_penalty)


def generate_chunk(
    stepper: Stepper, params: PyTree, search: Beams, rules: Rules, length_penalty: float, most: int
) -> Beams:
    """Generates up to `most` additional tokens for each running sequence; stops early once all prompts are done."""
    until = search.count + most

    def step(search: Beams) -> Beams:
        last = jax.lax.dynamic_index_in_dim(search.running.tokens, search.count - 1, axis=2, keepdims=False)
        logits, state = stepper.step(params, search.state, last.reshape(-1))
        return _extend(stepper, search._replace(state=state), logits, rules, length_penalty)

    return jax.lax.while_loop(lambda s: (s.count < until) & ~jnp.all(s.ended), step, search)


def _extend(stepper: Stepper, search: Beams, logits: jax.Array, rules: Rules, length_penalty: float) -> Beams:
    """Extends the running sequences by one token; updates the K best finished sequences."""
    prompts, beams = search.running.scores.shape
    parents, candidates = _candidates(search, logits, rules)  # [B, C]
    new_tokens = jnp.take_along_axis(candidates.tokens, (candidates.lengths - 1)[..., None], axis=-1)[..., 0]
    ends = rules.is_end(new_tokens) | (candidates.lengths >= search.limits[:, None])
    if rules.stops is not None and search.history.stop_states is not None:
        states = jnp.take_along_axis(search.history.stop_states.reshape(prompts, beams), parents, axis=1)
        ends |= rules.stops.step(states, new_tokens) == FORBIDDEN

    scores = candidates.scores / candidates.lengths.astype(jnp.float32) ** length_penalty
    ended = ends & (jnp.arange(ends.shape[1]) < beams)[None] & (candidates.scores > _NEVER / 2) & ~search.ended[:, None]
    newly_finished = candidates._replace(
        scores=jnp.where(ended, scores, -jnp.inf), lengths=jnp.where(ended, candidates.lengths, 0)
    )
    all_finished = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), search.finished, newly_finished)
    finished = all_finished.take(jax.lax.top_k(all_finished.scores, beams)[1])

    unfinished = candidates._replace(scores=candidates.scores + jnp.where(ends, _NEVER, 0.0))
    best = jax.lax.top_k(unfinished.scores, beams)[1]  # [B, K]
    running = unfinished.take(best)
    parents, tokens = (jnp.take_along_axis(x, best, axis=1) for x in (parents, new_tokens))
    rows = (jnp.arange(prompts)[:, None] * beams + parents).reshape(-1)

    count = search.count + 1
    is_final = jnp.all(finished.lengths > 0, axis=1)
    if rules.stops_when_full is None:
        length = jnp.broadcast_to(count, search.limits.shape)
        if rules.stops_at_best is not None:
            length = jnp.where(jnp.asarray(length_penalty) > 0, search.limits, length)
        best_running_score = running.scores[:, 0] / length.astype(jnp.float32) ** length_penalty
        is_final &= best_running_score <= finished.scores[:, -1]
    return Beams(
        stepper.take(search.state, rows),
        search.history.take_beams(parents).after(tokens.reshape(-1), rules),
        search.limits,
        count,
        running,
        finished,
        search.ended | is_final | (count >= search.limits),
    )


def _candidates(search: Beams, logits: jax.Array, rules: Rules) -> tuple[jax.Array, BeamSequences]:
    """Returns the C most likely one-token extensions of each prompt's running sequences, best first.

    C is K · max(2, 1 + E) for E end tokens, as in transformers: K extensions remain even if all sequences end.

    Returns:
      The index [B, C] of the running sequence that each extension continues, and the extended sequences.
    """
    prompts, beams = search.running.scores.shape
    flatten = lambda x: x.reshape(prompts, -1)  # [B · K, V] -> [B, K · V]  # noqa: E731
    log_probs = jax.nn.log_softmax(logits)
    scores = processed_logits(log_probs, rules, search.history)
    if rules.renormalizes is not None:
        scores = jnp.where(scores == -jnp.inf, scores, jax.nn.log_softmax(scores))
    total = flatten(scores) + jnp.repeat(search.running.scores, logits.shape[-1], axis=1)
    scores, indices = jax.lax.top_k(total, min(max(2, 1 + len(rules.ends)) * beams, total.shape[1]))
    parents, tokens = jnp.divmod(indices, logits.shape[-1])
    parent_sequences = search.running.take(parents)
    index = search.count
    return parents, BeamSequences(
        parent_sequences.tokens.at[:, :, index].set(tokens),
        parent_sequences.log_probs.at[:, :, index].set(jnp.take_along_axis(flatten(log_probs), indices, axis=1)),
        scores,
        jnp.full_like(parent_sequences.lengths, index + 1),
    )
