"""T5 1.0 and 1.1 (Raffel et al. 2020, arXiv 1910.10683; 1.1: the released checkpoints, and Shazeer 2020), and
derived models.

Flan-T5 (Chung et al. 2022, arXiv 2210.11416), mT5 (Xue et al. 2020, arXiv 2010.11934), ByT5 (Xue et al. 2021, arXiv
2105.13626), UL2 (Tay et al. 2022, arXiv 2205.05131).
"""

from collections.abc import Callable

from pretrainax.config import Classify, ModelConfig, RelativePositionBuckets, UserError
from pretrainax.zoo.family import (
    ConfigJson,
    Family,
    HuggingFace,
    NameRow,
    TaskClass,
    config_variants,
    linear,
    question_answering_class,
    token_classification_class,
)
from pretrainax.zoo.task_heads import HeadDropout
from pretrainax.zoo.variants import pick

# variant -> (layers of each stack, width, feed-forward, heads, head dimension)
SIZES = {
    # T5 1.1. The variants 3b and 11b are T5 1.1's xl and xxl.
    "small": (8, 512, 1024, 6, 64),
    "base": (12, 768, 2048, 12, 64),
    "large": (24, 1024, 2816, 16, 64),
    "3b": (24, 2048, 5120, 32, 64),
    "11b": (24, 4096, 10240, 64, 64),
    # T5 1.0
    "v1_0_small": (6, 512, 2048, 8, 64),
    "v1_0_base": (12, 768, 3072, 12, 64),
    "v1_0_large": (24, 1024, 4096, 16, 64),
    "v1_0_3b": (24, 1024, 16384, 32, 128),
    "v1_0_11b": (24, 1024, 65536, 128, 128),
}

# Variant of Flan-T5 and mT5 -> variant of T5 1.1
FLAN_SIZES = {"small": "small", "base": "base", "large": "large", "xl": "3b", "xxl": "11b"}
MT5_SIZES = dict(FLAN_SIZES)

# variant -> (encoder layers, decoder layers, width, feed-forward, heads of width 64)
BYT5_SIZES = {
    "small": (12, 4, 1472, 3584, 6),
    "base": (18, 6, 1536, 3968, 12),
    "large": (36, 12, 1536, 3840, 16),
    "xl": (36, 12, 2560, 6720, 32),
    "xxl": (36, 12, 4672, 12352, 64),
}

# columns as in SIZES
UL2_SIZES = {"20b": (32, 4096, 16384, 16, 256)}


def t5(variant: str = "base") -> ModelConfig:
    """Builds the model config of T5 1.1, or of T5 1.0 for a variant `v1_0_…`.

    Raises:
      UserError: the variant is unknown.
    """
    num_layers, d_model, d_ff, num_heads, head_dim = pick("t5", variant, SIZES)
    is_v1_0 = variant.startswith("v1_0_")
    return ModelConfig(
        family="encoder_decoder",
        vocab_size=32_128,  # 32,000 SentencePiece tokens and 100 sentinels, padded to a multiple of 128
        num_layers=num_layers,
        d_model=d_model,
        d_ff=d_ff,
        num_heads=num_heads,
        head_dim=head_dim,
        position=RelativePositionBuckets(num_buckets=32, max_distance=128),
        norm="rms",
        norm_at="pre",
        norm_epsilon=1e-6,
        activation="relu" if is_v1_0 else "gelu_tanh",
        gated=not is_v1_0,
        use_bias=False,
        tie_embeddings=is_v1_0,
        scale_tied_logits=is_v1_0,
        attention_scale=1.0,
        dropout_rate=0.1 if is_v1_0 else 0.0,  # 1.1 was pretrained without dropout
        attention_dropout_rate=0.1 if is_v1_0 else 0.0,  # Raffel et al. 2020, section 2.1
        init_stddev=None,
    )


def flan_t5(variant: str = "base") -> ModelConfig:
    """Builds the model config of Flan-T5: T5 1.1, fine-tuned on instructions.

    Raises:
      UserError: the variant is unknown.
    """
    return t5(pick("flan_t5", variant, FLAN_SIZES))


