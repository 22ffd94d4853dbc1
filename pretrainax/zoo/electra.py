"""ELECTRA (Clark et al. 2020, arXiv 2003.10555).

A preset describes the pretraining model, which has a discriminator and a generator. transformers has one class for the
discriminator and another for the generator, but none for the pretraining model. `HUGGINGFACE` converts the config of a
discriminator or of a generator. `models.electra` splits the pretraining model into these two, and joins them again:

    config, params = models.electra.discriminator(config, params)   # exported as ElectraForPreTraining
    config, params = models.electra.generator(config, params)       # exported as ElectraForMaskedLM
    params = models.electra.join(config, discriminator_params, generator_params)

A config.json describes only a discriminator or only a generator, so a config read from it has no `config.generator`.
"""

from pretrainax.config import Classify, Generator, ModelConfig, UserError
from pretrainax.zoo.bert import FIELDS, bert, encoder_names
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
    token_classification_class,
)
from pretrainax.zoo.task_heads import HeadDropout
from pretrainax.zoo.variants import pick

# variant -> (layers, width, heads, width of the embeddings, width of the generator / width). The feed-forward width is
# 4 x the width, heads have width 64, and the generator and the discriminator have the same number of layers.
SIZES = {
    "small": (12, 256, 4, 128, 1 / 4),
    "base": (12, 768, 12, 768, 1 / 3),
    "large": (24, 1024, 16, 1024, 1 / 4),
}


def electra(variant: str = "base") -> ModelConfig:
    """Builds the model config of ELECTRA (uncased): the discriminator and its generator.

    Raises:
      UserError: the variant is unknown.
    """
    num_layers, d_model, num_heads, embedding_dim, generator_fraction = pick("electra", variant, SIZES)
    width = round(d_model * generator_fraction)
    config = _base()
    config.num_layers, config.d_model, config.d_ff, config.num_heads = num_layers, d_model, 4 * d_model, num_heads
    config.embedding_dim = None if embedding_dim == d_model else embedding_dim
    config.generator = Generator(num_layers=num_layers, d_model=width, d_ff=4 * width, num_heads=width // 64)
    return config


def _base() -> ModelConfig:
    """Builds the config with transformers' defaults for keys missing from config.json: the small discriminator."""
    config = bert("base")
    config.d_model, config.d_ff, config.num_heads, config.embedding_dim = 256, 1024, 4, 128
    config.masked_lm_head, config.pair_head, config.replaced_token_head = False, False, True
    return config


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in ElectraForPreTraining, or ElectraForMaskedLM with `config.masked_lm_head`."""
    rows = encoder_names("electra")
    if config.embedding_dim:
        rows += linear("embedding_projection", "electra.embeddings_project", bias=True)
    if config.masked_lm_head:
        return [
            *rows,
            *linear("masked_lm_head/dense", "generator_predictions.dense", bias=True),
            *layer_norm("masked_lm_head/norm", "generator_predictions.LayerNorm"),
            NameRow("unembedding/bias", "generator_lm_head.bias"),
        ]
    return [
        *rows,
        *linear("replaced_token_head/dense", "discriminator_predictions.dense", bias=True),
        *linear("replaced_token_head/output", "discriminator_predictions.dense_prediction", bias=True),
    ]


def _architecture(config: ModelConfig) -> str:
    return "ElectraForMaskedLM" if config.masked_lm_head else "ElectraForPreTraining"


def _read(json: ConfigJson, config: ModelConfig) -> None:
    """Sets the heads and the embedding width from config.json; raises UserError for unsupported values."""
    supported = ("ElectraForPreTraining", "ElectraForMaskedLM", "ElectraModel")  # ElectraModel has no head
    architecture = (json.get("architectures") or supported)[0]
    if architecture not in supported:
        raise UserError(
            f"config.json has architectures {[architecture]}; supported for 'electra': {', '.join(supported)}"
        )
    config.masked_lm_head = architecture == "ElectraForMaskedLM"
    config.replaced_token_head = not config.masked_lm_head
    if config.embedding_dim == config.d_model:  # a projection exists only if the widths differ
        config.embedding_dim = None
    check_tied(json, config)
    if config.masked_lm_head and config.activation != "gelu":  # the head in transformers always uses GELU
        raise UserError(f"config.json has hidden_act {json['hidden_act']!r}; ElectraForMaskedLM supports only 'gelu'")


def _write(config: ModelConfig) -> ConfigJson:
    return {
        "embedding_size": config.embedding_width,
        "tie_word_embeddings": True,
    }


def _tied(config: ModelConfig) -> dict[str, str]:
    if not config.masked_lm_head:
        return {}
    return {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"}


HUGGINGFACE = HuggingFace(
    model_type="electra",
    architecture=_architecture,
    base=_base,
    fields=FIELDS | {"embedding_size": "embedding_dim"},
    table=huggingface_names,
    sequence_classification_class=TaskClass(
        "ElectraForSequenceClassification",
        Classify(hidden="gelu"),
        "classifier.out_proj",
        "classifier.dense",
        dropout=HeadDropout(),
    ),
    multiple_choice_class=TaskClass(
        "ElectraForMultipleChoice",
        Classify(hidden="gelu", kind="choice"),
        "classifier",
        "sequence_summary.summary",
        constants={"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"},
        dropout=HeadDropout("summary_last_dropout", 0.1),
    ),
    token_classification_class=token_classification_class("ElectraForPreTraining", dropout=HeadDropout()),
    question_answering_class=question_answering_class("ElectraForPreTraining"),
    constants={
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
    },
    read=_read,
    write=_write,
    tied=_tied,
    ignored=(r"electra\.embeddings\.(position|token_type)_ids",),
)

FAMILY = Family(
    name="ELECTRA",
    prefix="electra_",
    preset=electra,
    sizes=SIZES,
    paper="Clark et al. 2020, arXiv 2003.10555",
    objective="replaced token detection",
    configs=config_variants("electra_small", ("small",)) | config_variants("electra_base", ("base", "large")),
    huggingface=HUGGINGFACE,
)

FAMILIES = (FAMILY,)
