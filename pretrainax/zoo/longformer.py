"""Longformer (Beltagy et al. 2020, arXiv 2004.05150): RoBERTa with sliding windows and a global first token.

NOTE The released models were pretrained without a global token. After pretraining, the projections for global tokens
were initialized as copies of the projections for local attention (section 5).

In transformers, the caller of a model specifies the global tokens. In this package, the config specifies them, because
a config fully determines the function that a model computes. The field `sparse_attention.global_tokens` is:

- "first" for most files;
- "none" for LongformerForTokenClassification, which has no global tokens by default; the model then has no projections
  for global tokens;
- "question" for LongformerForQuestionAnswering, where all tokens of the question are global.
"""

import dataclasses

from pretrainax.config import Classify, LearnedPositions, ModelConfig, SlidingWindows, UserError
from pretrainax.zoo import roberta
from pretrainax.zoo.bert import CONSTANTS, FIELDS
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

SIZES = dict(roberta.SIZES)  # variant -> (layers, width, heads)


def longformer(variant: str = "base") -> ModelConfig:
    """Builds the model config of Longformer with a context of 4,096 tokens.

    Raises:
      UserError: the variant is unknown.
    """
    return dataclasses.replace(
        roberta.roberta(variant),
        position=LearnedPositions(4096, offset=2),
        layer_pattern=("local",),
        window=512,
        sparse_attention=SlidingWindows(),
    )


def _base() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = longformer("base")
    config.vocab_size, config.norm_epsilon, config.num_token_types = 30_522, 1e-12, 2
    return config


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' LongformerForMaskedLM."""
    ours, theirs = "encoder/blocks/self_attention", "longformer.encoder.layer.{layer}.attention.self"
    windows = config.sparse_attention
    has_global = isinstance(windows, SlidingWindows) and windows.global_tokens != "none"
    projections = ("query", "key", "value") if has_global else ()
    global_rows = [linear(f"{ours}/global_{name}", f"{theirs}.{name}_global", bias=True) for name in projections]
    return roberta.masked_lm_names("longformer") + sum(global_rows, [])


def _read(json: ConfigJson, config: ModelConfig) -> None:
    """Sets the positions and the window from config.json; the window must be even and the same in all layers."""
    roberta.read_positions(json, config)
    windows: object = config.window  # an integer, or a list with an entry per layer
    sizes = windows if isinstance(windows, list) else [windows] * config.num_layers
    if len(sizes) != config.num_layers or len(set(sizes)) != 1 or not isinstance(sizes[0], int) or sizes[0] % 2:
        raise UserError(
            f"config.json has attention_window {windows!r} for {config.num_layers} num_hidden_layers; only one even "
            "number for all layers is supported"
        )
    config.window = sizes[0]


def _write(config: ModelConfig) -> ConfigJson:
    return roberta.write_positions(config) | {"attention_window": [config.window] * config.num_layers}


FAMILIES = (
    Family(
        name="Longformer",
        prefix="longformer_",
        preset=longformer,
        sizes=SIZES,
        paper="Beltagy et al. 2020, arXiv 2004.05150",
        objective="masked language modelling",
        configs=config_variants("longformer", SIZES),
        huggingface=HuggingFace(
            model_type="longformer",
            architecture="LongformerForMaskedLM",
            base=_base,
            fields=FIELDS | {"attention_window": "window"},
            table=huggingface_names,
            # There is no `multiple_choice_class`: LongformerForMultipleChoice makes the tokens of the question global,
            # but our rows contain a copy of the question for each choice.
            sequence_classification_class=TaskClass(
                "LongformerForSequenceClassification", Classify(), "classifier.out_proj", "classifier.dense"
            ),
            # This class has no global tokens by default.
            token_classification_class=token_classification_class(
                "LongformerForMaskedLM", changes={"sparse_attention": SlidingWindows("none")}
            ),
            question_answering_class=question_answering_class(
                "LongformerForMaskedLM", changes={"sparse_attention": SlidingWindows("question")}
            ),
            constants=CONSTANTS,
            read=_read,
            write=_write,
            tied=lambda config: {
                "lm_head.decoder.weight": "longformer.embeddings.word_embeddings.weight",
                "lm_head.decoder.bias": "lm_head.bias",
            },
            ignored=(
                r"longformer\.embeddings\.position_ids",
                r"longformer\.pooler\.dense\..*",
                r"longformer\.encoder\.layer\.\d+\.attention\.self\.(query|key|value)_global\..*",
            ),
        ),
    ),
)
