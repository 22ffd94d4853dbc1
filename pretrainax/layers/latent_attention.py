"""Multi-head latent attention, which caches one latent vector per token (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    latent = norm(x · Wd)      [R], from which latent · Wu computes the keys and values of all heads
    rotated key                [P], computed from x and rotated by its position; shared by all heads

Generation with a cache does not compute keys and values from the cached latents ("absorbed", section 2.1.2). It
multiplies the query by the key columns of Wu, and the weighted sum of latents by the value columns of Wu. All heads
then read the same R + P numbers per token.
"""

import functools
from typing import Optional

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask
from pretrainax.layers.cache import KeyValues
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.multi_head import Attention, register_attention, scale_of
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.rematerialization import saved_residual


@register_attention
class MultiHeadLatentAttention(Attention):
    """Multi-head attention whose keys and values are computed from one latent vector per token."""

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
        query_width = heads * config.dim_per_head
        if settings.query_rank is None:
            query = config.d_model * query_width
        else:
            query = settings.query_rank * (config.d_model + query_width)
        key_value_up = settings.rank * heads * (config.dim_per_head - settings.rotary_dim + settings.value_dim)
        key_value = config.d_model * (settings.rank + settings.rotary_dim) + key_value_up
        return 2 * (length * (query + heads * settings.value_dim * config.d_model) + read * key_value)

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        source: jax.Array | KeyValues,
        mask: Mask,
        positions: PositionTerms,
        ring: Optional[KeyValues] = None,
        index: Optional[jax.Array] = None,
    ) -> tuple[jax.Array, KeyValues]:
        """Attends from x [B, T, D] to the tokens of `source` [B, S, D], and returns the output and the KV cache.

        The arguments and the results are as in `MultiHeadAttention`. `source` must be x, because latent attention is
        self-attention. The cache stores the latents and the rotated keys as keys [B, 1, S, R + P], and no values.
        """
        chex.assert_equal_shape((x, source), custom_message="latent attention is self-attention: x must be source")
        config, settings = self.config, self.config.latent_attention
        assert settings is not None and not isinstance(source, KeyValues)
        unrotated_dim = config.dim_per_head - settings.rotary_dim
        query = self._queries(x)
        # [B, S, D] -> [B, S, R + P] -> [B, S, R], [B, S, 1, P]
        compressed = self._down_projection("key_value_down", settings.rank + settings.rotary_dim)(source)
        latent, unrotated_key = compressed[..., : settings.rank], compressed[..., None, settings.rank :]
        latent = Norm(config, name="key_value_down_norm")(latent)
        rotated_query, rotated_key = positions.rotate(query[..., unrotated_dim:], unrotated_key)
        up_projection = Linear(
            (config.num_heads, unrotated_dim + settings.value_dim),
            ("latent", "num_heads", "head_dim"),
            normal_init(config, settings.rank),
            use_bias=False,
            name="key_value_up",
        )
        cache = KeyValues.from_arrays(jnp.concatenate([latent[:, :, None], rotated_key], axis=-1), None)
        attended = functools.partial(self.attended, bias=None, positions=positions, scale=scale_of(config, positions))
        if ring is None:
            # [B, S, R] -> [B, S, H, N + V]
            keys_and_values = saved_residual(up_projection(latent))
            key_per_head = jnp.broadcast_to(rotated_key, (*keys_and_values.shape[:3], settings.rotary_dim))
            k = jnp.concatenate([keys_and_values[..., :unrotated_dim], key_per_head], axis=-1)
            q = saved_residual(jnp.concatenate([query[..., :unrotated_dim], rotated_query], axis=-1))
            return self.out(attended(q, k, keys_and_values[..., unrotated_dim:], mask)), cache
        assert index is not None
        cache = ring.append(cache, index)
        mask, _ = cache.mask_for_query(index, mask, None)
        kernel = up_projection.get_variable("params", "kernel").astype(x.dtype)  # [R, H, N + V]
        # [B, 1, H, N] -> [B, 1, H, R]
        latent_query = jnp.einsum("BTHN,RHN->BTHR", query[..., :unrotated_dim], kernel[..., :unrotated_dim])
        keys, _ = cache.heads_last()
        q = jnp.concatenate([latent_query, rotated_query], axis=-1)
        latent_output = attended(q, keys, keys[..., : settings.rank], mask, fused=False)
        # [B, 1, H, R] -> [B, 1, H, V]
        return self.out(jnp.einsum("BTHR,RHV->BTHV", latent_output, kernel[..., unrotated_dim:])), cache

    @nn.nowrap  # keeps the name of the method out of Flax's scopes
    def _queries(self, x: jax.Array) -> jax.Array:
        """Computes the queries of all heads before the rotation, [B, T, D] -> [B, T, H, K]."""
        config, settings = self.config, self.config.latent_attention
        assert settings is not None
        features = config.num_heads, config.dim_per_head
        if settings.query_rank is None:
            init = normal_init(config, config.d_model)
            return Linear(features, ("d_model", "num_heads", "head_dim"), init, config.use_bias, name="query")(x)
        compressed = Norm(config, name="query_down_norm")(self._down_projection("query_down", settings.query_rank)(x))
        init = normal_init(config, settings.query_rank)
        return Linear(features, ("latent", "num_heads", "head_dim"), init, use_bias=False, name="query_up")(compressed)

    @nn.nowrap
    def _down_projection(self, name: str, width: int) -> Linear:
        init = normal_init(self.config, self.config.d_model)
        return Linear((width,), ("d_model", "features"), init, self.config.use_bias, name=name)
