"""The contract between a decoder that keeps what it has read, and the loops that let it write."""

from typing import Protocol, TypeAlias

import jax

from pretrainax.data.batch import Batch
from pretrainax.sharding.param_paths import PyTree

State: TypeAlias = PyTree  # a pytree of arrays, of which only the stepper knows what they hold


class Stepper(Protocol):
    """Reads prompts, then one token after the other. All three are traced; equal steppers share what is compiled."""

    def start(self, params: PyTree, batch: Batch, room: int) -> tuple[jax.Array, State]:
        """Reads prompts; returns logits [B, V] float32 after the last token of each, and a state.

        Args:
          batch: as data/batch.py says, rows padded on the right; of an encoder-decoder `tokens` is what the decoder
            starts from.
          room: tokens that may follow.
        """
        ...

    def step(self, params: PyTree, state: State, tokens: jax.Array) -> tuple[jax.Array, State]:
        """Reads one token more of each row, [B]; returns logits [B, V] and the state, whose shapes stay."""
        ...

    def take(self, state: State, rows: jax.Array) -> State:
        """Returns the state of rows [B'] (indices into B; repeated ones too): beams that fork."""
        ...
