"""ModernBERT (Warner et al. 2024, arXiv 2412.13663)."""

from pretrainax.config import Classify, Extract, ModelConfig, RotaryPositions, Tag, UserError
from pretrainax.zoo import patterns, rotary
from pretrainax.zoo.family import (
    ConfigJson,
    Family,
    FusedPart,
    HuggingFace,
    NameRow,
    TaskClass,
    config_variants,
    linear,
    their_activation,
)
from pretrainax.zoo.task_heads import HeadDropout
from pretrainax.zoo.variants import pick

# variant -> (layers, width, feed-forward, heads)
SIZES = {
    "base": (22, 768, 1152, 12),
    "large": (28, 1024, 2624, 16),
}

# The tokenizer defines the special token ids. Without these keys, transformers would use the ids of the released
# vocabulary.
_SPECIAL_TOKEN_KEYS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


def modernbert(variant: str = "base") -> ModelConfig:
    """Builds the model config of ModernBERT with a context of 8,192 tokens.

    Raises:
      UserError: the variant is unknown.
    """
    num_layers, d_model, d_ff, num_heads = pick("modernbert", variant, SIZES)
    return ModelConfig(
        family="encoder",
        vocab_size=50_368,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=d_ff,
        num_heads=num_heads,
        position=RotaryPositions(max_length=8192, theta=160_000.0, local_theta=10_000.0),
        layer_pattern=("global", "local", "local"),
        window=128,
        norm="layer",
        norm_at="pre",
        norm_epsilon=1e-5,
        norm_starts_stream=True,
        activation="gelu",
        gated=True,
        use_bias=False,
        masked_lm_head=True,
        scale_residual_init=True,
    )


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' ModernBertForMaskedLM.

    In transformers, the first layer has no norm before attention, because the embeddings are already normalized. The
    first layer's norm in this package therefore maps to transformers' embedding norm.
    """
    del config  # unused
    block, layer = "encoder/blocks", "model.layers.{layer}"

    def fused_projection(name, i):  # third `i` of the fused query, key and value projection
        return linear(f"{block}/self_attention/{name}", f"{layer}.attn.Wqkv", bias=False, part=FusedPart(i, 1, 3))

    return [
        NameRow("token_embedding/embedding", "model.embeddings.tok_embeddings.weight"),
        NameRow(
            f"{block}/self_attention_norm/scale", f"{layer}.attn_norm.weight", first="model.embeddings.norm.weight"
        ),
        *fused_projection("query", 0),
        *fused_projection("key", 1),
        *fused_projection("value", 2),
        *linear(f"{block}/self_attention/out", f"{layer}.attn.Wo", bias=False),
        NameRow(f"{block}/mlp_norm/scale", f"{layer}.mlp_norm.weight"),
        *linear(f"{block}/mlp/gate", f"{layer}.mlp.Wi", bias=False, part=FusedPart(0, 1, 2)),
        *linear(f"{block}/mlp/up", f"{layer}.mlp.Wi", bias=False, part=FusedPart(1, 1, 2)),
        *linear(f"{block}/mlp/down", f"{layer}.mlp.Wo", bias=False),
        NameRow("encoder/final_norm/scale", "model.final_norm.weight"),
        *linear("masked_lm_head/dense", "head.dense", bias=False),
        NameRow("masked_lm_head/norm/scale", "head.norm.weight"),
        NameRow("unembedding/bias", "decoder.bias"),
    ]


def _read(json: ConfigJson, config: ModelConfig) -> None:
    if json.get("classifier_pooling", "cls") not in ("cls", "mean"):
        raise UserError(f"config.json has classifier_pooling {json['classifier_pooling']!r}; supported: cls, mean")
    if json.get("classifier_activation", "gelu") != json.get("hidden_activation", "gelu"):
        raise UserError(
            f"config.json has classifier_activation {json.get('classifier_activation', 'gelu')!r}; it must equal "
            f"hidden_activation, {json.get('hidden_activation', 'gelu')!r}"
        )
    if "sliding_window" in json:  # a property of the class, which sets local_attention
        config.window = 2 * json["sliding_window"]
    config.layer_pattern = _layer_pattern(json, config)
    if "local" not in config.layer_pattern:
        config.window = None
    theta, local_theta = json.get("global_rope_theta", 160_000.0), json.get("local_rope_theta", 10_000.0)
    for parameters in (json.get("rope_parameters") or {}).values():
        if isinstance(parameters, dict) and parameters.get("rope_type", "default") != "default":
            raise UserError(f"config.json has rope_parameters {parameters}; only rope_type 'default' is supported")
    rotary.read_both(json, config, theta, local_theta)
    if config.position.local_theta == config.position.theta:
        config.position.local_theta = None


def _layer_pattern(json: ConfigJson, config: ModelConfig) -> tuple[str, ...]:
    """Converts `layer_types` of config.json, or `global_attn_every_n_layers` of older files, to our `layer_pattern`."""
    types = json.get("layer_types")
    if types is None:
        return ("global", *["local"] * (json.get("global_attn_every_n_layers", 3) - 1))
    return patterns.shortest(patterns.kinds_of(types), usual=config.layer_pattern)


def _write(config: ModelConfig) -> ConfigJson:
    theta, local_theta = config.position.theta, config.position.local_theta
    thetas = {"full_attention": theta, "sliding_attention": theta if local_theta is None else local_theta}
    json = {
        "classifier_activation": their_activation(config),
        "layer_types": patterns.layer_types(config),
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
        "embedding_dropout": config.dropout_rate,
        **dict.fromkeys(_SPECIAL_TOKEN_KEYS),
    }
    return json | {"local_attention": 128 if config.window is None else config.window}  # may not be null


FAMILIES = (
    Family(
        name="ModernBERT",
        prefix="modernbert_",
        preset=modernbert,
        sizes=SIZES,
        paper="Warner et al. 2024, arXiv 2412.13663",
        objective="masked language modelling",
        configs=config_variants("modernbert_base", SIZES),
        huggingface=HuggingFace(
            model_type="modernbert",
            architecture="ModernBertForMaskedLM",
            base=modernbert,
            fields={
                "vocab_size": "vocab_size",
                "hidden_size": "d_model",
                "num_hidden_layers": "num_layers",
                "num_attention_heads": "num_heads",
                "intermediate_size": "d_ff",
                "hidden_activation": "activation",
                "mlp_dropout": "dropout_rate",
                "attention_dropout": "attention_dropout_rate",
                "initializer_range": "init_stddev",
                "norm_eps": "norm_epsilon",
                "max_position_embeddings": "position.max_length",
                "local_attention": "window",
            },
            table=huggingface_names,
            sequence_classification_class=TaskClass(
                "ModernBertForSequenceClassification",
                Classify(hidden="gelu", hidden_bias=False, hidden_norm=True),
                "classifier",
                "head.dense",
                "head.norm",
                dropout=HeadDropout(default=0.0),
            ),
            multiple_choice_class=TaskClass(
                "ModernBertForMultipleChoice",
                Classify(hidden="gelu", hidden_bias=False, hidden_norm=True, kind="choice"),
                "classifier",
                "head.dense",
                "head.norm",
                dropout=HeadDropout(default=0.0),
            ),
            question_answering_class=TaskClass(
                "ModernBertForQuestionAnswering",
                Extract(hidden="gelu", hidden_bias=False, hidden_norm=True),
                "classifier",
                "head.dense",
                "head.norm",
                dropout=HeadDropout(default=0.0),
            ),
            token_classification_class=TaskClass(
                "ModernBertForTokenClassification",
                Tag(hidden="gelu", hidden_bias=False, hidden_norm=True),
                "classifier",
                "head.dense",
                "head.norm",
                dropout=HeadDropout(default=0.0),
            ),
            constants={
                "norm_bias": False,
                "attention_bias": False,
                "mlp_bias": False,
                "classifier_bias": False,
                "decoder_bias": True,
                "tie_word_embeddings": True,
                "rope_scaling": None,
            },
            read=_read,
            write=_write,
            tied=lambda config: {"decoder.weight": "model.embeddings.tok_embeddings.weight"},
        ),
    ),
)
