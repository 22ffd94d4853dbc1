"""Defines the releases of encoder-decoders."""

from tests.support.releases.release import LLAMA_SIZES, WB, Release, under

T5_BLOCK = "SelfAttention.{q,k,v,o}.weight layer_norm.weight"
T5_AROUND_MLP = " ".join(
    (
        "shared.weight {encoder,decoder}.final_layer_norm.weight",
        under("{encoder,decoder}.block.#.layer.0", T5_BLOCK),
        "{encoder,decoder}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "decoder.block.#.layer.1.EncDecAttention.{q,k,v,o}.weight decoder.block.#.layer.1.layer_norm.weight",
        "encoder.block.#.layer.1.layer_norm.weight decoder.block.#.layer.2.layer_norm.weight",
    )
)
SWITCH_EXPERTS = "mlp.router.classifier.weight mlp.experts.expert_{0,1,2}.{wi,wo}.weight"
BART_ATTENTION = f"{{k,v,q,out}}_proj.{WB}"

BART_STACKS = " ".join(
    (
        under("encoder.layers.#.self_attn", BART_ATTENTION),
        under("decoder.layers.#.{self_attn,encoder_attn}", BART_ATTENTION),
        "{encoder,decoder}.layers.#.{self_attn_layer_norm,fc1,fc2,final_layer_norm}." + WB,
        f"decoder.layers.#.encoder_attn_layer_norm.{WB}",
    )
)


def t5_names(mlp: str) -> str:
    return f"{T5_AROUND_MLP} encoder.block.#.layer.1.{mlp} decoder.block.#.layer.2.{mlp}"


T5_SIZES = {"d_ff": 48, "d_kv": 8, "d_model": 16, "num_heads": 4, "num_layers": 3, "vocab_size": 99}

BART_SIZES = {
    "d_model": 16,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "num_hidden_layers": 3,
    "max_position_embeddings": 20,
    "vocab_size": 99,
}

T5GEMMA_SIDE = LLAMA_SIZES | {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 5,
    "model_type": "t5_gemma_module",
}

T5GEMMA_BLOCK = (
    "self_attn.{q,k,v,o}_proj.weight mlp.{gate,up,down}_proj.weight {pre,post}_self_attn_layernorm.weight "
    "{pre,post}_feedforward_layernorm.weight"
)

ENCODER_DECODERS = {
    "t5": Release(  # google-t5/t5-small; has copies of the tied table, and an unused bias
        "t5_v1_0_small",
        T5_SIZES | {"n_positions": 20, "relative_attention_num_buckets": 8},
        t5_names("DenseReluDense.{wi,wo}.weight")
        + " {encoder,decoder}.embed_tokens.weight"
        + " decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    ),
    "t5-v1.1": Release(  # google/t5-v1_1-small; names by class
        "t5_small",
        T5_SIZES | {"num_decoder_layers": 3, "relative_attention_num_buckets": 8},
        t5_names("DenseReluDense.{wi_0,wi_1,wo}.weight") + " {encoder,decoder}.embed_tokens.weight lm_head.weight",
    ),
    "mt5": Release(  # google/mt5-small; names by class
        "mt5_small",
        T5_SIZES | {"num_decoder_layers": 3, "relative_attention_num_buckets": 8},
        t5_names("DenseReluDense.{wi_0,wi_1,wo}.weight") + " {encoder,decoder}.embed_tokens.weight lm_head.weight",
    ),
    "switch": Release(  # google/switch-base-8; has copies of the tied table; names by class
        "switch_base_8",
        T5_SIZES
        | {"num_layers": 4, "num_decoder_layers": 4, "relative_attention_num_buckets": 8, "num_experts": 3}
        | {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
        " ".join(
            (
                T5_AROUND_MLP,
                "encoder.block.{0,2}.layer.1.mlp.{wi,wo}.weight decoder.block.{0,2}.layer.2.mlp.{wi,wo}.weight",
                under("encoder.block.{1,3}.layer.1", SWITCH_EXPERTS),
                under("decoder.block.{1,3}.layer.2", SWITCH_EXPERTS),
                "{encoder,decoder}.embed_tokens.weight lm_head.weight",
            )
        ),
    ),
    "t5gemma": Release(  # google/t5gemma-b-b-ul2, which needs a license; config.json and names by class
        "t5gemma_b_b",
        {"encoder": T5GEMMA_SIDE, "decoder": T5GEMMA_SIDE | {"cross_attention_hidden_size": 16, "is_decoder": True}}
        | {"vocab_size": 99},
        " ".join(
            (
                "model.{encoder,decoder}.embed_tokens.weight model.{encoder,decoder}.norm.weight",
                under("model.{encoder,decoder}.layers.#", T5GEMMA_BLOCK),
                "model.decoder.layers.#.cross_attn.{q,k,v,o}_proj.weight",
                "model.decoder.layers.#.{pre,post}_cross_attn_layernorm.weight",
            )
        ),
    ),
    "bart": Release(  # facebook/bart-large; lacks the first "model.", and has fairseq's versions
        "bart_large",
        BART_SIZES,
        "shared.weight {encoder,decoder}.version {encoder,decoder}.embed_tokens.weight "
        f"{{encoder,decoder}}.embed_positions.weight {{encoder,decoder}}.layernorm_embedding.{WB} {BART_STACKS}",
        base="model.",
    ),
    # Helsinki-NLP/opus-mt-en-de; its padding id is the last id; names by class. Here, final_logits_bias is zero. In
    # other files, it is Marian's output bias, which the import rejects.
    "opus-mt": Release(
        "transformer_base",
        BART_SIZES | {"pad_token_id": 98, "decoder_start_token_id": 98, "bad_words_ids": [[98]]},
        "final_logits_bias model.shared.weight model.{encoder,decoder}.{embed_tokens,embed_positions}.weight "
        + under("model", BART_STACKS)
        + " lm_head.weight",
        changes={"vocab_size": 58_101, "activation": "silu"},
    ),
}
