"""Multi-head attention with its four projections: self- and cross-attention, grouped keys, rotary positions."""

import chex
import flax.linen as nn
import jax

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask, attention, choose_implementation
from pretrainax.layers.attention_spec import report_attention, spec_of
from pretrainax.layers.compute import Compute
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions import PositionTerms
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
        positions: PositionTerms,
    ) -> jax.Array:
        """Attends with queries from x [B, T, D] to keys and values from source [B, S, D] -> [B, T, D]."""
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
        scale = (positions.logit_terms * head_dim) ** -0.5 if config.attention_scale is None else config.attention_scale
        to_query = heads("query", config.num_heads, gain=head_dim**-0.5 / scale)
        to_key = heads("key", config.kv_heads)
        q, k, v = to_query(x), to_key(source), heads("value", config.kv_heads)(source)
        bias = positions.bias(config, q, k, to_query, to_key, scale)
        if config.qk_norm:
            q, k = Norm(config, name="query_norm")(q), Norm(config, name="key_norm")(k)
        q, k = positions.rotate(q, k)
        spec = spec_of(q, k, mask, bias, bias_by_row=positions.has_row_bias, logit_cap=config.attention_logit_cap)
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
