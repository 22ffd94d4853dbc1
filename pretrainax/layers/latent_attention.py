"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): of a token only its latent is remembered.

    latent = norm(x · Wd)      [R], of which keys and values of all heads are made: latent · Wu
    turned key                 [P], made of x, turned by its position; one for all heads

Where text is written, Wu is not applied to what is remembered. What multiplies keys multiplies the query instead, and
what makes values is applied to the sum of latents ("absorbed", section 2.1.2): each head reads the same R + P numbers.
"""

import functools
from typing import Optional

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask
from pretrainax.layers.cache import KeysAndValues
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.made_again import kept
from pretrainax.layers.multi_head import Attention, register_attention, scale_of
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions import PositionTerms


@register_attention
class MultiHeadLatentAttention(Attention):
    """Attends with several heads whose keys and values are made of a latent."""

    partition_rules = (
        (r"blocks/self_attention/query_down/kernel", "layers d_model features"),
        (r"blocks/self_attention/query_up/kernel", "layers latent num_heads head_dim"),
        (r"blocks/self_attention/key_value_down/kernel", "layers d_model features"),
        (r"blocks/self_attention/key_value_up/kernel", "layers latent num_heads head_dim"),
        (r"blocks/self_attention/(query|key_value)_down/bias", "layers features"),
        (r"blocks/self_attention/(query|key_value)_down_norm/(scale|bias)", "layers features"),
    )

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return config.latent_attention is not None

    @staticmethod
    def flops(config: ModelConfig, length: int, read: int) -> int:
        settings, heads = config.latent_attention, config.num_heads
        assert settings is not None
        of_queries = heads * config.dim_per_head
        if settings.query_rank is None:
            query = config.d_model * of_queries
        else:
            query = settings.query_rank * (config.d_model + of_queries)
        made = settings.rank * heads * (config.dim_per_head - settings.rotary_dim + settings.value_dim)
        key_value = config.d_model * (settings.rank + settings.rotary_dim) + made
        return 2 * (length * (query + heads * settings.value_dim * config.d_model) + read * key_value)

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        source: jax.Array | KeysAndValues,
        mask: Mask,
        positions: PositionTerms,
        ring: Optional[KeysAndValues] = None,
        index: Optional[jax.Array] = None,
    ) -> tuple[jax.Array, KeysAndValues]:
        """Attends to the tokens of `source` [B, S, D]; arguments and results as of MultiHeadAttention.

        What later queries can read is [B, 1, S, R + P]: the latents, and the turned keys.
        """
        chex.assert_equal_shape((x, source), custom_message="latent attention is of a text to itself: x is source")
        config, settings = self.config, self.config.latent_attention
        assert settings is not None and not isinstance(source, KeysAndValues)
        plain = config.dim_per_head - settings.rotary_dim
        query = self._queries(x)
        # [B, S, D] -> [B, S, R + P] -> [B, S, R], [B, S, 1, P]
        down = self._down("key_value_down", settings.rank + settings.rotary_dim)(source)
        latent, to_turn = down[..., : settings.rank], down[..., None, settings.rank :]
        latent = Norm(config, name="key_value_down_norm")(latent)
        turned_query, turned_key = positions.rotate(query[..., plain:], to_turn)
        up = Linear(
            (config.num_heads, plain + settings.value_dim),
            ("latent", "num_heads", "head_dim"),
            normal_init(config, settings.rank),
            use_bias=False,
            name="key_value_up",
        )
        memory = KeysAndValues.of(jnp.concatenate([latent[:, :, None], turned_key], axis=-1), None)
        attended = functools.partial(self.attended, bias=None, positions=positions, scale=scale_of(config, positions))
        if ring is None:
            # [B, S, R] -> [B, S, H, N + V]
            both = kept(up(latent))
            of_all = jnp.broadcast_to(turned_key, (*both.shape[:3], settings.rotary_dim))
            k = jnp.concatenate([both[..., :plain], of_all], axis=-1)
            q = kept(jnp.concatenate([query[..., :plain], turned_query], axis=-1))
            return self.out(attended(q, k, both[..., plain:], mask)), memory
        assert index is not None
        memory = ring.written(memory, index)
        mask, _ = memory.seen_from(index, mask, None)
        kernel = up.get_variable("params", "kernel").astype(x.dtype)  # [R, H, N + V]
        # [B, 1, H, N] -> [B, 1, H, R]
        of_latents = jnp.einsum("BTHN,RHN->BTHR", query[..., :plain], kernel[..., :plain])
        keys, _ = memory.heads_last()
        q = jnp.concatenate([of_latents, turned_query], axis=-1)
        y = attended(q, keys, keys[..., : settings.rank], mask, fused=False)
        # [B, 1, H, R] -> [B, 1, H, V]
        return self.out(jnp.einsum("BTHR,RHV->BTHV", y, kernel[..., plain:])), memory

    @nn.nowrap  # whose name would stand in those of what is computed here
    def _queries(self, x: jax.Array) -> jax.Array:
        """Returns queries, [B, T, D] -> [B, T, H, K]."""
        config, settings = self.config, self.config.latent_attention
        assert settings is not None
        features = config.num_heads, config.dim_per_head
        if settings.query_rank is None:
            init = normal_init(config, config.d_model)
            return Linear(features, ("d_model", "num_heads", "head_dim"), init, config.use_bias, name="query")(x)
        down = Norm(config, name="query_down_norm")(self._down("query_down", settings.query_rank)(x))
        init = normal_init(config, settings.query_rank)
        return Linear(features, ("latent", "num_heads", "head_dim"), init, use_bias=False, name="query_up")(down)

    @nn.nowrap
    def _down(self, name: str, width: int) -> Linear:
        init = normal_init(self.config, self.config.d_model)
        return Linear((width,), ("d_model", "features"), init, self.config.use_bias, name=name)
