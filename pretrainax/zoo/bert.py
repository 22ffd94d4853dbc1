"""BERT (Devlin et al. 2018, arXiv 1810.04805)."""

from pretrainax.config import LearnedPositions, ModelConfig
from pretrainax.zoo.family import Row, layer_norm, linear
from pretrainax.zoo.variants import pick

# variant -> (layers, width, heads); the feed-forward is 4 x the width, a head 64 wide
SIZES = {
    # Turc et al. 2019 (arXiv 1908.08962), table 1
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    # Devlin et al. 2018, section 3
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}


def bert(variant: str = "base") -> ModelConfig:
    """BERT, uncased, with the masked LM head; UserError for an unknown variant."""
    num_layers, d_model, num_heads = pick("bert", variant, SIZES)
    return ModelConfig(
        family="encoder",
        vocab_size=30_522,
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
        dropout_rate=0.1,
    )


def huggingface_names(config: ModelConfig) -> list[Row]:
    """Of transformers' BertForMaskedLM."""
    del config  # the same for all
    block, layer = "encoder/blocks", "bert.encoder.layer.{layer}"
    return [
        Row("token_embedding/embedding", "bert.embeddings.word_embeddings.weight"),
        Row("position_embedding/embedding", "bert.embeddings.position_embeddings.weight"),
        Row("token_type_embedding/embedding", "bert.embeddings.token_type_embeddings.weight"),
        *layer_norm("embedding_norm", "bert.embeddings.LayerNorm"),
        *linear(f"{block}/self_attention/query", f"{layer}.attention.self.query", bias=True),
        *linear(f"{block}/self_attention/key", f"{layer}.attention.self.key", bias=True),
        *linear(f"{block}/self_attention/value", f"{layer}.attention.self.value", bias=True),
        *linear(f"{block}/self_attention/out", f"{layer}.attention.output.dense", bias=True),
        *layer_norm(f"{block}/self_attention_norm", f"{layer}.attention.output.LayerNorm"),
        *linear(f"{block}/mlp/up", f"{layer}.intermediate.dense", bias=True),
        *linear(f"{block}/mlp/down", f"{layer}.output.dense", bias=True),
        *layer_norm(f"{block}/mlp_norm", f"{layer}.output.LayerNorm"),
        *linear("masked_lm_head/dense", "cls.predictions.transform.dense", bias=True),
        *layer_norm("masked_lm_head/norm", "cls.predictions.transform.LayerNorm"),
        Row("unembedding/bias", "cls.predictions.bias"),
    ]
