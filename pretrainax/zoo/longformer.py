"""Longformer (Beltagy et al. 2020, arXiv 2004.05150): RoBERTa with sliding windows and a global first token.

NOTE The released models were pretrained without a global token; after pretraining, the projections for global tokens
were initialized as copies of the projections for local attention (section 5). In transformers, each call specifies the
global tokens. Here the field `sparse_attention.global_tokens` specifies them, because all that changes the function of
a model is in its config. The value is "first" for most files. LongformerForTokenClassification has no global tokens by
default, so the value is "none", and the unused projections for global tokens are left out.
LongformerForQuestionAnswering makes the tokens of the question global, so the value is "question".
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
    """Returns the model config of Longformer with a context of 4,096 tokens.

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
    """Returns the model config that transformers assumes for keys that config.json lacks."""
    config = longformer("base")
    config.vocab_size, config.norm_epsilon, config.num_token_types = 30_522, 1e-12, 2
    return config


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Returns the name table of transformers' LongformerForMaskedLM: one `NameRow` per parameter."""
    ours, theirs = "encoder/blocks/self_attention", "longformer.encoder.layer.{layer}.attention.self"
    windows = config.sparse_attention
    has_global = isinstance(windows, SlidingWindows) and windows.global_tokens != "none"
    used = ("query", "key", "value") if has_global else ()
    maps = [linear(f"{ours}/global_{x}", f"{theirs}.{x}_global", bias=True) for x in used]
    return roberta.masked_lm_names("longformer") + sum(maps, [])


def _read(json: ConfigJson, config: ModelConfig) -> None:
    roberta.read_positions(json, config)
    windows = json.get("attention_window", config.window)
    each = windows if isinstance(windows, list) else [windows] * config.num_layers
    if len(each) != config.num_layers or len(set(each)) != 1 or not isinstance(each[0], int) or each[0] % 2:
        raise UserError(
            f"config.json has attention_window {windows!r} for {config.num_layers} num_hidden_layers; only one even "
            "number for all layers is supported"
        )
    config.window = each[0]


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
            fields=FIELDS,
            table=huggingface_names,
            # No `chooser`: LongformerForMultipleChoice makes the tokens of the question global, but our rows contain a
            # copy of the question for each choice.
            classifier=TaskClass(
                "LongformerForSequenceClassification", Classify(), "classifier.out_proj", "classifier.dense"
            ),
            # This class has no global tokens by default, so the projections for global tokens are unused.
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
