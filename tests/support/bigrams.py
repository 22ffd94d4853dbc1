"""A model that is a table of bigrams, for tests of what lets models write: its logits follow from the last token."""

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


def prompts_of(*rows):
    """A batch of rows of tokens, padded on the right."""
    length = max(map(len, rows))
    padded = [[*row, *[0] * (length - len(row))] for row in rows]
    real = [[1] * len(row) + [0] * (length - len(row)) for row in rows]
    return {"tokens": jnp.array(padded), "segment_ids": jnp.array(real)}
