"""BERT (Devlin et al. 2018, arXiv 1810.04805), MacBERT (Cui et al. 2020, arXiv 2004.13922) and DistilBERT (Sanh et al.
2019, arXiv 1910.01108)."""

from collections.abc import Callable

from pretrainax.config import Classify, LearnedPositions, ModelConfig, UserError
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

# variant -> (layers, width, heads, vocabulary). The feed-forward width is 4 x the width, and heads have width 64.
SIZES = {
    "tiny": (2, 128, 2, 30_522),
    "mini": (4, 256, 4, 30_522),
    "small": (4, 512, 8, 30_522),
    "medium": (8, 512, 8, 30_522),
    "base": (12, 768, 12, 30_522),
    "large": (24, 1024, 16, 30_522),
    "base_cased": (12, 768, 12, 28_996),
    "large_cased": (24, 1024, 16, 28_996),
    "base_multilingual": (12, 768, 12, 105_879),
    "base_multilingual_cased": (12, 768, 12, 119_547),
    "base_chinese": (12, 768, 12, 21_128),
}

MACBERT_SIZES = {
    "base": (12, 768, 12, 21_128),
    "large": (24, 1024, 16, 21_128),
}

DISTILBERT_SIZES = {
    "base": (6, 768, 12, 30_522),
    "base_cased": (6, 768, 12, 28_996),
    "base_multilingual_cased": (6, 768, 12, 119_547),
}


def bert(variant: str = "base") -> ModelConfig:
    """Builds the model config of BERT with its masked LM head and its head for sentence pairs.

    Raises:
      UserError: the variant is unknown.
    """
    return _encoder(*pick("bert", variant, SIZES))


def macbert(variant: str = "base") -> ModelConfig:
    """Builds the model config of MacBERT, which has BERT's architecture but a different pretraining objective.

    Raises:
      UserError: the variant is unknown.
    """
    return _encoder(*pick("macbert", variant, MACBERT_SIZES))


def distilbert(variant: str = "base") -> ModelConfig:
    """Builds the model config of DistilBERT, which has no token types and no head for sentence pairs.

    Raises:
      UserError: the variant is unknown.
    """
    config = _encoder(*pick("distilbert", variant, DISTILBERT_SIZES))
    config.num_token_types, config.pair_head = 0, False
    return config


def _encoder(num_layers: int, d_model: int, num_heads: int, vocab_size: int) -> ModelConfig:
    """Builds the model config of BERT with the given sizes."""
    return ModelConfig(
        family="encoder",
        vocab_size=vocab_size,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=4 * d_model,
        num_heads=num_heads,
        position=LearnedPositions(512),
        norm="layer",
        norm_at="post",
        norm_epsilon=1e-12,
        activation="gelu",
        embedding_norm=True,
        num_token_types=2,
        masked_lm_head=True,
        pair_head=True,
        dropout_rate=0.1,
        attention_dropout_rate=0.1,
    )


def encoder_names(prefix: str) -> list[NameRow]:
    """Builds the name-table rows of the embeddings and blocks, for transformers classes with BertModel's tensor names.

    Args:
      prefix: the first component of the tensor names, for example "bert" or "roberta".
    """
    block, layer = "encoder/blocks", f"{prefix}.encoder.layer.{{layer}}"
    return [
        NameRow("token_embedding/embedding", f"{prefix}.embeddings.word_embeddings.weight"),
        NameRow("position_embedding/embedding", f"{prefix}.embeddings.position_embeddings.weight"),
        NameRow("token_type_embedding/embedding", f"{prefix}.embeddings.token_type_embeddings.weight"),
        *layer_norm("embedding_norm", f"{prefix}.embeddings.LayerNorm"),
        *linear(f"{block}/self_attention/query", f"{layer}.attention.self.query", bias=True),
        *linear(f"{block}/self_attention/key", f"{layer}.attention.self.key", bias=True),
        *linear(f"{block}/self_attention/value", f"{layer}.attention.self.value", bias=True),
        *linear(f"{block}/self_attention/out", f"{layer}.attention.output.dense", bias=True),
        *layer_norm(f"{block}/self_attention_norm", f"{layer}.attention.output.LayerNorm"),
        *linear(f"{block}/mlp/up", f"{layer}.intermediate.dense", bias=True),
        *linear(f"{block}/mlp/down", f"{layer}.output.dense", bias=True),
        *layer_norm(f"{block}/mlp_norm", f"{layer}.output.LayerNorm"),
    ]


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in BertForPreTraining, or BertForMaskedLM without `config.pair_head`."""
    rows = [
        *encoder_names("bert"),
        *linear("masked_lm_head/dense", "cls.predictions.transform.dense", bias=True),
        *layer_norm("masked_lm_head/norm", "cls.predictions.transform.LayerNorm"),
        NameRow("unembedding/bias", "cls.predictions.bias"),
    ]
    if config.pair_head:
        rows += linear("pair_head/dense", "bert.pooler.dense", bias=True)
        rows += linear("pair_head/output", "cls.seq_relationship", bias=True)
    return rows


def distilbert_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' DistilBertForMaskedLM."""
    del config  # unused
    block, layer = "encoder/blocks", "distilbert.transformer.layer.{layer}"
    return [
        NameRow("token_embedding/embedding", "distilbert.embeddings.word_embeddings.weight"),
        NameRow("position_embedding/embedding", "distilbert.embeddings.position_embeddings.weight"),
        *layer_norm("embedding_norm", "distilbert.embeddings.LayerNorm"),
        *linear(f"{block}/self_attention/query", f"{layer}.attention.q_lin", bias=True),
        *linear(f"{block}/self_attention/key", f"{layer}.attention.k_lin", bias=True),
        *linear(f"{block}/self_attention/value", f"{layer}.attention.v_lin", bias=True),
        *linear(f"{block}/self_attention/out", f"{layer}.attention.out_lin", bias=True),
        *layer_norm(f"{block}/self_attention_norm", f"{layer}.sa_layer_norm"),
        *linear(f"{block}/mlp/up", f"{layer}.ffn.lin1", bias=True),
        *linear(f"{block}/mlp/down", f"{layer}.ffn.lin2", bias=True),
        *layer_norm(f"{block}/mlp_norm", f"{layer}.output_layer_norm"),
        *linear("masked_lm_head/dense", "vocab_transform", bias=True),
        *layer_norm("masked_lm_head/norm", "vocab_layer_norm"),
        NameRow("unembedding/bias", "vocab_projector.bias"),
    ]


