"""BigBird (Zaheer et al. 2020, arXiv 2007.14062): BERT with block-sparse attention, for rows of 4,096 tokens.

NOTE The class of transformers applies dropout to embeddings before their norm, and no dropout to the weights of
block-sparse attention. In evaluation mode that class uses the first block of the row in place of all random blocks
(layers/sparse_attention/blocks.py).
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
from pretrainax.zoo.variants import pick

SIZES = {"base": (12, 768, 12), "large": (24, 1024, 16)}  # variant -> (layers, width, heads)


def bigbird(variant: str = "base") -> ModelConfig:
    """Returns the model config of BigBird without a head for sentence pairs, which the paper does not train.

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
    """Returns the name table of BigBirdForPreTraining, or of BigBirdForMaskedLM if `config.pair_head` is False."""
    pooler = {x: f"bert.pooler.{x}" for x in ("weight", "bias")}
    new = {f"bert.pooler.dense.{x}": name for x, name in pooler.items()}
    return [row._replace(name=new.get(row.name, row.name)) for row in bert.huggingface_names(config)]


_CLASSES = bert.read_pair_head("BigBirdForPreTraining", "BigBirdForMaskedLM", "BigBirdModel")


def _read(json: ConfigJson, config: ModelConfig) -> None:
    _CLASSES(json, config)
    kind = json.get("attention_type", "block_sparse")
    if kind not in ("block_sparse", "original_full"):
        raise UserError(f"config.json has attention_type {kind!r}; supported: block_sparse, original_full")
    if kind == "original_full":
        config.sparse_attention = None


def _write(config: ModelConfig) -> ConfigJson:
    return {"attention_type": "original_full" if config.sparse_attention is None else "block_sparse"}


_HEAD = "qa_classifier"
_EXTRACTOR = TaskClass(
    "BigBirdForQuestionAnswering",
    Extract(feed_forward=True, second_text=True),
    f"{_HEAD}.qa_outputs",
    more=(
        *linear("extractor/mlp/up", f"{_HEAD}.intermediate.dense", bias=True),
        *linear("extractor/mlp/down", f"{_HEAD}.output.dense", bias=True),
        *layer_norm("extractor/mlp_norm", f"{_HEAD}.output.LayerNorm"),
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
            # Multiple choice has no TaskClass: all choices of a question share one row, but block-sparse attention
            # supports only one document per row.
            classifier=TaskClass(
                "BigBirdForSequenceClassification", Classify(hidden="model"), "classifier.out_proj", "classifier.dense"
            ),
            token_classification_class=token_classification_class("BigBirdForMaskedLM"),
            question_answering_class=_EXTRACTOR,
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
