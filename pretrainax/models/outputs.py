"""What a model returns: features and the output matrix, so that the loss never has to hold all logits at once."""

from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Outputs:
    features: jax.Array  # [B, N, D] in the compute dtype; N = T, or K where the batch has masked_positions [B, K]
    unembedding: jax.Array  # [D, V] float32
    bias: Optional[jax.Array] = None  # [V] float32

    def logits(self) -> jax.Array:
        """[B, N, V] float32. For a large vocabulary this is the largest array of a step: see `losses`."""
        logits = jnp.einsum(
            "BND,DV->BNV",
            self.features,
            self.unembedding.astype(self.features.dtype),
            preferred_element_type=jnp.float32,
        )
        return logits if self.bias is None else logits + self.bias[None, None]
