"""The outputs of a model."""

from collections.abc import Mapping
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.data.batch import Batch
from pretrainax.layers.sums import Sums
from pretrainax.sharding.param_paths import PyTree, over_parts

TOKENS = "tokens"  # the unit of sums over all tokens that a model reads: `count_tokens`


@flax.struct.dataclass
class Outputs:
    """Holds what each head of the model says, and what its blocks give beside the stream."""

    heads: dict[str, PyTree]  # name of a head -> its output, see models.heads
    sums: Sums = flax.struct.field(default_factory=dict)  # of all blocks; what ends in "_loss" is minimised too
    state: PyTree = None  # of the decoder's blocks, stacked [L, …]; None for a model that was given none
    hidden: Optional[dict[str, jax.Array]] = (
        None  # of who asked: "encoder", "decoder", … -> after each block, [L, B, T, D]
    )

    @property
    def logits(self) -> jax.Array:
        """The language model's, [B, N, V]; of a model that tells replaced tokens from others, [B, T]. Float32."""
        return self.heads["lm"].logits() if "lm" in self.heads else self.heads["replaced"].logits

    def joined(
        self, own: jax.Array, counts: Mapping[str, jax.Array], total_counts: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Sums]:
        """Returns the objective of training, and sums that are reported beside those of heads and blocks.

        Args:
          own: the objective of heads and blocks.
          counts: of the batch by unit, the name of a head's loss or TOKENS.
          total_counts: of the whole global batch.
        """
        return own, {}


def count_tokens(batch: Batch) -> jax.Array:
    """Returns how many tokens a model reads, padding left out; the encoder's and the decoder's."""
    read = [batch[name] > 0 for name in ("encoder_segment_ids", "segment_ids") if name in batch]
    return sum((tokens.sum(dtype=jnp.float32) for tokens in read), start=jnp.zeros((), jnp.float32))


def hidden_states(intermediates: PyTree) -> dict[str, jax.Array]:
    """Returns `Outputs.hidden` of what a model has sown: `apply(…, mutable=["intermediates"])` gives that beside."""

    def hidden(blocks: PyTree) -> jax.Array:
        (x,) = blocks["hidden"]
        return x.reshape(-1, *x.shape[-3:])  # of shared layers, and of turns: [L, 1, …] -> [L, …]

    return {
        name: over_parts(sown, hidden)
        for name, sown in intermediates.items()
        if isinstance(sown, Mapping) and "blocks" in sown
    }
