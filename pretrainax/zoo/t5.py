"""T5 1.0 and 1.1 (Raffel et al. 2020, arXiv 1910.10683; 1.1: the released checkpoints, and Shazeer 2020)."""

from pretrainax.config import ModelConfig, RelativePositionBuckets
from pretrainax.zoo.family import Row, linear
from pretrainax.zoo.variants import pick

# variant -> (layers of each stack, width, feed-forward, heads, head dimension)
SIZES = {
    # 1.1: google-research/text-to-text-transfer-transformer, released_checkpoints.md; 3b and 11b are its xl and xxl
    "small": (8, 512, 1024, 6, 64),
    "base": (12, 768, 2048, 12, 64),
    "large": (24, 1024, 2816, 16, 64),
    "3b": (24, 2048, 5120, 32, 64),
    "11b": (24, 4096, 10240, 64, 64),
    # 1.0: Raffel et al. 2020, section 3.7
    "v1_0_small": (6, 512, 2048, 8, 64),
    "v1_0_base": (12, 768, 3072, 12, 64),
    "v1_0_large": (24, 1024, 4096, 16, 64),
    "v1_0_3b": (24, 1024, 16384, 32, 128),
    "v1_0_11b": (24, 1024, 65536, 128, 128),
}


def t5(variant: str = "base") -> ModelConfig:
    """T5 1.1, or 1.0 (`v1_0_…`); UserError for an unknown variant."""
    num_layers, d_model, d_ff, num_heads, head_dim = pick("t5", variant, SIZES)
    original = variant.startswith("v1_0_")
    return ModelConfig(
        family="encoder_decoder",
        vocab_size=32_128,  # 32,000 pieces and 100 sentinels, padded to a multiple of 128
        num_layers=num_layers,
        d_model=d_model,
        d_ff=d_ff,
        num_heads=num_heads,
        head_dim=head_dim,
        position=RelativePositionBuckets(num_buckets=32, max_distance=128),
        norm="rms",
        norm_at="pre",
        norm_epsilon=1e-6,
        activation="relu" if original else "gelu_tanh",
        gated=not original,
        use_bias=False,
        tie_embeddings=original,
        scale_tied_logits=original,
        attention_scale=1.0,
        dropout_rate=0.1 if original else 0.0,  # 1.1 was pretrained without
        init_stddev=None,
    )


def huggingface_names(config: ModelConfig) -> list[Row]:
    """Of transformers' T5ForConditionalGeneration."""
    rows = [Row("token_embedding/embedding", "shared.weight")]
    if not config.tie_embeddings:
        rows += linear("unembedding", "lm_head", bias=False)
    for stack in ("encoder", "decoder"):
        block = f"{stack}.block.{{layer}}"
        first = f"{stack}.block.0.layer.0.SelfAttention"  # holds the bias that all layers share
        rows += [
            Row(f"{stack}/relative_bias/embedding", f"{first}.relative_attention_bias.weight"),
            Row(f"{stack}/final_norm/scale", f"{stack}.final_layer_norm.weight"),
            *_attention(f"{stack}/blocks/self_attention", f"{block}.layer.0", "SelfAttention"),
        ]
        if stack == "decoder":
            rows += _attention("decoder/blocks/cross_attention", f"{block}.layer.1", "EncDecAttention")
        rows += _mlp(f"{stack}/blocks/mlp", f"{block}.layer.{2 if stack == 'decoder' else 1}", config.gated)
    return rows


def _attention(path: str, name: str, kind: str) -> list[Row]:
    return [
        Row(f"{path}_norm/scale", f"{name}.layer_norm.weight"),
        *linear(f"{path}/query", f"{name}.{kind}.q", bias=False),
        *linear(f"{path}/key", f"{name}.{kind}.k", bias=False),
        *linear(f"{path}/value", f"{name}.{kind}.v", bias=False),
        *linear(f"{path}/out", f"{name}.{kind}.o", bias=False),
    ]


def _mlp(path: str, name: str, gated: bool) -> list[Row]:
    inner = f"{name}.DenseReluDense"  # so called whatever the activation
    return [
        Row(f"{path}_norm/scale", f"{name}.layer_norm.weight"),
        *(linear(f"{path}/gate", f"{inner}.wi_0", bias=False) if gated else []),
        *linear(f"{path}/up", f"{inner}.wi_1" if gated else f"{inner}.wi", bias=False),
        *linear(f"{path}/down", f"{inner}.wo", bias=False),
    ]
