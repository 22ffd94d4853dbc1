"""The interface between a decoder with a KV cache and the generation loops."""

from typing import Protocol, TypeAlias

import jax

from pretrainax.data.batch import Batch
from pretrainax.sharding.param_paths import PyTree

State: TypeAlias = PyTree  # a pytree of arrays that only the stepper interprets


class Stepper(Protocol):
    """A model that reads prompts, and then one token per row in each step.

    All methods are traced by `jax.jit`. Steppers that compare equal share compiled functions.
    """

    def start(self, params: PyTree, batch: Batch, room: int) -> tuple[jax.Array, State]:
        """Reads prompts; returns the logits after the last token of each prompt, [B, V] float32, and the state.

        Args:
          batch: prompts in the format of data/batch.py, padded on the right. For an encoder-decoder, `tokens` are the
            first decoder inputs.
          room: maximum number of tokens that `step` will read after the prompts.
        """
        ...

    def step(self, params: PyTree, state: State, tokens: jax.Array) -> tuple[jax.Array, State]:
        """Reads one token of each row; returns the logits of the next token [B, V] float32 and the new state.

        Args:
          tokens: [B] ids of the tokens to read.

        Returns:
          The logits, and a state whose arrays have the same shapes as the arrays of `state`.
        """
        ...

    def take(self, state: State, rows: jax.Array) -> State:
        """Selects the state of the rows at the indices `rows` [B'], which repeat when beams fork."""
        ...