def mt5(variant: str = "base") -> ModelConfig:
    """Builds the model config of mT5: T5 1.1 with a vocabulary for 101 languages.

    Raises:
      UserError: the variant is unknown.
    """
    config = t5(pick("mt5", variant, MT5_SIZES))
    config.vocab_size = 250_112
    return config


def byt5(variant: str = "base") -> ModelConfig:
    """Builds the model config of ByT5: T5 1.1 with bytes as tokens and fewer decoder layers than encoder layers.

    Raises:
      UserError: the variant is unknown.
    """
    config = t5("base")
    sizes = pick("byt5", variant, BYT5_SIZES)
    config.num_layers, config.num_decoder_layers, config.d_model, config.d_ff, config.num_heads = sizes
    config.vocab_size = 384  # 256 bytes, 3 special tokens, 125 sentinels
    return config


def ul2(variant: str = "20b") -> ModelConfig:
    """Builds the model config of UL2: T5 1.1 with SiLU instead of GELU, and with T5 1.0's tied embeddings.

    Raises:
      UserError: the variant is unknown.
    """
    config = t5("base")
    sizes = pick("ul2", variant, UL2_SIZES)
    config.num_layers, config.d_model, config.d_ff, config.num_heads, config.head_dim = sizes
    # The released config.json of UL2 ties the embeddings, unlike the config.json of T5 1.1.
    config.activation, config.tie_embeddings, config.scale_tied_logits = "silu", True, True
    return config


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' T5ForConditionalGeneration and MT5ForConditionalGeneration."""
    # transformers uses the name DenseReluDense for all activations.
    blocks = [
        [*attention_rows(stack), *feed_forward_rows(stack, "DenseReluDense", config.gated)] for stack in config.stacks
    ]
    return outer_rows(config) + sum(blocks, [])


def outer_rows(config: ModelConfig) -> list[NameRow]:
    """Builds the name-table rows of embeddings, position biases, final norms and output matrix."""
    rows = [NameRow("token_embedding/embedding", "shared.weight")]
    if not config.tie_embeddings:
        rows += linear("unembedding", "lm_head", bias=False)
    for stack in config.stacks:
        first_attention = f"{stack}.block.0.layer.0.SelfAttention"  # the layers share the position biases of layer 0
        rows += [
            NameRow(f"{stack}/relative_bias/embedding", f"{first_attention}.relative_attention_bias.weight"),
            NameRow(f"{stack}/final_norm/scale", f"{stack}.final_layer_norm.weight"),
        ]
    return rows


def attention_rows(stack: str) -> list[NameRow]:
    """Builds the name-table rows of the attention sublayers of a stack, "encoder" or "decoder"."""
    block = f"{stack}.block.{{layer}}"
    rows = _attention(f"{stack}/blocks/self_attention", f"{block}.layer.0", "SelfAttention")
    if stack == "decoder":
        rows += _attention("decoder/blocks/cross_attention", f"{block}.layer.1", "EncDecAttention")
    return rows


def _attention(path: str, name: str, kind: str) -> list[NameRow]:
    return [
        NameRow(f"{path}_norm/scale", f"{name}.layer_norm.weight"),
        *linear(f"{path}/query", f"{name}.{kind}.q", bias=False),
        *linear(f"{path}/key", f"{name}.{kind}.k", bias=False),
        *linear(f"{path}/value", f"{name}.{kind}.v", bias=False),
        *linear(f"{path}/out", f"{name}.{kind}.o", bias=False),
    ]


