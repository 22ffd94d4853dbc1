"""Multi-head attention with its four projections: self- and cross-attention, grouped keys, rotary positions."""

from typing import Optional

import chex
import flax.linen as nn
import jax

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask, attention, choose_implementation
from pretrainax.layers.attention_spec import report_attention, spec_of
from pretrainax.layers.compute import Compute
from pretrainax.layers.disentangled import disentangled_bias, rows_by_distance
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.norm import Norm
from pretrainax.layers.position import Rotary, rotate
from pretrainax.sharding.mesh import platform


class MultiHeadAttention(nn.Module):
    """Attends with several heads (Vaswani et al. 2017, section 3.2.2); keys may have fewer (Ainslie et al. 2023).

    NOTE There is no dropout of attention weights, which BERT, T5 and GPT-2 had: fused kernels never hold them.
    """

    config: ModelConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        source: jax.Array,
        mask: Mask,
        bias: Optional[jax.Array] = None,
        rotary: Optional[Rotary] = None,
        relative: Optional[jax.Array] = None,
    ) -> jax.Array:
        """Attends with queries from x [B, T, D] to keys and values from source [B, S, D] -> [B, T, D].

        `bias` [1, H, T, S] is added to the logits; `rotary` are the cosines and sines of `rotary_angles`;
        `relative` [R, D] are the vectors of a RelativeTable.
        """
        chex.assert_rank([x, source], 3, custom_message="x is [B, T, D], source is [B, S, D]")
        rows, _, width = x.shape
        chex.assert_shape(source, (rows, None, width), custom_message="source is [B, S, D] with B and D of x [B, T, D]")
        config, head_dim = self.config, self.config.dim_per_head
        qkv_bias = config.use_bias if config.qkv_bias is None else config.qkv_bias

        def heads(name, count, gain=1.0):  # [B, T, D] -> [B, T, H, K]
            init = normal_init(config, config.d_model, gain)
            axes = ("d_model", "num_heads" if name == "query" else "num_kv_heads", "head_dim")
            return Linear((count, head_dim), axes, init, qkv_bias, name=name)

        # NOTE T5 does not divide the logits by sqrt(K); its queries start that much smaller instead.
        terms = 1 if relative is None else 3  # of a logit, each of the size of q · k (He et al. 2020, equation 4)
        scale = (terms * head_dim) ** -0.5 if config.attention_scale is None else config.attention_scale
        to_query = heads("query", config.num_heads, gain=head_dim**-0.5 / scale)
        to_key = heads("key", config.kv_heads)
        q, k, v = to_query(x), to_key(source), heads("value", config.kv_heads)(source)
        if relative is not None:
            _, which = rows_by_distance(config, q.shape[1])
            bias = scale * disentangled_bias(q, k, to_query(relative)[which], to_key(relative)[which])
        if config.qk_norm:
            q, k = Norm(config, name="query_norm")(q), Norm(config, name="key_norm")(k)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        spec = spec_of(q, k, mask, bias, bias_by_row=relative is not None, logit_cap=config.attention_logit_cap)
        report_attention(spec)
        # The warning is for the run's header, which chooses by the same spec.
        implementation, _ = choose_implementation(self.compute.attention, platform(), spec)
        y = attention(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            scale=scale,
            logit_cap=config.attention_logit_cap,
            implementation=implementation,
        )
        init = normal_init(config, config.num_heads * head_dim, residual=True)
        # [B, T, H, K] -> [B, T, D]
        return Linear((config.d_model,), ("num_heads", "head_dim", "d_model"), init, config.use_bias, name="out")(y)
