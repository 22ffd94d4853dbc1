"""Generates tokens on the device in chunks, one token at a time and independently for each row.

`begin` reads the prompts and generates the first token of each row. `go_on` generates a chunk of tokens in one device
call, so that the host overhead is small even for short steps. Rows that have ended do not change. A chunk stops early
if all rows have ended.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pretrainax.data.batch import Batch
from pretrainax.inference.sampling import History, Rules, choose, history_of, processed_logits
from pretrainax.inference.stepper import State, Stepper
from pretrainax.sharding.param_paths import PyTree


class GenerationState(NamedTuple):
    """The state of the generation of R rows, with room for N tokens per row."""

    state: State
    history: History
    keys: jax.Array  # [R] random keys
    limits: jax.Array  # [R] maximum number of tokens of each row
    count: jax.Array  # [] number of generated tokens of each row that has not ended
    tokens: jax.Array  # [R, N] generated tokens
    log_probs: jax.Array  # [R, N] float32, of each token, from the logits of the model before penalties
    lengths: jax.Array  # [R] number of generated tokens of each row
    ended: jax.Array  # [R] bool


def begin(
    stepper: Stepper,
    params: PyTree,
    batch: Batch,
    rules: Rules,
    keys: jax.Array,
    limits: jax.Array,
    *,
    copies: int,
    room: int,
) -> GenerationState:
    """Reads prompts [B, T] and generates the first token of R = B · `copies` rows.

    Args:
      keys, limits: random key and maximum number of tokens of each row, [R].
      copies: number of rows per prompt; they are adjacent.
      room: N, at least the maximum of `limits`.
    """
    logits, state = stepper.start(params, batch, room)
    history = history_of(batch["tokens"], batch["segment_ids"] > 0, rules)
    if copies > 1:
        rows = jnp.repeat(jnp.arange(len(logits)), copies)
        logits, state, history = logits[rows], stepper.take(state, rows), history.take(rows)
    count, lengths = jnp.zeros((), jnp.int32), jnp.zeros_like(limits)
    tokens = jnp.zeros((len(logits), room), jnp.int32)
    empty = GenerationState(state, history, keys, limits, count, tokens, jnp.zeros(tokens.shape), lengths, limits <= 0)
    return _write(empty, logits, rules)


def go_on(stepper: Stepper, params: PyTree, written: GenerationState, rules: Rules, most: int) -> GenerationState:
    """Generates up to `most` more tokens for each row that has not ended."""
    until = written.count + most

    def step(written: GenerationState) -> GenerationState:
        last = jax.lax.dynamic_index_in_dim(written.tokens, written.count - 1, axis=1, keepdims=False)  # [R]
        logits, state = stepper.step(params, written.state, last)
        return _write(written._replace(state=state), logits, rules)

    return jax.lax.while_loop(lambda w: (w.count < until) & ~jnp.all(w.ended), step, written)


def _write(written: GenerationState, logits: jax.Array, rules: Rules) -> GenerationState:
    """Selects the next token from `logits` [R, V] and appends it to each row that has not ended.

    Rows end at the end token, at their limit, or if no token is allowed.
    """
    position, ended = written.count, written.ended
    if rules.automata:
        ended |= jnp.all(processed_logits(logits, rules, written.history) == -jnp.inf, axis=-1)
    tokens = jnp.where(ended, 0, choose(logits, rules, written.history, written.keys, position))
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=-1)[:, 0]
    lengths = written.lengths + ~ended
    return written._replace(
        history=written.history.after(tokens, rules),
        count=position + 1,
        tokens=written.tokens.at[:, position].set(tokens),
        log_probs=written.log_probs.at[:, position].set(jnp.where(ended, 0.0, log_probs)),
        lengths=lengths,
        ended=ended | (tokens == rules.end) | (lengths >= written.limits),
    )
