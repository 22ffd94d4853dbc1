"""The Transformer (Vaswani et al. 2017, arXiv 1706.03762).

This is Marian's variant. Unlike in the paper's equations and in tensor2tensor, the attention projections have biases,
and the position vectors contain all sines, followed by all cosines.
"""

from pretrainax.config import ModelConfig, SinusoidalPositions, UserError
from pretrainax.zoo.bart import ALIASES, CONSTANTS, FIELDS, block_names, read_decoder, tied, write_decoder, zeros
from pretrainax.zoo.family import ConfigJson, Family, HuggingFace, NameRow, config_variants
from pretrainax.zoo.variants import pick

# variant -> (layers of each stack, width, feed-forward, heads, dropout)
SIZES = {
    "base": (6, 512, 2048, 8, 0.1),
    "big": (6, 1024, 4096, 16, 0.3),
}


def transformer(variant: str = "base") -> ModelConfig:
    """Builds the model config of the Transformer; raises UserError for an unknown variant."""
    num_layers, d_model, d_ff, num_heads, dropout_rate = pick("transformer", variant, SIZES)
    return ModelConfig(
        family="encoder_decoder",
        vocab_size=37_000,  # one vocabulary for English and German (section 5.1)
        num_layers=num_layers,
        d_model=d_model,
        d_ff=d_ff,
        num_heads=num_heads,
        position=SinusoidalPositions(),
        norm="layer",
        norm_at="post",
        norm_epsilon=1e-5,
        activation="relu",
        scale_embeddings=True,
        dropout_rate=dropout_rate,
        init_stddev=d_model**-0.5,  # as tensor2tensor initializes embeddings
    )


def _base() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = transformer("big")
    config.vocab_size, config.num_layers, config.activation, config.scale_embeddings = 58_101, 12, "gelu", False
    config.dropout_rate, config.init_stddev, config.num_decoder_layers = 0.1, 0.02, 12
    return config


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' MarianMTModel."""
    del config  # unused
    return [NameRow("token_embedding/embedding", "model.shared.weight"), *block_names("model")]


def _read(json: ConfigJson, config: ModelConfig) -> None:
    read_decoder(json, config)
    if json.get("decoder_vocab_size") not in (None, config.vocab_size):
        raise UserError(
            f"config.json has decoder_vocab_size {json['decoder_vocab_size']}; it must be the vocab_size of the encoder"
        )


def _write(config: ModelConfig) -> ConfigJson:
    return write_decoder(config) | {
        "pad_token_id": 0,  # ids of our vocabularies with sentinels; Marian's defaults assume 58,101 ids
        "eos_token_id": 1,
        "forced_eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


FAMILIES = (
    Family(
        name="Transformer",
        prefix="transformer_",
        preset=transformer,
        sizes=SIZES,
        paper="Vaswani et al. 2017, arXiv 1706.03762",
        objective="translation",
        configs=config_variants("transformer", SIZES),
        huggingface=HuggingFace(
            model_type="marian",
            architecture="MarianMTModel",
            base=_base,
            fields=FIELDS,
            table=huggingface_names,
            constants=CONSTANTS
            | {
                "normalize_embedding": False,
                "static_position_embeddings": True,
                "share_encoder_decoder_embeddings": True,
            },
            aliases=ALIASES,
            read=_read,
            write=_write,
            tied=tied,
            zeros=zeros,
            ignored=(r"model\.(encoder|decoder)\.embed_positions\.weight",),
        ),
    ),
)
