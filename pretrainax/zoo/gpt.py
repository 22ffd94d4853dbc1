"""GPT-2 (Radford et al. 2019)."""

from pretrainax.config import LearnedPositions, ModelConfig
from pretrainax.zoo.family import Row, layer_norm
from pretrainax.zoo.variants import pick

# variant -> (layers, width, heads), table 2; named by the parameters of the released files (the paper's counts are off)
SIZES = {
    "124m": (12, 768, 12),
    "355m": (24, 1024, 16),
    "774m": (36, 1280, 20),
    "1558m": (48, 1600, 25),
}


def gpt2(variant: str = "124m") -> ModelConfig:
    """GPT-2; UserError for an unknown variant."""
    num_layers, d_model, num_heads = pick("gpt2", variant, SIZES)
    return ModelConfig(
        family="decoder",
        vocab_size=50_257,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=4 * d_model,
        num_heads=num_heads,
        position=LearnedPositions(1024),
        norm="layer",
        norm_at="pre",
        norm_epsilon=1e-5,
        activation="gelu_tanh",
        dropout_rate=0.1,
        scale_residual_init=True,
    )


def huggingface_names(config: ModelConfig) -> list[Row]:
    """Of transformers' GPT2LMHeadModel, whose Conv1D kernels are [in, out] as ours."""
    del config  # the same for all
    block, layer = "decoder/blocks", "transformer.h.{layer}"

    def conv(path, name, part=None):
        return [Row(f"{path}/kernel", f"{name}.weight", part=part), Row(f"{path}/bias", f"{name}.bias", part=part)]

    return [
        Row("token_embedding/embedding", "transformer.wte.weight"),
        Row("position_embedding/embedding", "transformer.wpe.weight"),
        *layer_norm(f"{block}/self_attention_norm", f"{layer}.ln_1"),
        *conv(f"{block}/self_attention/query", f"{layer}.attn.c_attn", part=(0, 3)),
        *conv(f"{block}/self_attention/key", f"{layer}.attn.c_attn", part=(1, 3)),
        *conv(f"{block}/self_attention/value", f"{layer}.attn.c_attn", part=(2, 3)),
        *conv(f"{block}/self_attention/out", f"{layer}.attn.c_proj"),
        *layer_norm(f"{block}/mlp_norm", f"{layer}.ln_2"),
        *conv(f"{block}/mlp/up", f"{layer}.mlp.c_fc"),
        *conv(f"{block}/mlp/down", f"{layer}.mlp.c_proj"),
        *layer_norm("decoder/final_norm", "transformer.ln_f"),
    ]
