"""The configuration of multi-head latent attention."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Optional

from pretrainax.config.choice import Choice
from pretrainax.config.positions import RotaryPositions

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment


@dataclasses.dataclass
class LatentAttention(Choice):
    """Keys and values of all heads made of one short vector a token, its latent (DeepSeek-V2, arXiv 2405.04434, section
    2.1).

    Of each head's queries and keys, the last `rotary_dim` of config.model.head_dim numbers are turned by positions;
    those of keys are the same for all heads.
    """

    rank: int = 512  # width of the latent
    query_rank: Optional[int] = None  # of the one that queries are made of; None: they are made of the stream
    rotary_dim: int = 64  # numbers of a head's queries and keys that are turned
    value_dim: int = 128  # width of a head's values

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path, model = "config.model.latent_attention", experiment.model
        for name in ("rank", "query_rank", "rotary_dim", "value_dim"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield f"{path}.{name} is {value}, it must be at least 1"
        if self.rotary_dim % 2:
            yield f"{path}.rotary_dim is {self.rotary_dim}, it must be even: planes are turned"
        for sizes, stack in model.sized.items():
            if self.rotary_dim >= stack.dim_per_head:
                yield (
                    f"{path}.rotary_dim is {self.rotary_dim}: it must be below {sizes}.head_dim, "
                    f"{stack.dim_per_head}, which has the numbers that are not turned too"
                )
            if self.value_dim > stack.dim_per_head:
                yield (
                    f"{path}.value_dim is {self.value_dim}: it must be at most {sizes}.head_dim, "
                    f"{stack.dim_per_head}, as kernels want values no wider than keys"
                )
            if stack.kv_heads != stack.num_heads:
                yield f"{path} has keys for each head: {sizes}.num_kv_heads is {stack.kv_heads}, set it to None"
        if not isinstance(model.position, RotaryPositions):
            yield f"{path} needs RotaryPositions, config.model.position is {type(model.position).__name__}"
        if model.qk_norm:
            yield f"{path} has norms of its own: config.model.qk_norm is True, set it to False"
        if model.qkv_bias:
            yield f"{path} has biases where config.model.use_bias says: config.model.qkv_bias is True, set it to None"
