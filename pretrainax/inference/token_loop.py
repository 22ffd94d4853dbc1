"""Writes one token after the other on the device, each row by itself, in pieces of as many tokens as the host wants.

`begin` reads the prompts and writes the first token, `go_on` writes more: one call of the device for a piece, so that
the host's work does not count where a step is short. A row that has ended is written no more; a piece ends with them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pretrainax.data.batch import Batch
from pretrainax.inference.sampling import History, Rules, choose, history_of, limited
from pretrainax.inference.stepper import State, Stepper
from pretrainax.sharding.param_paths import PyTree


class Written(NamedTuple):
    """Holds what R rows have written, with room for N tokens each."""

    state: State
    history: History
    keys: jax.Array  # [R] the random keys
    limits: jax.Array  # [R] tokens that a row may write
    count: jax.Array  # [] tokens that rows which have not ended have written
    tokens: jax.Array  # [R, N]
    log_probs: jax.Array  # [R, N] float32, of each token under the model itself
    lengths: jax.Array  # [R] tokens of each row
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
) -> Written:
    """Reads prompts [B, T] and writes the first token of R = B · `copies` rows, those of a prompt side by side.

    Args:
      keys, limits: of the rows, [R].
      room: N, no less than the highest of `limits`.
    """
    logits, state = stepper.start(params, batch, room)
    history = history_of(batch["tokens"], batch["segment_ids"] > 0, rules)
    if copies > 1:
        rows = jnp.repeat(jnp.arange(len(logits)), copies)
        logits, state, history = logits[rows], stepper.take(state, rows), history.take(rows)
    count, lengths = jnp.zeros((), jnp.int32), jnp.zeros_like(limits)
    tokens = jnp.zeros((len(logits), room), jnp.int32)
    empty = Written(state, history, keys, limits, count, tokens, jnp.zeros(tokens.shape), lengths, limits <= 0)
    return _write(empty, logits, rules)


def go_on(stepper: Stepper, params: PyTree, written: Written, rules: Rules, most: int) -> Written:
    """Writes up to `most` tokens more of each row."""
    until = written.count + most

    def step(written: Written) -> Written:
        last = jax.lax.dynamic_index_in_dim(written.tokens, written.count - 1, axis=1, keepdims=False)  # [R]
        logits, state = stepper.step(params, written.state, last)
        return _write(written._replace(state=state), logits, rules)

    return jax.lax.while_loop(lambda w: (w.count < until) & ~jnp.all(w.ended), step, written)


def _write(written: Written, logits: jax.Array, rules: Rules) -> Written:
    """Writes a token of each row that has not ended; one to which nothing is allowed ends."""
    place, ended = written.count, written.ended
    if rules.automata:
        ended |= jnp.all(limited(logits, rules, written.history) == -jnp.inf, axis=-1)
    tokens = jnp.where(ended, 0, choose(logits, rules, written.history, written.keys, place))
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=-1)[:, 0]
    lengths = written.lengths + ~ended
    return written._replace(
        history=written.history.after(tokens, rules),
        count=place + 1,
        tokens=written.tokens.at[:, place].set(tokens),
        log_probs=written.log_probs.at[:, place].set(jnp.where(ended, 0.0, log_probs)),
        lengths=lengths,
        ended=ended | (tokens == rules.end) | (lengths >= written.limits),
    )
