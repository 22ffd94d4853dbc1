"""Models that are tables, for tests of what lets models write: logits follow from the last token, or the last two."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass
class Bigrams:
    """The parameters are the logits [V, V] of the next token after each; the state is the last token of each row."""

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
    """The parameters are the logits [V, V, V] after each pair of tokens; the state is what the next step cannot see."""

    def start(self, params, batch, room):
        _, last = super().start(params[0], batch, room)
        return params[last, last], last  # as if the last token of the prompt stood there twice

    def step(self, params, state, tokens):
        return params[state, tokens], tokens


def prompts_of(*rows):
    """A batch of rows of tokens, padded on the right."""
    length = max(map(len, rows))
    padded = [[*row, *[0] * (length - len(row))] for row in rows]
    real = [[1] * len(row) + [0] * (length - len(row)) for row in rows]
    return {"tokens": jnp.array(padded), "segment_ids": jnp.array(real)}