def feed_forward_rows(stack: str, module: str, gated: bool, kind: str = "") -> list[NameRow]:
    """Builds the name-table rows of the feed-forward sublayers of a stack.

    Args:
      stack: "encoder" or "decoder".
      module: transformers' name of the module with the matrices, for example "DenseReluDense" or "mlp".
      gated: whether there is a gate matrix, in addition to the up and down matrices.
      kind: prefix of our names for the matrices: "experts_" for experts, "" for dense layers.
    """
    path, name = f"{stack}/blocks/mlp", f"{stack}.block.{{layer}}.layer.{2 if stack == 'decoder' else 1}"
    return [
        NameRow(f"{path}_norm/scale", f"{name}.layer_norm.weight"),
        *(linear(f"{path}/{kind}gate", f"{name}.{module}.wi_0", bias=False) if gated else []),
        *linear(f"{path}/{kind}up", f"{name}.{module}.wi_1" if gated else f"{name}.{module}.wi", bias=False),
        *linear(f"{path}/{kind}down", f"{name}.{module}.wo", bias=False),
    ]


# --- config.json ---------------------------------------------------------------------------------------------------


# feed_forward_proj of config.json -> (activation in transformers, our activation). The name matches transformers'
# activation, except for "gated-gelu" of T5 1.1.
PROJECTIONS = {
    "relu": ("relu", "relu"),
    "gelu": ("gelu", "gelu"),
    "gelu_new": ("gelu_new", "gelu_tanh"),
    "silu": ("silu", "silu"),
    "gated-relu": ("relu", "relu"),
    "gated-gelu": ("gelu_new", "gelu_tanh"),
    "gated-silu": ("silu", "silu"),
}


ALIASES = {"hidden_size": "d_model", "num_attention_heads": "num_heads", "head_dim": "d_kv"}


def _base() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    return t5("v1_0_small")


def _base_mt5() -> ModelConfig:
    config = mt5("small")
    config.dropout_rate = 0.1
    return config


def read_common(json: ConfigJson, config: ModelConfig, projection: str) -> None:
    """Sets the number of decoder layers, the activation, the gating and the attention dropout from config.json.

    Args:
      projection: default for `feed_forward_proj` if config.json lacks this key.

    Raises:
      UserError: the feed-forward type is not supported, or its keys contradict each other.
    """
    if json.get("num_hidden_layers", config.num_layers) != config.num_layers:
        raise UserError(f"config.json has num_hidden_layers {json['num_hidden_layers']}, and other num_layers")
    if config.num_decoder_layers == config.num_layers:
        config.num_decoder_layers = None
    projection = json.get("feed_forward_proj", projection)
    if projection not in PROJECTIONS:
        raise UserError(f"config.json has feed_forward_proj {projection!r}; supported: {', '.join(PROJECTIONS)}")
    config.attention_dropout_rate = config.dropout_rate  # transformers has one rate for both
    theirs, config.activation = PROJECTIONS[projection]
    config.gated = projection.startswith("gated-")
    # In transformers, these two keys take precedence over feed_forward_proj.
    for key, value in (("dense_act_fn", theirs), ("is_gated_act", config.gated)):
        if json.get(key, value) != value:
            raise UserError(f"config.json has {key} {json[key]!r}, which contradicts its feed_forward_proj")


def _read(json: ConfigJson, config: ModelConfig) -> None:
    """Sets T5's fields from config.json, including tied embeddings and scaled logits (both or neither).

    transformers 5 always writes `tie_word_embeddings: true`. In its files, `scale_decoder_outputs` is true if the
    embeddings are tied.
    """
    read_common(json, config, "relu")
    tied = json.get("scale_decoder_outputs", json.get("tie_word_embeddings") is not False)
    config.tie_embeddings = config.scale_tied_logits = tied


def _read_mt5(json: ConfigJson, config: ModelConfig) -> None:
    """Sets mT5's fields from config.json; ignores `tie_word_embeddings`, which transformers 5 always sets to true.

    If a file has no lm_head.weight, the output matrix is a copy of the embeddings (see `HuggingFace.copied`).
    """
    read_common(json, config, "gated-gelu")


