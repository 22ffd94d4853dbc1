"""DeBERTa v2 and v3 (He et al. 2020, arXiv 2006.03654; He et al. 2021, arXiv 2111.09543).

transformers has one model type for v2 and v3, with two classes: a masked LM without the mask decoder, and a model
without heads. The authors' files contain additional tensors, named as in the authors' classes. In config.json,
`architectures` selects the class:

    DebertaV2ForMaskedLM         transformers' masked LM
    DebertaV2Model               no head
    MaskedLanguageModel          the authors' masked LM: v2, and the generators of v3
    ReplacedTokenDetectionModel  the authors' discriminator: v3

The released config.json files have no `architectures`. A model with a convolution is then read as v2, and a model
without a convolution as v3. The released files of v3 contain the discriminator, and tensors for continued pretraining:
`lm_predictions.*` and the position embeddings belong to the mask decoder, and `…_embeddings._weight` is the difference
from the generator's embeddings. `…_embeddings.weight` already includes this difference. (This is based on the released
code and on lists of the tensors; the files were not available.)
"""

import dataclasses

from pretrainax.config import Classify, DisentangledPositions, Generator, ModelConfig, UserError
from pretrainax.zoo.bert import FIELDS
from pretrainax.zoo.family import (
    ConfigJson,
    Family,
    HuggingFace,
    NameRow,
    TaskClass,
    check_tied,
    config_variants,
    layer_norm,
    linear,
    question_answering_class,
    their_activation,
    token_classification_class,
)
from pretrainax.zoo.task_heads import HeadDropout
from pretrainax.zoo.variants import pick

# variant -> (layers, width, heads). The feed-forward width is 4 x the width, and heads have width 64.
V2_SIZES = {
    "xlarge": (24, 1536, 24),
    "xxlarge": (48, 1536, 24),
}

# variant -> (layers, width, heads, vocabulary)
V3_SIZES = {
    "xsmall": (12, 384, 6, 128_100),
    "small": (6, 768, 12, 128_100),
    "base": (12, 768, 12, 128_100),
    "large": (24, 1024, 16, 128_100),
    "multilingual_base": (12, 768, 12, 251_000),
}


def deberta_v2(variant: str = "xlarge") -> ModelConfig:
    """Builds the model config of DeBERTa v2 with its mask decoder; raises UserError for an unknown variant."""
    num_layers, d_model, num_heads = pick("deberta_v2", variant, V2_SIZES)
    config = _base()
    config.num_layers, config.d_model, config.d_ff, config.num_heads = num_layers, d_model, 4 * d_model, num_heads
    config.input_convolution = 3
    config.masked_lm_head = config.enhanced_mask_decoder = True
    return config


def deberta_v3(variant: str = "base") -> ModelConfig:
    """Builds the model config of DeBERTa v3: the discriminator and its generator.

    The generator has the same width and half as many layers (He et al. 2021, section 3.1; rtd_base.json). The generator
    has a mask decoder, the discriminator has none (released code).

    Raises:
      UserError: the variant is unknown.
    """
    num_layers, d_model, num_heads, vocab_size = pick("deberta_v3", variant, V3_SIZES)
    config = _base()
    config.vocab_size = vocab_size
    config.num_layers, config.d_model, config.d_ff, config.num_heads = num_layers, d_model, 4 * d_model, num_heads
    config.replaced_token_head = config.replaced_token_context = config.enhanced_mask_decoder = True
    config.generator = Generator(
        num_layers=num_layers // 2,
        d_model=d_model,
        d_ff=4 * d_model,
        num_heads=num_heads,
        share_embeddings="gradient_disentangled",
        loss_weight=50.0,
    )
    return config