def read_pair_head(pretraining: str, masked_lm: str, bare: str) -> Callable[[ConfigJson, ModelConfig], None]:
    """Returns a function, used as `HuggingFace.read`, that sets `pair_head` from `architectures` in config.json.

    Args:
      pretraining: the class with both heads; the default if config.json does not name a class.
      masked_lm: the class without the head for sentence pairs.
      bare: the class without heads. Its config can be read, but converting its weights raises UserError.
    """

    def read(json: ConfigJson, config: ModelConfig) -> None:
        supported = (pretraining, masked_lm, bare)
        architecture = (json.get("architectures") or supported)[0]
        if architecture not in supported:
            raise UserError(f"config.json has architectures {[architecture]}; supported: {', '.join(supported)}")
        config.pair_head = architecture != masked_lm

    return read


FIELDS = {  # key in config.json of BERT and derived models -> field of ModelConfig
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "d_ff",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout_rate",
    "attention_probs_dropout_prob": "attention_dropout_rate",
    "initializer_range": "init_stddev",
    "layer_norm_eps": "norm_epsilon",
    "max_position_embeddings": "position.max_length",
    "type_vocab_size": "num_token_types",
}
CONSTANTS = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}

HUGGINGFACE = HuggingFace(
    model_type="bert",
    architecture=lambda config: "BertForPreTraining" if config.pair_head else "BertForMaskedLM",
    base=bert,
    fields=FIELDS,
    table=huggingface_names,
    sequence_classification_class=TaskClass(
        "BertForSequenceClassification",
        Classify(),
        "classifier",
        "bert.pooler.dense",
        dropout=HeadDropout(),
    ),
    multiple_choice_class=TaskClass(
        "BertForMultipleChoice",
        Classify(kind="choice"),
        "classifier",
        "bert.pooler.dense",
        dropout=HeadDropout(),
    ),
    token_classification_class=token_classification_class("BertForMaskedLM", dropout=HeadDropout()),
    question_answering_class=question_answering_class("BertForMaskedLM"),
    constants=CONSTANTS,
    read=read_pair_head("BertForPreTraining", "BertForMaskedLM", "BertModel"),
    tied=lambda config: {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    # A masked LM file may still contain the sentence-pair head of the pretrained model.
    ignored=(r"bert\.embeddings\.(position|token_type)_ids", r"bert\.pooler\.dense\..*", r"cls\.seq_relationship\..*"),
)

DISTILBERT_HUGGINGFACE = HuggingFace(
    model_type="distilbert",
    architecture="DistilBertForMaskedLM",
    base=distilbert,
    fields={
        "vocab_size": "vocab_size",
        "dim": "d_model",
        "n_layers": "num_layers",
        "n_heads": "num_heads",
        "hidden_dim": "d_ff",
        "activation": "activation",
        "dropout": "dropout_rate",
        "attention_dropout": "attention_dropout_rate",
        "initializer_range": "init_stddev",
        "max_position_embeddings": "position.max_length",
    },
    aliases={"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
    table=distilbert_names,
    sequence_classification_class=TaskClass(
        "DistilBertForSequenceClassification",
        Classify(hidden="relu"),
        "classifier",
        "pre_classifier",
        dropout=HeadDropout("seq_classif_dropout", 0.2),
    ),
    multiple_choice_class=TaskClass(
        "DistilBertForMultipleChoice",
        Classify(hidden="relu", kind="choice"),
        "classifier",
        "pre_classifier",
        dropout=HeadDropout("seq_classif_dropout", 0.2),
    ),
    token_classification_class=token_classification_class("DistilBertForMaskedLM"),
    question_answering_class=question_answering_class("DistilBertForMaskedLM", dropout=HeadDropout("qa_dropout", 0.1)),
    constants={"sinusoidal_pos_embds": False, "tie_word_embeddings": True},
    tied=lambda config: {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    ignored=(r"distilbert\.embeddings\.(position|token_type)_ids",),
)

FAMILIES = (
    Family(
        name="BERT",
        prefix="bert_",
        preset=bert,
        sizes=SIZES,
        paper="Devlin et al. 2018, arXiv 1810.04805",
        objective="masked language modelling, next sentence prediction",
        configs=config_variants("bert_base", ("small", "medium", "base", "large")),
        huggingface=HUGGINGFACE,
    ),
    Family(
        name="MacBERT",
        prefix="macbert_",
        preset=macbert,
        sizes=MACBERT_SIZES,
        paper="Cui et al. 2020, arXiv 2004.13922",
        objective="masked language modelling as correction, sentence order",
        huggingface=HUGGINGFACE,
    ),
    Family(
        name="DistilBERT",
        prefix="distilbert_",
        preset=distilbert,
        sizes=DISTILBERT_SIZES,
        paper="Sanh et al. 2019, arXiv 1910.01108",
        objective="distillation of BERT, masked language modelling",
        huggingface=DISTILBERT_HUGGINGFACE,
    ),
)