def write(config: ModelConfig) -> ConfigJson:
    """Returns the config.json keys of T5; raises UserError if transformers' T5 does not support the activation."""
    feed_forward = (config.activation, config.gated)
    names = [name for name, (_, ours) in PROJECTIONS.items() if (ours, name.startswith("gated-")) == feed_forward]
    if not names:
        raise UserError(f"T5 of transformers has no gated config.model.activation={config.activation!r}")
    return {
        "feed_forward_proj": names[0],
        "d_kv": config.dim_per_head,
        "num_decoder_layers": config.last_stack.num_layers,
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": 0,  # valid for T5's vocabularies, and for our vocabularies with sentinels
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


def _huggingface(
    model_type: str,
    architecture: str,
    base: Callable[[], ModelConfig],
    read: Callable[[ConfigJson, ModelConfig], None],
) -> HuggingFace:
    """Builds the `HuggingFace` conversion of T5 or mT5, which differ in model type, class, defaults and `read`."""
    return HuggingFace(
        model_type=model_type,
        architecture=architecture,
        base=base,
        fields={
            "vocab_size": "vocab_size",
            "num_layers": "num_layers",
            "num_decoder_layers": "num_decoder_layers",
            "d_model": "d_model",
            "d_ff": "d_ff",
            "num_heads": "num_heads",
            "d_kv": "head_dim",
            "layer_norm_epsilon": "norm_epsilon",
            "relative_attention_num_buckets": "position.num_buckets",
            "relative_attention_max_distance": "position.max_distance",
            "dropout_rate": "dropout_rate",
        },
        nullable=("num_decoder_layers",),  # null: equal to num_layers
        aliases=ALIASES,
        table=huggingface_names,
        sequence_classification_class=TaskClass(
            architecture.replace("ConditionalGeneration", "SequenceClassification"),
            Classify(pooling="last"),
            "classification_head.out_proj",
            "classification_head.dense",
            dropout=HeadDropout(default=0.0),
            prefix="transformer.",
        ),
        token_classification_class=token_classification_class(
            architecture, prefix="transformer.", family="encoder", dropout=HeadDropout(default=0.0)
        ),
        question_answering_class=question_answering_class(architecture),
        constants={"is_encoder_decoder": True, "is_decoder": False},
        read=read,
        write=write,
        tied=lambda config: {
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
            **({"lm_head.weight": "shared.weight"} if config.tie_embeddings else {}),
        },
        # transformers 5 ties the embeddings of all new models, also of those that do not scale tied logits.
        copied=lambda config: {} if config.tie_embeddings else {"lm_head.weight": "shared.weight"},
        # Older files contain this tensor, which transformers also ignores.
        ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )


HUGGINGFACE = _huggingface("t5", "T5ForConditionalGeneration", _base, _read)

FAMILIES = (
    Family(
        name="T5",
        prefix="t5_",
        preset=t5,
        sizes=SIZES,
        paper="Raffel et al. 2020, arXiv 1910.10683",
        objective="span corruption",
        configs=config_variants("t5_base", SIZES),
        huggingface=HUGGINGFACE,
    ),
    Family(
        name="Flan-T5",
        prefix="flan_t5_",
        preset=flan_t5,
        sizes=FLAN_SIZES,
        paper="Chung et al. 2022, arXiv 2210.11416",
        objective="span corruption, then instructions",
        huggingface=HUGGINGFACE,
    ),
    Family(
        name="mT5",
        prefix="mt5_",
        preset=mt5,
        sizes=MT5_SIZES,
        paper="Xue et al. 2020, arXiv 2010.11934",
        objective="span corruption in 101 languages",
        huggingface=_huggingface("mt5", "MT5ForConditionalGeneration", _base_mt5, _read_mt5),
    ),
    Family(
        name="ByT5",
        prefix="byt5_",
        preset=byt5,
        sizes=BYT5_SIZES,
        paper="Xue et al. 2021, arXiv 2105.13626",
        objective="span corruption of bytes",
        huggingface=HUGGINGFACE,
    ),
    Family(
        name="UL2",
        prefix="ul2_",
        preset=ul2,
        sizes=UL2_SIZES,
        paper="Tay et al. 2022, arXiv 2205.05131",
        objective="mixture of denoisers",
        configs=config_variants("ul2_base", UL2_SIZES),
        huggingface=HUGGINGFACE,
    ),
)
