"""Phi-1, 1.5 and 2 (Gunasekar et al. 2023, arXiv 2306.11644; Li et al. 2023, arXiv 2309.05463; Javaheripi and Bubeck
2023): parallel blocks with biases everywhere, of whose heads a part is turned."""

from pretrainax.config import ModelConfig, RotaryPositions
from pretrainax.zoo import llama
from pretrainax.zoo.family import (
    LAST,
    Classifier,
    ConfigJson,
    Family,
    HuggingFace,
    Row,
    layer_norm,
    linear,
    token_classifier,
    trained_by,
)
from pretrainax.zoo.variants import pick

# variant -> (layers, width, heads, part of a head that is turned: 32 dimensions of each)
SIZES = {"1": (24, 2048, 32, 0.5), "1_5": (24, 2048, 32, 0.5), "2": (32, 2560, 32, 0.4)}
DROPOUT = {"1": 0.1, "1_5": 0.0, "2": 0.1}


def phi(variant: str = "1_5") -> ModelConfig:
    """Returns Phi-1, 1.5 or 2; UserError for an unknown variant."""
    num_layers, d_model, num_heads, fraction = pick("phi", variant, SIZES)
    return ModelConfig(
        family="decoder",
        vocab_size=51_200,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=4 * d_model,
        num_heads=num_heads,
        position=RotaryPositions(2048, fraction=fraction),
        norm="layer",
        norm_at="pre",
        parallel=True,
        norm_epsilon=1e-5,
        activation="gelu_tanh",
        use_bias=True,
        output_bias=True,
        tie_embeddings=False,
        dropout_rate=DROPOUT[variant],
        attention_dropout_rate=0.1 if variant == "1" else 0.0,
    )


def huggingface_names(config: ModelConfig) -> list[Row]:
    """Returns the name table of transformers' PhiForCausalLM."""
    block, layer = llama.BLOCK, llama.LAYER
    ours, theirs = f"{block}/self_attention", f"{layer}.self_attn"
    rows = [
        Row("token_embedding/embedding", "model.embed_tokens.weight"),
        *layer_norm(f"{ours}_norm", f"{layer}.input_layernorm"),
        *linear(f"{ours}/query", f"{theirs}.q_proj", bias=True),
        *linear(f"{ours}/key", f"{theirs}.k_proj", bias=True),
        *linear(f"{ours}/value", f"{theirs}.v_proj", bias=True),
        *linear(f"{ours}/out", f"{theirs}.dense", bias=True),
        *linear(f"{block}/mlp/up", f"{layer}.mlp.fc1", bias=True),
        *linear(f"{block}/mlp/down", f"{layer}.mlp.fc2", bias=True),
        *layer_norm("decoder/final_norm", "model.final_layernorm"),
        Row("unembedding/bias", "lm_head.bias"),
    ]
    return rows if config.tie_embeddings else [*rows, *linear("unembedding", "lm_head", bias=False)]


def _write(config: ModelConfig) -> ConfigJson:
    dropout = {"embd_pdrop": config.dropout_rate}
    return llama.write_heads(config) | llama.write_partial_rotary(config) | dropout


_OTHER_NAMES = {"rms_norm_eps": "layer_norm_eps"}

FAMILIES = (
    Family(
        name="Phi",
        prefix="phi",
        preset=phi,
        sizes=SIZES,
        paper="Gunasekar et al. 2023, arXiv 2306.11644; Li et al. 2023, arXiv 2309.05463",
        objective="causal language modelling",
        configs=trained_by("phi", SIZES),
        huggingface=HuggingFace(
            model_type="phi",
            architecture="PhiForCausalLM",
            base=phi,
            fields={_OTHER_NAMES.get(key, key): path for key, path in llama.FIELDS.items()}
            | {"resid_pdrop": "dropout_rate"},
            table=huggingface_names,
            classifier=Classifier("PhiForSequenceClassification", LAST),
            token_classifier=token_classifier("PhiForCausalLM", "score"),
            constants={"qk_layernorm": False},
            read=llama.read_partial_rotary,
            write=_write,
            tied=llama.tied,
            ignored=llama.IGNORED,
        ),
    ),
)
