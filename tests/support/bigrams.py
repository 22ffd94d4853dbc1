"""Defines models that are tables, for tests of generation: logits depend on the last token, or the last two tokens."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass
class Bigrams:
    """A model whose parameters are logits [V, V] of the next token; its state is the last token of each row."""

    params: jax.Array | None = None

    def start(self, params, batch, room):
        last = jnp.sum(batch["segment_ids"] > 0, axis=1) - 1
        tokens = jnp.take_along_axis(batch["tokens"], last[:, None], axis=1)[:, 0]
        return params[tokens], tokens

    def step(self, params, state, tokens):
        return params[tokens], tokens

    def take(self, state, rows):
        return state[rows]


@dataclasses.dataclass
class Trigrams(Bigrams):
    """A model whose parameters are the logits [V, V, V] after two tokens; its state is the older token."""

    def start(self, params, batch, room):
        _, last = super().start(params[0], batch, room)
        # The logits of the first step assume that the last token of the prompt occurs twice.
        return params[last, last], last

    def step(self, params, state, tokens):
        return params[state, tokens], tokens


def prompts_of(*rows):
    """Returns a batch of rows of tokens, padded on the right."""
    length = max(map(len, rows))
    padded = [[*row, *[0] * (length - len(row))] for row in rows]
    real = [[1] * len(row) + [0] * (length - len(row)) for row in rows]
    return {"tokens": jnp.array(padded), "segment_ids": jnp.array(real)}