def _base() -> ModelConfig:
    """Builds the model config with transformers' defaults for keys missing from config.json, without heads."""
    return ModelConfig(
        family="encoder",
        vocab_size=128_100,
        num_layers=24,
        d_model=1536,
        d_ff=6144,
        num_heads=24,
        position=DisentangledPositions(num_buckets=256, max_distance=512, max_length=512),
        norm="layer",
        norm_at="post",
        norm_epsilon=1e-7,
        activation="gelu",
        embedding_norm=True,
        dropout_rate=0.1,
        attention_dropout_rate=0.1,
    )


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names for the class that the heads of `config` select; see the module docstring."""
    architecture = _architecture(config)
    base = "" if architecture == "DebertaV2Model" else "deberta."
    block, layer = "encoder/blocks", base + "encoder.layer.{layer}"
    rows = [
        NameRow("token_embedding/embedding", f"{base}embeddings.word_embeddings.weight"),
        *layer_norm("embedding_norm", f"{base}embeddings.LayerNorm"),
        NameRow("encoder/relative_embedding/embedding", f"{base}encoder.rel_embeddings.weight"),
        *layer_norm("encoder/relative_embedding/norm", f"{base}encoder.LayerNorm"),
        *linear(f"{block}/self_attention/query", f"{layer}.attention.self.query_proj", bias=True),
        *linear(f"{block}/self_attention/key", f"{layer}.attention.self.key_proj", bias=True),
        *linear(f"{block}/self_attention/value", f"{layer}.attention.self.value_proj", bias=True),
        *linear(f"{block}/self_attention/out", f"{layer}.attention.output.dense", bias=True),
        *layer_norm(f"{block}/self_attention_norm", f"{layer}.attention.output.LayerNorm"),
        *linear(f"{block}/mlp/up", f"{layer}.intermediate.dense", bias=True),
        *linear(f"{block}/mlp/down", f"{layer}.output.dense", bias=True),
        *layer_norm(f"{block}/mlp_norm", f"{layer}.output.LayerNorm"),
    ]
    if config.input_convolution is not None:
        # Our kernel has the shape [tokens, in, out]; the kernel of torch.nn.Conv1d is [out, in, tokens].
        rows += linear("encoder/convolution", f"{base}encoder.conv.conv", bias=True)
        rows += layer_norm("encoder/convolution/norm", f"{base}encoder.conv.LayerNorm")
    if architecture == "ReplacedTokenDetectionModel":
        rows += linear("replaced_token_head/dense", "mask_predictions.dense", bias=True)
        rows += layer_norm("replaced_token_head/norm", "mask_predictions.LayerNorm")
        rows += linear("replaced_token_head/output", "mask_predictions.classifier", bias=True)
    if architecture == "MaskedLanguageModel":
        rows.append(NameRow("position_embedding/embedding", f"{base}embeddings.position_embeddings.weight"))
    if config.masked_lm_head:
        is_authors_class = architecture == "MaskedLanguageModel"
        head, dense = (
            ("lm_predictions.lm_head",) * 2 if is_authors_class else ("cls.predictions", "cls.predictions.transform")
        )
        rows += linear("masked_lm_head/dense", f"{dense}.dense", bias=True)
        rows += layer_norm("masked_lm_head/norm", f"{dense}.LayerNorm")
        rows.append(NameRow("unembedding/bias", f"{head}.bias"))
    return rows


def _architecture(config: ModelConfig) -> str:
    """Returns the name of the class that has the heads of `config`; see the module docstring."""
    if config.replaced_token_head:
        return "ReplacedTokenDetectionModel"
    if config.enhanced_mask_decoder:
        return "MaskedLanguageModel"
    return "DebertaV2ForMaskedLM" if config.masked_lm_head else "DebertaV2Model"


# Required keys and values of config.json. With other values, transformers computes a different function.
_REQUIRED = {
    "relative_attention": True,
    "position_biased_input": False,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}


def _read(json: ConfigJson, config: ModelConfig) -> None:
    """Sets positions, convolution and heads from config.json; raises UserError for unsupported values."""
    for key, value in _REQUIRED.items():
        if json.get(key) != value:
            raise UserError(f"config.json has {key} {json.get(key)!r}; only {value!r} is supported for 'deberta-v2'")
    attention_types = json.get("pos_att_type")
    if not attention_types or sorted(
        attention_types.split("|") if isinstance(attention_types, str) else attention_types
    ) != ["c2p", "p2c"]:
        raise UserError(
            f"config.json has pos_att_type {attention_types!r}; only 'p2c|c2p' is supported for 'deberta-v2'"
        )
    position = config.position
    if position.num_buckets < 1:
        raise UserError(f"config.json has position_buckets {position.num_buckets}; it must be at least 1")
    if position.max_distance < 1:
        position.max_distance = position.max_length
    for key, value in (("embedding_size", config.d_model), ("attention_head_size", config.dim_per_head)):
        if json.get(key, value) != value:
            raise UserError(f"config.json has {key} {json[key]!r}; only {value} is supported for 'deberta-v2'")
    size = json.get("conv_kernel_size", 0)
    config.input_convolution = size if size > 0 else None
    if size > 0 and (size % 2 == 0 or json.get("conv_groups", 1) != 1):
        raise UserError(f"config.json has conv_kernel_size {size}, conv_groups {json.get('conv_groups', 1)}; only "
                        "odd sizes with one group are supported for 'deberta-v2'")  # fmt: skip
    if size > 0 and json.get("conv_act", "tanh") != json.get("hidden_act", "gelu"):
        raise UserError(f"config.json has conv_act {json.get('conv_act', 'tanh')!r}; it must equal hidden_act")
    default_architecture = "ReplacedTokenDetectionModel" if config.input_convolution is None else "MaskedLanguageModel"
    architecture = (json.get("architectures") or [default_architecture])[0]
    config.replaced_token_head = config.replaced_token_context = architecture == "ReplacedTokenDetectionModel"
    config.enhanced_mask_decoder = architecture == "MaskedLanguageModel"
    config.masked_lm_head = architecture in ("MaskedLanguageModel", "DebertaV2ForMaskedLM")
    check_tied(json, config)
    if _architecture(config) != architecture:
        raise UserError(f"config.json has architectures {[architecture]}, which is not supported (see zoo/deberta.py)")


def _write(config: ModelConfig) -> ConfigJson:
    """Returns the config.json keys for disentangled attention and the convolution."""
    json = {
        **_REQUIRED,
        "tie_word_embeddings": True,
        "pos_att_type": ["p2c", "c2p"],
        "attention_head_size": config.dim_per_head,
    }
    if config.input_convolution is not None:
        json |= {"conv_kernel_size": config.input_convolution, "conv_act": their_activation(config)}
    return json


def _tied(config: ModelConfig) -> dict[str, str]:
    if _architecture(config) != "DebertaV2ForMaskedLM":
        return {}
    return {
        "cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


HUGGINGFACE = HuggingFace(
    model_type="deberta-v2",
    architecture=_architecture,
    # transformers' default for the buckets and the distance is -1: off, or as long as the context.
    base=lambda: dataclasses.replace(_base(), position=DisentangledPositions(-1, -1, max_length=512)),
    fields={key: field for key, field in FIELDS.items() if key != "type_vocab_size"}
    | {"position_buckets": "position.num_buckets", "max_relative_positions": "position.max_distance"},
    table=huggingface_names,
    sequence_classification_class=TaskClass(
        "DebertaV2ForSequenceClassification",
        Classify(hidden="gelu"),
        "classifier",
        "pooler.dense",
        prefix="deberta.",
        constants={"pooler_hidden_act": "gelu"},
        dropout=HeadDropout("cls_dropout"),
    ),
    multiple_choice_class=TaskClass(
        "DebertaV2ForMultipleChoice",
        Classify(hidden="gelu", kind="choice"),
        "classifier",
        "pooler.dense",
        prefix="deberta.",
        constants={"pooler_hidden_act": "gelu"},
        dropout=HeadDropout("cls_dropout"),
    ),
    token_classification_class=token_classification_class("DebertaV2ForMaskedLM", prefix="deberta."),
    question_answering_class=question_answering_class("DebertaV2ForMaskedLM", prefix="deberta."),
    constants={"type_vocab_size": 0, "legacy": True},
    read=_read,
    write=_write,
    tied=_tied,
    ignored=(
        r"(deberta\.)?embeddings\.(position|token_type)_ids",
        r"deberta\.embeddings\.(word|position)_embeddings\._weight",
        r"deberta\.embeddings\.position_embeddings\.weight",
        r"(lm|mask)_predictions\..*",
    ),
)

FAMILIES = (
    Family(
        name="DeBERTa v2",
        prefix="deberta_v2_",
        preset=deberta_v2,
        sizes=V2_SIZES,
        paper="He et al. 2020, arXiv 2006.03654",
        objective="masked LM",
        huggingface=HUGGINGFACE,
    ),
    Family(
        name="DeBERTa v3",
        prefix="deberta_v3_",
        preset=deberta_v3,
        sizes=V3_SIZES,
        paper="He et al. 2021, arXiv 2111.09543",
        objective="replaced token detection",
        configs=config_variants("deberta_v3_base", ("xsmall", "small", "base", "large")),
        huggingface=HUGGINGFACE,
    ),
)
