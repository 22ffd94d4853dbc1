"""RoBERTa (Liu et al. 2019, arXiv 1907.11692) and XLM-R (Conneau et al. 2019, arXiv 1911.02116)."""

from collections.abc import Callable

from pretrainax.config import Classify, LearnedPositions, ModelConfig, UserError
from pretrainax.zoo.bert import CONSTANTS, FIELDS, encoder_names
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
    token_classification_class,
)
from pretrainax.zoo.task_heads import HeadDropout
from pretrainax.zoo.variants import pick

# variant -> (layers, width, heads). The feed-forward width is 4 x the width.
SIZES = {
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}
XLM_SIZES = dict(SIZES)


def roberta(variant: str = "base") -> ModelConfig:
    """Builds the model config of RoBERTa; raises UserError for an unknown variant."""
    return _encoder(*pick("roberta", variant, SIZES), vocab_size=50_265)


def xlm_roberta(variant: str = "base") -> ModelConfig:
    """Builds the model config of XLM-R; raises UserError for an unknown variant."""
    return _encoder(*pick("xlm_roberta", variant, XLM_SIZES), vocab_size=250_002)


def _encoder(num_layers: int, d_model: int, num_heads: int, vocab_size: int) -> ModelConfig:
    """Builds the model config of RoBERTa with the given sizes."""
    return ModelConfig(
        family="encoder",
        vocab_size=vocab_size,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=4 * d_model,
        num_heads=num_heads,
        position=LearnedPositions(512, offset=2),  # fairseq numbers positions from (padding id 1) + 1
        norm="layer",
        norm_at="post",
        norm_epsilon=1e-5,
        activation="gelu",
        embedding_norm=True,
        num_token_types=1,
        masked_lm_head=True,
        dropout_rate=0.1,
        attention_dropout_rate=0.1,  # Liu et al. 2019, table 9
    )


def _base() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = roberta("base")
    config.norm_epsilon, config.num_token_types, config.position = 1e-12, 2, LearnedPositions(510, offset=2)
    return config


def _xlm_base() -> ModelConfig:
    config = _base()
    config.vocab_size = 30_522
    return config


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' RobertaForMaskedLM and XLMRobertaForMaskedLM."""
    del config  # unused
    return masked_lm_names("roberta")


def masked_lm_names(prefix: str) -> list[NameRow]:
    """Builds the name-table rows of transformers' RobertaForMaskedLM and of classes that share its tensor names.

    Args:
      prefix: the first component of the tensor names outside the head: "roberta" or, for example, "longformer".
    """
    return [
        *encoder_names(prefix),
        *linear("masked_lm_head/dense", "lm_head.dense", bias=True),
        *layer_norm("masked_lm_head/norm", "lm_head.layer_norm"),
        NameRow("unembedding/bias", "lm_head.bias"),
    ]


def read_positions(json: ConfigJson, config: ModelConfig) -> None:
    """Sets the number of positions and their offset from `max_position_embeddings` and `pad_token_id` in config.json.

    Raises:
      UserError: `pad_token_id` is invalid, or the activation is not "gelu".
    """
    padding_id = json.get("pad_token_id", 1)
    num_rows = config.position.max_length if "max_position_embeddings" in json else 512
    if not isinstance(padding_id, int) or not 0 <= padding_id < num_rows - 1:
        raise UserError(
            f"config.json has pad_token_id {padding_id!r}: it must be an int below max_position_embeddings - 1"
        )
    config.position = LearnedPositions(num_rows - padding_id - 1, offset=padding_id + 1)
    if config.activation != "gelu":  # transformers' masked LM head always uses GELU
        raise UserError(f"config.json has hidden_act {json['hidden_act']!r}; only 'gelu' is supported for RoBERTa")


def write_positions(config: ModelConfig) -> ConfigJson:
    """Returns the config.json keys that `read_positions` reads: number of position embeddings and padding id."""
    position = config.position
    return {
        "max_position_embeddings": position.max_length + position.offset,
        "pad_token_id": position.offset - 1,
    }


def _huggingface(model_type: str, architecture: str, base: Callable[[], ModelConfig]) -> HuggingFace:
    """Builds the `HuggingFace` conversion of RoBERTa or XLM-R, which differ in model type, class names and defaults."""
    return HuggingFace(
        model_type=model_type,
        architecture=architecture,
        base=base,
        fields=FIELDS,
        table=huggingface_names,
        sequence_classification_class=TaskClass(
            architecture.replace("MaskedLM", "SequenceClassification"),
            Classify(),
            "classifier.out_proj",
            "classifier.dense",
            dropout=HeadDropout(),
        ),
        multiple_choice_class=TaskClass(
            architecture.replace("MaskedLM", "MultipleChoice"),
            Classify(kind="choice"),
            "classifier",
            "roberta.pooler.dense",
        ),
        token_classification_class=token_classification_class(architecture, dropout=HeadDropout()),
        question_answering_class=question_answering_class(architecture),
        constants=CONSTANTS,
        read=read_positions,
        write=write_positions,
        tied=lambda config: {
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        ignored=(r"roberta\.embeddings\.(position|token_type)_ids", r"roberta\.pooler\.dense\..*"),
    )


FAMILIES = (
    Family(
        name="RoBERTa",
        prefix="roberta_",
        preset=roberta,
        sizes=SIZES,
        paper="Liu et al. 2019, arXiv 1907.11692",
        objective="masked language modelling",
        configs=config_variants("roberta_base", SIZES),
        huggingface=_huggingface("roberta", "RobertaForMaskedLM", _base),
    ),
    Family(
        name="XLM-R",
        prefix="xlm_roberta_",
        preset=xlm_roberta,
        sizes=XLM_SIZES,
        paper="Conneau et al. 2019, arXiv 1911.02116",
        objective="masked language modelling in 100 languages",
        huggingface=_huggingface("xlm-roberta", "XLMRobertaForMaskedLM", _xlm_base),
    ),
)
