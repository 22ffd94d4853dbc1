"""ALBERT (Lan et al. 2019, arXiv 1909.11942)."""

from pretrainax.config import Classify, LearnedPositions, ModelConfig
from pretrainax.zoo.bert import FIELDS, read_pair_head
from pretrainax.zoo.family import (
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

# variant -> (layers, width, heads, dropout rate, activation). The feed-forward width is 4 x the width, and embeddings
# have width 128.
# NOTE The authors' code uses the tanh approximation of GELU for version 1 as well, but the config.json files of version
# 1 name the exact GELU ("gelu").
SIZES = {
    "v1_base": (12, 768, 12, 0.1, "gelu"),
    "v1_large": (24, 1024, 16, 0.1, "gelu"),
    "v1_xlarge": (24, 2048, 16, 0.1, "gelu"),
    "v1_xxlarge": (12, 4096, 64, 0.0, "gelu"),
    # version 2
    "base": (12, 768, 12, 0.0, "gelu_tanh"),
    "large": (24, 1024, 16, 0.0, "gelu_tanh"),
    "xlarge": (24, 2048, 16, 0.0, "gelu_tanh"),
    "xxlarge": (12, 4096, 64, 0.0, "gelu_tanh"),
}


def albert(variant: str = "base") -> ModelConfig:
    """Builds the model config of ALBERT with its masked LM head and its sentence-order head.

    Args:
      variant: "base" to "xxlarge" are version 2; "v1_base" to "v1_xxlarge" are version 1.

    Raises:
      UserError: the variant is unknown.
    """
    num_layers, d_model, num_heads, dropout_rate, activation = pick("albert", variant, SIZES)
    return ModelConfig(
        family="encoder",
        vocab_size=30_000,
        num_layers=num_layers,
        share_layers=True,
        d_model=d_model,
        d_ff=4 * d_model,
        num_heads=num_heads,
        embedding_dim=128,
        position=LearnedPositions(512),
        norm="layer",
        norm_at="post",
        norm_epsilon=1e-12,
        activation=activation,
        embedding_norm=True,
        num_token_types=2,
        masked_lm_head=True,
        pair_head=True,
        dropout_rate=dropout_rate,
        attention_dropout_rate=dropout_rate,
    )


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in AlbertForPreTraining, or AlbertForMaskedLM without `config.pair_head`."""
    block, layer = (
        "encoder/blocks",
        "albert.encoder.albert_layer_groups.0.albert_layers.{layer}",
    )  # shared by all layers
    rows = [
        NameRow("token_embedding/embedding", "albert.embeddings.word_embeddings.weight"),
        NameRow("position_embedding/embedding", "albert.embeddings.position_embeddings.weight"),
        NameRow("token_type_embedding/embedding", "albert.embeddings.token_type_embeddings.weight"),
        *layer_norm("embedding_norm", "albert.embeddings.LayerNorm"),
        *linear("embedding_projection", "albert.encoder.embedding_hidden_mapping_in", bias=True),
        *linear(f"{block}/self_attention/query", f"{layer}.attention.query", bias=True),
        *linear(f"{block}/self_attention/key", f"{layer}.attention.key", bias=True),
        *linear(f"{block}/self_attention/value", f"{layer}.attention.value", bias=True),
        *linear(f"{block}/self_attention/out", f"{layer}.attention.dense", bias=True),
        *layer_norm(f"{block}/self_attention_norm", f"{layer}.attention.LayerNorm"),
        *linear(f"{block}/mlp/up", f"{layer}.ffn", bias=True),
        *linear(f"{block}/mlp/down", f"{layer}.ffn_output", bias=True),
        *layer_norm(f"{block}/mlp_norm", f"{layer}.full_layer_layer_norm"),
        *linear("masked_lm_head/dense", "predictions.dense", bias=True),
        *layer_norm("masked_lm_head/norm", "predictions.LayerNorm"),
        NameRow("unembedding/bias", "predictions.bias"),
    ]
    if config.pair_head:
        rows += linear("pair_head/dense", "albert.pooler", bias=True)
        rows += linear("pair_head/output", "sop_classifier.classifier", bias=True)
    return rows


def _base() -> ModelConfig:
    """Builds the model config with transformers' defaults for keys missing from config.json: the xxlarge model."""
    return albert("xxlarge")


_DROPOUT = HeadDropout("classifier_dropout_prob", 0.1)

FAMILIES = (
    Family(
        name="ALBERT",
        prefix="albert_",
        preset=albert,
        sizes=SIZES,
        paper="Lan et al. 2019, arXiv 1909.11942",
        objective="masked language modelling, sentence order prediction",
        configs=config_variants("albert_base", SIZES),
        huggingface=HuggingFace(
            model_type="albert",
            architecture=lambda config: "AlbertForPreTraining" if config.pair_head else "AlbertForMaskedLM",
            base=_base,
            fields=FIELDS | {"embedding_size": "embedding_dim"},
            table=huggingface_names,
            sequence_classification_class=TaskClass(
                "AlbertForSequenceClassification", Classify(), "classifier", "albert.pooler", dropout=_DROPOUT
            ),
            multiple_choice_class=TaskClass(
                "AlbertForMultipleChoice", Classify(kind="choice"), "classifier", "albert.pooler", dropout=_DROPOUT
            ),
            token_classification_class=token_classification_class("AlbertForMaskedLM", dropout=_DROPOUT),
            question_answering_class=question_answering_class("AlbertForMaskedLM"),
            constants={
                "num_hidden_groups": 1,
                "inner_group_num": 1,
                "position_embedding_type": "absolute",
                "tie_word_embeddings": True,
            },
            read=read_pair_head("AlbertForPreTraining", "AlbertForMaskedLM", "AlbertModel"),
            tied=lambda config: {
                "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
                "predictions.decoder.bias": "predictions.bias",
            },
            # A masked LM file may still contain the sentence-order head of the pretrained model.
            ignored=(r"albert\.embeddings\.(position|token_type)_ids", r"albert\.pooler\..*", r"sop_classifier\..*"),
        ),
    ),
)
