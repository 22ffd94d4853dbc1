"""The interface between a decoder with a KV cache and the generation loops."""

from typing import Protocol, TypeAlias

import jax

from pretrainax.data.batch import Batch
from pretrainax.sharding.param_paths import PyTree

State: TypeAlias = PyTree  # an opaque pytree of arrays


class Stepper(Protocol):
    """Reads prompts, then one token at a time. All methods are traced; equal steppers share compiled functions."""

    def start(self, params: PyTree, batch: Batch, room: int) -> tuple[jax.Array, State]:
        """Reads prompts; returns logits [B, V] float32 after the last token of each, and a state.

        Args:
          batch: in the format of data/batch.py, rows padded on the right; for an encoder-decoder, `tokens` is the start
            of the decoder.
          room: maximum number of further tokens.
        """
        ...

    def step(self, params: PyTree, state: State, tokens: jax.Array) -> tuple[jax.Array, State]:
        """Reads one more token of each row, [B]; returns logits [B, V] and a state of the same shapes."""
        ...

    def take(self, state: State, rows: jax.Array) -> State:
        """Returns the state of rows [B'], indices into B that may repeat, for beams that fork."""
        ...
