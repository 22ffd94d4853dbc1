"""Generates tokens on the device in chunks, one token at a time and independently for each row.

`begin` reads the prompts and generates the first token of each row. `generate_chunk` generates tokens in one device
call, so that the host overhead is small even if steps are short. Rows that have ended do not change. A chunk ends early
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
    """The generation state of R rows, with at most N tokens per row."""

    state: State  # state of the decoder
    history: History
    keys: jax.Array  # [R] random keys
    limits: jax.Array  # [R] maximum number of tokens of each row
    count: jax.Array  # [] number of generated tokens in each row that has not ended
    tokens: jax.Array  # [R, N] generated tokens
    log_probs: jax.Array  # [R, N] float32, log-probability of each token from the unprocessed logits of the model
    lengths: jax.Array  # [R] number of generated tokens of each row
    ended: jax.Array  # [R] bool, True for rows that have ended


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
      keys, limits: [R] random key and maximum number of tokens of each row.
      copies: number of rows per prompt; the rows of a prompt are adjacent.
      room: N, the capacity of the arrays in tokens per row; at least the maximum of `limits`.
    """
    logits, state = stepper.start(params, batch, room)
    history = history_of(batch["tokens"], batch["segment_ids"] > 0, rules, limits[::copies], room)
    if copies > 1:
        rows = jnp.repeat(jnp.arange(len(logits)), copies)
        logits, state, history = logits[rows], stepper.take(state, rows), history.take(rows)
    count, lengths = jnp.zeros((), jnp.int32), jnp.zeros_like(limits)
    tokens = jnp.zeros((len(logits), room), jnp.int32)
    empty = GenerationState(state, history, keys, limits, count, tokens, jnp.zeros(tokens.shape), lengths, limits <= 0)
    return _append_tokens(empty, logits, rules)


def generate_chunk(
    stepper: Stepper, params: PyTree, written: GenerationState, rules: Rules, most: int
) -> GenerationState:
    """Generates up to `most` additional tokens for each row that has not ended."""
    until = written.count + most

    def step(generation: GenerationState) -> GenerationState:
        last = jax.lax.dynamic_index_in_dim(generation.tokens, generation.count - 1, axis=1, keepdims=False)  # [R]
        logits, state = stepper.step(params, generation.state, last)
        return _append_tokens(generation._replace(state=state), logits, rules)

    return jax.lax.while_loop(lambda w: (w.count < until) & ~jnp.all(w.ended), step, written)


def _append_tokens(generation: GenerationState, logits: jax.Array, rules: Rules) -> GenerationState:
    """Selects the next token of each row from `logits` [R, V], and appends the token unless the row has ended.

    A row ends with the end token, at its maximum number of tokens, or when no token is allowed.
    """
    position, ended = generation.count, generation.ended
    if rules.may_block:
        ended |= jnp.all(processed_logits(logits, rules, generation.history) == -jnp.inf, axis=-1)
    tokens = jnp.where(ended, 0, choose(logits, rules, generation.history, generation.keys, position))
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=-1)[:, 0]
    lengths = generation.lengths + ~ended
    return generation._replace(
        history=generation.history.after(tokens, rules),
        count=position + 1,
        tokens=generation.tokens.at[:, position].set(tokens),
        log_probs=generation.log_probs.at[:, position].set(jnp.where(ended, 0.0, log_probs)),
        lengths=lengths,
        ended=ended | rules.is_end(tokens) | (lengths >= generation.limits),
    )
