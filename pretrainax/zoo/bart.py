"""BART (Lewis et al. 2019, arXiv 1910.13461)."""

import dataclasses

from pretrainax.config import Classify, LearnedPositions, ModelConfig, UserError
from pretrainax.zoo.family import (
    ConfigJson,
    Family,
    HuggingFace,
    NameRow,
    TaskClass,
    config_variants,
    layer_norm,
    linear,
    question_answering_class,
)
from pretrainax.zoo.task_heads import HeadDropout
from pretrainax.zoo.variants import pick

# variant -> (layers of each stack, width, heads). The feed-forward width is 4 x the width.
SIZES = {
    "base": (6, 768, 12),
    "large": (12, 1024, 16),
}


def bart(variant: str = "base") -> ModelConfig:
    """Builds the model config of BART; raises UserError for an unknown variant."""
    num_layers, d_model, num_heads = pick("bart", variant, SIZES)
    return ModelConfig(
        family="encoder_decoder",
        vocab_size=50_265,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=4 * d_model,
        num_heads=num_heads,
        position=LearnedPositions(1024, offset=2),  # fairseq numbers positions from (padding id 1) + 1
        norm="layer",
        norm_at="post",
        norm_epsilon=1e-5,
        activation="gelu",
        embedding_norm=True,
        dropout_rate=0.1,
        attention_dropout_rate=0.1,  # from the released config.json; fairseq's architecture does not set it
    )


def block_names(prefix: str) -> list[NameRow]:
    """Builds the name-table rows of the encoder and decoder blocks of transformers' BartModel and MarianModel.

    Args:
      prefix: the first component of the tensor names in transformers, for example "model".
    """
    rows = []
    for stack, attentions in (
        ("encoder", {"self": "self_attn"}),
        ("decoder", {"self": "self_attn", "cross": "encoder_attn"}),
    ):
        block, layer = f"{stack}/blocks", f"{prefix}.{stack}.layers.{{layer}}"
        for kind, name in attentions.items():
            for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "out")):
                rows += linear(f"{block}/{kind}_attention/{ours}", f"{layer}.{name}.{theirs}_proj", bias=True)
            rows += layer_norm(f"{block}/{kind}_attention_norm", f"{layer}.{name}_layer_norm")
        rows += linear(f"{block}/mlp/up", f"{layer}.fc1", bias=True)
        rows += linear(f"{block}/mlp/down", f"{layer}.fc2", bias=True)
        rows += layer_norm(f"{block}/mlp_norm", f"{layer}.final_layer_norm")
    return rows


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' BartForConditionalGeneration."""
    del config  # unused
    return [
        NameRow("token_embedding/embedding", "model.shared.weight"),
        NameRow("position_embedding/embedding", "model.encoder.embed_positions.weight"),
        NameRow("decoder_position_embedding/embedding", "model.decoder.embed_positions.weight"),
        *layer_norm("embedding_norm", "model.encoder.layernorm_embedding"),
        *layer_norm("decoder_embedding_norm", "model.decoder.layernorm_embedding"),
        *block_names("model"),
    ]


# --- config.json ---------------------------------------------------------------------------------------------------


FIELDS = {  # key in config.json of BART and Marian -> field of ModelConfig
    "vocab_size": "vocab_size",
    "d_model": "d_model",
    "encoder_layers": "num_layers",
    "decoder_layers": "num_decoder_layers",
    "encoder_ffn_dim": "d_ff",
    "encoder_attention_heads": "num_heads",
    "activation_function": "activation",
    "dropout": "dropout_rate",
    "attention_dropout": "attention_dropout_rate",
    "init_std": "init_stddev",
    "scale_embedding": "scale_embeddings",
}
CONSTANTS = {
    "is_encoder_decoder": True,
    "is_decoder": False,
    "tie_word_embeddings": True,
    # keys of transformers 3, which had a single class for BART, mBART and Marian
    "normalize_before": False,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
}


ALIASES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}


def read_decoder(json: ConfigJson, config: ModelConfig) -> None:
    """Sets the number of decoder layers from config.json, and checks the other decoder sizes.

    Raises:
      UserError: the decoder and the encoder differ in the feed-forward width or in the number of heads.
    """
    if config.num_decoder_layers == config.num_layers:
        config.num_decoder_layers = None
    for key, default, encoder_value in (
        ("decoder_ffn_dim", 4096, config.d_ff),
        ("decoder_attention_heads", 16, config.num_heads),
    ):
        if json.get(key, default) != encoder_value:
            raise UserError(
                f"config.json has {key} {json.get(key, default)}; it must be {encoder_value}, as in the encoder"
            )


def write_decoder(config: ModelConfig) -> ConfigJson:
    return {
        "forced_eos_token_id": 2,  # transformers ends truncated outputs with this token id, EOS of BART's vocabulary
        "decoder_layers": config.last_stack.num_layers,
        "decoder_ffn_dim": config.d_ff,
        "decoder_attention_heads": config.num_heads,
    }


def tied(config: ModelConfig) -> dict[str, str]:
    """Maps the name of each tied copy of the token embeddings to the name of the original tensor."""
    del config  # unused
    copies = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    return dict.fromkeys(copies, "model.shared.weight")


def zeros(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of transformers' logits bias, which is zero in all supported files."""
    return {"final_logits_bias": (1, config.vocab_size)}


FAMILIES = (
    Family(
        name="BART",
        prefix="bart_",
        preset=bart,
        sizes=SIZES,
        paper="Lewis et al. 2019, arXiv 1910.13461",
        objective="text infilling, sentence permutation",
        configs=config_variants("bart_base", SIZES),
        huggingface=HuggingFace(
            model_type="bart",
            architecture="BartForConditionalGeneration",
            base=lambda: dataclasses.replace(bart("large"), num_decoder_layers=12, attention_dropout_rate=0.0),
            fields=FIELDS | {"max_position_embeddings": "position.max_length"},
            table=huggingface_names,
            sequence_classification_class=TaskClass(
                "BartForSequenceClassification",
                Classify(pooling="last"),
                "classification_head.out_proj",
                "classification_head.dense",
                dropout=HeadDropout(default=0.0),
            ),
            question_answering_class=question_answering_class("BartForConditionalGeneration"),
            constants=CONSTANTS | {"normalize_embedding": True, "static_position_embeddings": False},
            aliases=ALIASES,
            default_labels=3,
            read=read_decoder,
            write=write_decoder,
            tied=tied,
            zeros=zeros,
            ignored=(r"model\.(encoder|decoder)\.version",),  # the version number of fairseq's file format
        ),
    ),
)
