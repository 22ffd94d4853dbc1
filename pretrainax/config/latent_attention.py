"""Defines the config of multi-head latent attention."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Optional

from pretrainax.config.choice import Choice
from pretrainax.config.positions import RotaryPositions

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment


@dataclasses.dataclass
class LatentAttention(Choice):
    """Config of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    The keys and values of all heads are projected from one low-dimensional vector per token, the latent. Each query
    and key head has config.model.head_dim dimensions, and rotary positions rotate the last `rotary_dim` of them. All
    heads share the rotated dimensions of the keys.
    """

    rank: int = 512  # width of the latent of keys and values
    # width of the latent of the queries; None: queries are projected directly from the residual stream
    query_rank: Optional[int] = None
    rotary_dim: int = 64  # number of rotated dimensions of a query or key head; even
    value_dim: int = 128  # width of a value head

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path, model = "config.model.latent_attention", experiment.model
        for name in ("rank", "query_rank", "rotary_dim", "value_dim"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield f"{path}.{name} is {value}, it must be at least 1"
        if self.rotary_dim % 2:
            yield f"{path}.rotary_dim is {self.rotary_dim}, it must be even: dimensions are rotated in pairs"
        for sizes, stack in model.sized.items():
            if self.rotary_dim >= stack.dim_per_head:
                yield (
                    f"{path}.rotary_dim is {self.rotary_dim}, it must be below {sizes}.head_dim "
                    f"{stack.dim_per_head}, which includes the dimensions that are not rotated"
                )
            if self.value_dim > stack.dim_per_head:
                yield (
                    f"{path}.value_dim is {self.value_dim}, it must be at most {sizes}.head_dim "
                    f"{stack.dim_per_head}: attention kernels require values at most as wide as keys"
                )
            if stack.kv_heads != stack.num_heads:
                yield f"{path} requires one key head per head: {sizes}.num_kv_heads is {stack.kv_heads}, set it to None"
        if not isinstance(model.position, RotaryPositions):
            yield f"{path} requires RotaryPositions, config.model.position is {type(model.position).__name__}"
        if model.qk_norm:
            yield f"{path} has its own norms: config.model.qk_norm is True, set it to False"
        if model.qkv_bias is not None:
            value = model.qkv_bias
            yield f"{path} uses config.model.use_bias for its biases: config.model.qkv_bias is {value}, set it to None"
