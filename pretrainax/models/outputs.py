"""What a model returns: features and the output matrix, so that the loss never has to hold all logits at once."""

from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Outputs:
    """What the heads of `config.model` give; None for a head that it does not have."""

    features: Optional[jax.Array] = (
        None  # [B, N, D] in the compute dtype; N = T, or K where masked_positions are [B, K]
    )
    unembedding: Optional[jax.Array] = None  # [D, V] float32
    bias: Optional[jax.Array] = None  # [V] float32
    logit_cap: Optional[float] = flax.struct.field(pytree_node=False, default=None)  # config.model.final_logit_cap
    pair_logits: Optional[jax.Array] = None  # [B, 2] float32
    replaced_logits: Optional[jax.Array] = None  # [B, T] float32
    replaced: Optional[jax.Array] = None  # [B, T] bool, the truth about them where the model itself replaced tokens
    replaced_weight: float = flax.struct.field(pytree_node=False, default=1.0)  # of their loss

    def logits(self) -> jax.Array:
        """[B, N, V] float32. For a large vocabulary this is the largest array of a step: see `losses`."""
        logits = jnp.einsum(
            "BND,DV->BNV",
            self.features,
            self.unembedding.astype(self.features.dtype),
            preferred_element_type=jnp.float32,
        )
        logits = logits if self.bias is None else logits + self.bias[None, None]
        return logits if self.logit_cap is None else self.logit_cap * jnp.tanh(logits / self.logit_cap)
