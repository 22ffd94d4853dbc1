"""Defines `Outputs`, which a model returns for a batch: head outputs, sums, state and hidden states."""

from collections.abc import Mapping
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.data.batch import Batch
from pretrainax.layers.sums import Sums
from pretrainax.sharding.param_paths import PyTree, map_stacks

TOKENS = "tokens"  # unit of sums over all tokens that a model reads, see `count_tokens`


@flax.struct.dataclass
class Outputs:
    """The outputs of a model for a batch: the outputs of the heads, and the auxiliary outputs of the blocks."""

    heads: dict[str, PyTree]  # head name -> output of the head, see models.heads
    # {name: (sum, count)} of all blocks; the training objective includes the sums whose names end in "_loss"
    sums: Sums = flax.struct.field(default_factory=dict)
    state: PyTree = None  # state of the decoder's blocks, stacked [L, …]; None if the model received no state
    # hidden states after each block, {"encoder": [L, B, T, D], …}; None unless requested
    hidden: Optional[dict[str, jax.Array]] = None

    @property
    def logits(self) -> jax.Array:
        """Returns float32 logits: [B, N, V] of a language model, [B, T] of a replaced-token discriminator."""
        return self.heads["lm"].logits() if "lm" in self.heads else self.heads["replaced"].logits

    def combined_objective(
        self, own: jax.Array, counts: Mapping[str, jax.Array], total_counts: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Sums]:
        """Returns the training objective and additional sums to report; by default, `own` and no sums.

        A subclass adds loss terms, such as a distillation loss.

        Args:
          own: the objective of the heads and blocks of this model.
          counts: number of predictions or tokens in this batch, by unit. A unit is the name of a head's loss, or
            TOKENS.
          total_counts: the same counts for the global batch, of which this batch may be a microbatch.
        """
        return own, {}


def main_loss(counts: Mapping[str, jax.Array]) -> str:
    """Returns the unit in `counts` of the loss of tokens or, for the model of a task, of the task's loss."""
    return "loss" if "loss" in counts else "label_loss"


def count_tokens(batch: Batch) -> jax.Array:
    """Counts the non-padding tokens of a batch that the encoder and the decoder read; returns float32."""
    masks = [batch[name] > 0 for name in ("encoder_segment_ids", "segment_ids") if name in batch]
    return sum((mask.sum(dtype=jnp.float32) for mask in masks), start=jnp.zeros((), jnp.float32))


def hidden_states(intermediates: PyTree) -> dict[str, jax.Array]:
    """Extracts `Outputs.hidden` from the intermediates that `model.apply(…, mutable=["intermediates"])` returns."""

    def hidden(blocks: PyTree) -> jax.Array:
        (x,) = blocks["hidden"]
        return x.reshape(-1, *x.shape[-3:])  # shared layers and alternating kinds of layers: [L, 1, …] -> [L, …]

    return {
        name: map_stacks(sown, hidden)
        for name, sown in intermediates.items()
        if isinstance(sown, Mapping) and "blocks" in sown
    }
