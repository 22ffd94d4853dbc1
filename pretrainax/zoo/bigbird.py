"""BigBird (Zaheer et al. 2020, arXiv 2007.14062): BERT with block-sparse attention and 4,096 positions.

NOTE transformers applies dropout to the embeddings before their norm, and does not apply dropout to the weights of
block-sparse attention. In evaluation mode, transformers replaces all random blocks with the first block of the sequence
(see layers/sparse_attention/blocks.py).
"""

import dataclasses

from pretrainax.config import Classify, Extract, LearnedPositions, ModelConfig, RandomBlocks, UserError
from pretrainax.zoo import bert
from pretrainax.zoo.family import (
    ConfigJson,
    Family,
    HuggingFace,
    NameRow,
    TaskClass,
    config_variants,
    layer_norm,
    linear,
    token_classification_class,
)
from pretrainax.zoo.task_heads import HeadDropout
from pretrainax.zoo.variants import pick

SIZES = {"base": (12, 768, 12), "large": (24, 1024, 16)}  # variant -> (layers, width, heads)


def bigbird(variant: str = "base") -> ModelConfig:
    """Builds the model config of BigBird without a head for sentence pairs, which the paper does not train.

    Raises:
      UserError: the variant is unknown.
    """
    num_layers, d_model, num_heads = pick("bigbird", variant, SIZES)
    return dataclasses.replace(
        bert.bert("base"),
        vocab_size=50_358,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=4 * d_model,
        num_heads=num_heads,
        position=LearnedPositions(4096),
        sparse_attention=RandomBlocks(),
        activation="gelu_tanh",
        pair_head=False,
    )


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in BigBirdForPreTraining, or BigBirdForMaskedLM without `config.pair_head`."""
    pooler = {kind: f"bert.pooler.{kind}" for kind in ("weight", "bias")}
    renames = {f"bert.pooler.dense.{kind}": name for kind, name in pooler.items()}
    return [row._replace(name=renames.get(row.name, row.name)) for row in bert.huggingface_names(config)]


_read_pair_head = bert.read_pair_head("BigBirdForPreTraining", "BigBirdForMaskedLM", "BigBirdModel")


def _read(json: ConfigJson, config: ModelConfig) -> None:
    _read_pair_head(json, config)
    kind = json.get("attention_type", "block_sparse")
    if kind not in ("block_sparse", "original_full"):
        raise UserError(f"config.json has attention_type {kind!r}; supported: block_sparse, original_full")
    if kind == "original_full":
        config.sparse_attention = None


def _write(config: ModelConfig) -> ConfigJson:
    return {"attention_type": "block_sparse" if isinstance(config.sparse_attention, RandomBlocks) else "original_full"}


_HEAD_NAME = "qa_classifier"
_QUESTION_ANSWERING_CLASS = TaskClass(
    "BigBirdForQuestionAnswering",
    Extract(feed_forward=True, second_text=True),
    f"{_HEAD_NAME}.qa_outputs",
    extra_rows=(
        *linear("extractor/mlp/up", f"{_HEAD_NAME}.intermediate.dense", bias=True),
        *linear("extractor/mlp/down", f"{_HEAD_NAME}.output.dense", bias=True),
        *layer_norm("extractor/mlp_norm", f"{_HEAD_NAME}.output.LayerNorm"),
    ),
)

FAMILIES = (
    Family(
        name="BigBird",
        prefix="bigbird_",
        preset=bigbird,
        sizes=SIZES,
        paper="Zaheer et al. 2020, arXiv 2007.14062",
        objective="masked language modelling",
        configs=config_variants("bigbird", SIZES),
        huggingface=HuggingFace(
            model_type="big_bird",
            architecture=lambda config: "BigBirdForPreTraining" if config.pair_head else "BigBirdForMaskedLM",
            base=bigbird,
            fields=bert.FIELDS
            | {"block_size": "sparse_attention.size", "num_random_blocks": "sparse_attention.random"},
            table=huggingface_names,
            # There is no `multiple_choice_class`: our rows contain all choices of a question, but block-sparse
            # attention supports only one document per row.
            sequence_classification_class=TaskClass(
                "BigBirdForSequenceClassification",
                Classify(hidden="model"),
                "classifier.out_proj",
                "classifier.dense",
                dropout=HeadDropout(),
            ),
            token_classification_class=token_classification_class("BigBirdForMaskedLM", dropout=HeadDropout()),
            question_answering_class=_QUESTION_ANSWERING_CLASS,
            constants={
                "is_decoder": False,
                "add_cross_attention": False,
                "position_embedding_type": "absolute",
                "tie_word_embeddings": True,
                "use_bias": True,
                "rescale_embeddings": False,
            },
            read=_read,
            write=_write,
            tied=lambda config: {
                "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
                "cls.predictions.decoder.bias": "cls.predictions.bias",
            },
            ignored=(
                r"bert\.embeddings\.(position|token_type)_ids",
                r"bert\.pooler\.(weight|bias)",
                r"cls\.seq_relationship\..*",
            ),
        ),
    ),
)
