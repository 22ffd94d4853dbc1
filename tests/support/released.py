"""Released models as their files are: config.json with every key it has, and the names of the tensors.

config.json is tests/golden/released/NAME.json; a `Release` has the names, and the sizes at which a test writes such
files. Names are written short: "#" is the number of a layer, {a,b} is a or b, and "!" is before one that is not there.
They are not those that `save_pretrained` of today would give: bare ones, old ones of norms, copies of tied tensors,
buffers, heads that a class leaves out.

None of the files was at hand. Configs and names are those that public code, logs and documentation quote of them; names
marked "by class" follow from what the class of that time registered, and saved.
"""

import itertools
import json
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from pretrainax import zoo
from pretrainax.config import ModelConfig
from pretrainax.interop.architectures import described_model
from pretrainax.zoo.convert import to_huggingface
from pretrainax.zoo.family import ConfigJson
from tests.golden.case import Case, weights
from tests.support.huggingface_weights import write_tokenizer

CONFIGS = pathlib.Path(__file__).parents[1] / "golden" / "released"


class Release(NamedTuple):
    preset: str  # of the zoo, which the config is that of
    tiny: dict[str, Any]  # in the place of its sizes
    names: str
    changes: dict[str, Any] = {}  # fields of the preset that this file leaves out
    base: str = ""  # what this file's names lack in front: "bert."


WB = "{weight,bias}"
BERT_BLOCK = (
    f"attention.self.{{query,key,value}}.{WB} attention.output.dense.{WB} intermediate.dense.{WB} output.dense.{WB}"
)
NEW_NORMS = f"attention.output.LayerNorm.{WB} output.LayerNorm.{WB}"
OLD_NORMS = "attention.output.LayerNorm.{gamma,beta} output.LayerNorm.{gamma,beta}"
EMBEDDINGS = "embeddings.{word,position,token_type}_embeddings.weight"


def under(prefix: str, names: str) -> str:
    return " ".join(f"{prefix}.{name}" for name in names.split())


LLAMA_BLOCK = "self_attn.{q,k,v,o}_proj.weight mlp.{gate,up,down}_proj.weight {input,post_attention}_layernorm.weight"
LLAMA = f"model.embed_tokens.weight {under('model.layers.#', LLAMA_BLOCK)} model.norm.weight"
EXPERTS = f"{LLAMA} !model.layers.#.mlp.{{gate,up,down}}_proj.weight"  # in the place of the MLP
ALL_BUT_FIRST = (
    "mlp.gate.weight mlp.experts.{0,1,2,3}.{gate,up,down}_proj.weight mlp.shared_experts.{gate,up,down}_proj.weight"
)
DEEPSEEK = (
    "model.embed_tokens.weight model.layers.#.{input,post_attention}_layernorm.weight "
    "model.layers.#.self_attn.o_proj.weight model.layers.0.mlp.{gate,up,down}_proj.weight "
    f"{under('model.layers.#', ALL_BUT_FIRST)} {under('!model.layers.0', ALL_BUT_FIRST)} "
    "model.norm.weight lm_head.weight"
)
T5_BLOCK = "SelfAttention.{q,k,v,o}.weight layer_norm.weight"
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
    return " ".join(
        (
            "shared.weight {encoder,decoder}.final_layer_norm.weight",
            under("{encoder,decoder}.block.#.layer.0", T5_BLOCK),
            "{encoder,decoder}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            "decoder.block.#.layer.1.EncDecAttention.{q,k,v,o}.weight decoder.block.#.layer.1.layer_norm.weight",
            f"encoder.block.#.layer.1.{mlp} encoder.block.#.layer.1.layer_norm.weight",
            f"decoder.block.#.layer.2.{mlp} decoder.block.#.layer.2.layer_norm.weight",
        )
    )


GPT_SIZES = {"n_ctx": 20, "n_embd": 16, "n_head": 4, "n_layer": 3, "n_positions": 20, "vocab_size": 99}
ENCODER_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 20,
    "vocab_size": 99,
}
LLAMA_SIZES = ENCODER_SIZES | {"num_key_value_heads": 2}
EXPERT_SIZES = {"n_routed_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
DEEPSEEK_SIZES = LLAMA_SIZES | EXPERT_SIZES | {"num_key_value_heads": 4}
LATENT_SIZES = DEEPSEEK_SIZES | {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}
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
ROBERTA_NAMES = " ".join(
    (
        under("roberta", f"embeddings.position_ids {EMBEDDINGS} embeddings.LayerNorm.{WB} pooler.dense.{WB}"),
        under("roberta.encoder.layer.#", f"{BERT_BLOCK} {NEW_NORMS}"),
        f"lm_head.bias lm_head.decoder.weight lm_head.dense.{WB} lm_head.layer_norm.{WB}",
    )
)
ELECTRA_NAMES = " ".join(
    (
        under("electra", f"embeddings.position_ids {EMBEDDINGS} embeddings.LayerNorm.{WB} embeddings_project.{WB}"),
        under("electra.encoder.layer.#", f"{BERT_BLOCK} {NEW_NORMS}"),
    )
)
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
GEMMA_2_BLOCK = f"{LLAMA_BLOCK} {{pre,post}}_feedforward_layernorm.weight"

RELEASED = {
    "openai-gpt": Release(  # openai-community/openai-gpt; names by class
        "gpt1_117m",
        GPT_SIZES,
        f"{{tokens,positions}}_embed.weight h.#.attn.bias h.#.attn.{{c_attn,c_proj}}.{WB} h.#.{{ln_1,ln_2}}.{WB} "
        f"h.#.mlp.{{c_fc,c_proj}}.{WB}",
        base="transformer.",
    ),
    "gpt2": Release(  # openai-community/gpt2: its 160 tensors
        "gpt2_124m",
        GPT_SIZES,
        f"{{wte,wpe}}.weight h.#.attn.bias h.#.attn.{{c_attn,c_proj}}.{WB} h.#.{{ln_1,ln_2}}.{WB} "
        f"h.#.mlp.{{c_fc,c_proj}}.{WB} ln_f.{WB}",
        base="transformer.",
    ),
    "gpt-neo": Release(  # EleutherAI/gpt-neo-125m; names by class
        "gpt_neo_125m",
        {
            "hidden_size": 16,
            "num_heads": 4,
            "num_layers": 4,
            "max_position_embeddings": 20,
            "vocab_size": 99,
            "window_size": 5,
            "attention_layers": ["global", "local"] * 2,
            "attention_types": [[["global", "local"], 2]],
        },
        f"transformer.{{wte,wpe}}.weight transformer.h.#.attn.attention.{{bias,masked_bias}} "
        "transformer.h.#.attn.attention.{q,k,v}_proj.weight "
        f"transformer.h.#.attn.attention.out_proj.{WB} transformer.h.#.{{ln_1,ln_2}}.{WB} "
        f"transformer.h.#.mlp.{{c_fc,c_proj}}.{WB} transformer.ln_f.{WB} lm_head.weight",
    ),
    "bert": Release(  # google-bert/bert-base-uncased
        "bert_base",
        ENCODER_SIZES,
        " ".join(
            (
                under("bert", f"{EMBEDDINGS} embeddings.LayerNorm.{{gamma,beta}} pooler.dense.{WB}"),
                under("bert.encoder.layer.#", f"{BERT_BLOCK} {OLD_NORMS}"),
                f"cls.predictions.bias cls.predictions.decoder.weight cls.predictions.transform.dense.{WB} "
                f"cls.predictions.transform.LayerNorm.{{gamma,beta}} cls.seq_relationship.{WB}",
            )
        ),
        changes={"pair_head": False},
    ),
    "distilbert": Release(  # distilbert/distilbert-base-uncased; names by class
        "distilbert_base",
        {"dim": 16, "hidden_dim": 64, "n_heads": 4, "n_layers": 3, "max_position_embeddings": 20, "vocab_size": 99},
        " ".join(
            (
                f"distilbert.embeddings.{{word,position}}_embeddings.weight distilbert.embeddings.LayerNorm.{WB}",
                f"distilbert.transformer.layer.#.attention.{{q,k,v,out}}_lin.{WB}",
                f"distilbert.transformer.layer.#.{{sa_layer_norm,ffn.lin1,ffn.lin2,output_layer_norm}}.{WB}",
                f"{{vocab_transform,vocab_layer_norm,vocab_projector}}.{WB}",
            )
        ),
    ),
    "roberta": Release(  # FacebookAI/roberta-base
        "roberta_base", ENCODER_SIZES | {"max_position_embeddings": 22}, ROBERTA_NAMES
    ),
    "xlm-roberta": Release(  # FacebookAI/xlm-roberta-base; names by class
        "xlm_roberta_base",
        ENCODER_SIZES | {"max_position_embeddings": 22},
        ROBERTA_NAMES,
    ),
    "albert": Release(  # albert/albert-base-v2; names by class
        "albert_base",
        ENCODER_SIZES | {"embedding_size": 8},
        " ".join(
            (
                under("albert", f"embeddings.position_ids {EMBEDDINGS} embeddings.LayerNorm.{WB} pooler.{WB}"),
                f"albert.encoder.embedding_hidden_mapping_in.{WB}",
                under(
                    "albert.encoder.albert_layer_groups.0.albert_layers.0",
                    f"attention.{{query,key,value,dense,LayerNorm}}.{WB} ffn.{WB} ffn_output.{WB} "
                    f"full_layer_layer_norm.{WB}",
                ),
                f"predictions.bias predictions.{{dense,LayerNorm,decoder}}.{WB}",
            )
        ),
        changes={"pair_head": False},
    ),
    "electra-discriminator": Release(  # google/electra-small-discriminator; names by class
        "electra_small",
        ENCODER_SIZES | {"embedding_size": 8},
        f"{ELECTRA_NAMES} discriminator_predictions.{{dense,dense_prediction}}.{WB}",
        changes={"generator": None},
    ),
    "electra-generator": Release(  # google/electra-small-generator; names by class
        "electra_small",
        ENCODER_SIZES | {"embedding_size": 8},
        f"{ELECTRA_NAMES} generator_predictions.{{LayerNorm,dense}}.{WB} generator_lm_head.{WB}",
        changes={"generator": None, "masked_lm_head": True, "replaced_token_head": False},
    ),
    "deberta-v3": Release(  # microsoft/deberta-v3-base, and the copies of other sizes beside it
        "deberta_v3_base",
        ENCODER_SIZES | {"position_buckets": 4},
        " ".join(
            (
                under("deberta.embeddings", f"word_embeddings.weight position_embeddings.weight LayerNorm.{WB}"),
                "deberta.embeddings.{word,position}_embeddings._weight",
                under("deberta.encoder.layer.#", f"{BERT_BLOCK} {NEW_NORMS}").replace(
                    "{query,key,value}", "{query,key,value}_proj"
                ),
                f"deberta.encoder.rel_embeddings.weight deberta.encoder.LayerNorm.{WB}",
                f"lm_predictions.lm_head.bias lm_predictions.lm_head.{{dense,LayerNorm}}.{WB}",
                f"mask_predictions.{{dense,LayerNorm,classifier}}.{WB}",
            )
        ),
        changes={"generator": None, "enhanced_mask_decoder": False},
    ),
    "modernbert": Release(  # answerdotai/ModernBERT-base
        "modernbert_base",
        ENCODER_SIZES
        | {"num_hidden_layers": 4, "local_attention": 6, "pad_token_id": 0, "bos_token_id": 4, "eos_token_id": 5}
        | {"cls_token_id": 4, "sep_token_id": 5},
        " ".join(
            (
                "model.embeddings.{tok_embeddings,norm}.weight model.final_norm.weight",
                "model.layers.#.{attn.Wo,attn.Wqkv,mlp.Wi,mlp.Wo,mlp_norm,attn_norm}.weight",
                "!model.layers.0.attn_norm.weight",  # the norm of the embeddings is that
                "head.dense.weight head.norm.weight decoder.bias",
            )
        ),
    ),
    "eurobert": Release(  # EuroBERT/EuroBERT-610m
        "eurobert_610m",
        LLAMA_SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "mask_token_id": 2},
        f"{LLAMA} lm_head.weight",
    ),
    "t5": Release(  # google-t5/t5-small: with copies of the tied table, and a bias that nothing reads
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
    "t5gemma": Release(  # google/t5gemma-b-b-ul2, which is behind a licence: config.json and names by class
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
    "bart": Release(  # facebook/bart-large: without its first "model.", and with fairseq's versions
        "bart_large",
        BART_SIZES,
        "shared.weight {encoder,decoder}.version {encoder,decoder}.embed_tokens.weight "
        f"{{encoder,decoder}}.embed_positions.weight {{encoder,decoder}}.layernorm_embedding.{WB} {BART_STACKS}",
        base="model.",
    ),
    "llama": Release(  # meta-llama/Llama-2-7b-hf, whose index has the frequencies of each layer
        "llama2_7b",
        LLAMA_SIZES | {"num_key_value_heads": 4},
        f"{LLAMA} model.layers.#.self_attn.rotary_emb.inv_freq lm_head.weight",
    ),
    "llama-3.2": Release(  # meta-llama/Llama-3.2-1B
        "llama3_2_1b",
        LLAMA_SIZES | {"head_dim": 4},
        LLAMA,
    ),
    "mistral": Release(  # mistralai/Mistral-7B-v0.1
        "mistral_7b",
        LLAMA_SIZES | {"sliding_window": 5},
        f"{LLAMA} lm_head.weight",
    ),
    "mixtral": Release(  # mistralai/Mixtral-8x7B-v0.1
        "mixtral_8x7b",
        LLAMA_SIZES | {"num_local_experts": 4},
        f"{EXPERTS} model.layers.#.block_sparse_moe.gate.weight "
        "model.layers.#.block_sparse_moe.experts.{0,1,2,3}.{w1,w2,w3}.weight lm_head.weight",
    ),
    "qwen2.5": Release(  # Qwen/Qwen2.5-0.5B
        "qwen2_5_0_5b",
        LLAMA_SIZES,
        f"{LLAMA} model.layers.#.self_attn.{{q,k,v}}_proj.bias",
    ),
    "qwen3": Release(  # Qwen/Qwen3-0.6B-Base
        "qwen3_0_6b",
        LLAMA_SIZES | {"head_dim": 8},
        f"{LLAMA} model.layers.#.self_attn.{{q,k}}_norm.weight lm_head.weight",  # a copy: its table is tied
    ),
    "qwen3-moe": Release(  # Qwen/Qwen3-30B-A3B-Base
        "qwen3_30b_a3b",
        LLAMA_SIZES | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 8},
        f"{EXPERTS} model.layers.#.self_attn.{{q,k}}_norm.weight model.layers.#.mlp.gate.weight "
        "model.layers.#.mlp.experts.{0,1,2,3}.{gate,up,down}_proj.weight lm_head.weight",
    ),
    "olmo2": Release(  # allenai/OLMo-2-1124-7B
        "olmo2_7b",
        LLAMA_SIZES | {"num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 1},
        f"{LLAMA} !model.layers.#.input_layernorm.weight model.layers.#.post_feedforward_layernorm.weight "
        "model.layers.#.self_attn.{q,k}_norm.weight lm_head.weight",
    ),
    "olmoe": Release(  # allenai/OLMoE-1B-7B-0924
        "olmoe_1b_7b",
        LLAMA_SIZES | {"num_key_value_heads": 4, "eos_token_id": 2, "num_experts": 4, "num_experts_per_tok": 3},
        f"{EXPERTS} model.layers.#.self_attn.{{q,k}}_norm.weight model.layers.#.mlp.gate.weight "
        "model.layers.#.mlp.experts.{0,1,2,3}.{gate,up,down}_proj.weight lm_head.weight",
    ),
    "deepseek-moe": Release(  # deepseek-ai/deepseek-moe-16b-base
        "deepseek_moe_16b",
        DEEPSEEK_SIZES,
        f"{DEEPSEEK} model.layers.#.self_attn.{{q,k,v}}_proj.weight",
    ),
    "deepseek-v2-lite": Release(  # deepseek-ai/DeepSeek-V2-Lite
        "deepseek_v2_lite",
        LATENT_SIZES,
        f"{DEEPSEEK} model.layers.#.self_attn.{{q_proj,kv_a_proj_with_mqa,kv_a_layernorm,kv_b_proj}}.weight",
    ),
    "deepseek-v3": Release(  # deepseek-ai/DeepSeek-V3-Base as others have it in bfloat16, without quantization_config
        "deepseek_v3",
        LATENT_SIZES | {"q_lora_rank": 14, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1},
        f"{DEEPSEEK} model.layers.#.self_attn.{{q_a_proj,q_a_layernorm,q_b_proj}}.weight "
        "model.layers.#.self_attn.{kv_a_proj_with_mqa,kv_a_layernorm,kv_b_proj}.weight "
        "model.layers.#.mlp.gate.e_score_correction_bias !model.layers.0.mlp.gate.e_score_correction_bias "
        "model.layers.61.{eh_proj,enorm,hnorm,shared_head.norm}.weight",  # of the token after the next
    ),
    "phi": Release(  # microsoft/phi-2
        "phi2",
        ENCODER_SIZES | {"num_key_value_heads": 4, "partial_rotary_factor": 0.5, "bos_token_id": 1, "eos_token_id": 1},
        " ".join(
            (
                "model.embed_tokens.weight",
                under("model.layers.#", f"self_attn.{{q_proj,k_proj,v_proj,dense}}.{WB} mlp.{{fc1,fc2}}.{WB}"),
                f"model.layers.#.input_layernorm.{WB} model.final_layernorm.{WB} lm_head.{WB}",
            )
        ),
    ),
    "phi-3": Release(  # microsoft/phi-4
        "phi4_14b",
        LLAMA_SIZES | {"original_max_position_embeddings": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
        " ".join(
            (
                "model.embed_tokens.weight",
                under("model.layers.#", "self_attn.{qkv,o}_proj.weight mlp.{gate_up,down}_proj.weight"),
                "model.layers.#.{input,post_attention}_layernorm.weight model.norm.weight lm_head.weight",
            )
        ),
    ),
    "smollm-3": Release(  # HuggingFaceTB/SmolLM3-3B-Base
        "smollm3_3b",
        LLAMA_SIZES
        | {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1], "layer_types": ["full_attention"] * 5}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
        LLAMA,
    ),
    "gpt-oss": Release(  # openai/gpt-oss-20b as others have it in bfloat16, without quantization_config
        "gpt_oss_20b",
        LLAMA_SIZES
        | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 5, "num_hidden_layers": 3}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"pad_token_id": 0, "eos_token_id": 1},
        "model.embed_tokens.weight model.layers.#.{input,post_attention}_layernorm.weight "
        f"model.layers.#.self_attn.{{q,k,v,o}}_proj.{WB} model.layers.#.self_attn.sinks model.layers.#.mlp.router.{WB} "
        "model.layers.#.mlp.experts.{gate_up_proj,gate_up_proj_bias,down_proj,down_proj_bias} "
        "model.norm.weight lm_head.weight",
    ),
    "gemma": Release("gemma1_2b", LLAMA_SIZES | {"head_dim": 8}, LLAMA),  # google/gemma-2b
    "gemma-2": Release(  # google/gemma-2-2b
        "gemma2_2b",
        LLAMA_SIZES | {"num_hidden_layers": 4, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
        f"model.embed_tokens.weight {under('model.layers.#', GEMMA_2_BLOCK)} model.norm.weight",
    ),
    "gemma-3": Release(  # google/gemma-3-1b-it
        "gemma3_1b",
        LLAMA_SIZES | {"num_hidden_layers": 7, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
        f"model.embed_tokens.weight {under('model.layers.#', GEMMA_2_BLOCK)} "
        "model.layers.#.self_attn.{q,k}_norm.weight model.norm.weight",
    ),
    # Helsinki-NLP/opus-mt-en-de, whose padding is its last id; names by class. final_logits_bias is zero here: Marian's
    # own output bias, where a file has it there, is refused.
    "opus-mt": Release(
        "transformer_base",
        BART_SIZES | {"pad_token_id": 98, "decoder_start_token_id": 98, "bad_words_ids": [[98]]},
        "final_logits_bias model.shared.weight model.{encoder,decoder}.{embed_tokens,embed_positions}.weight "
        + under("model", BART_STACKS)
        + " lm_head.weight",
        changes={"vocab_size": 58_101, "activation": "silu"},
    ),
}


def names_of(release: Release, layers: int) -> list[str]:
    """The names of all tensors of a file with so many layers."""
    names = []
    for short in release.names.split():
        parts = [part.split(",") for part in re.split("[{}]", short)]  # every other one is a choice
        assert all(len(part) == 1 for part in parts[::2]), short
        for spelled in map("".join, itertools.product(*parts)):
            names += [spelled.replace("#", str(i)) for i in range(layers)] if "#" in spelled else [spelled]
    gone = {name[1:] for name in names if name.startswith("!")}
    return [name for name in names if name not in gone and not name.startswith("!")]


def config_of(name: str, tiny: bool = False) -> ConfigJson:
    """config.json as it was released, or with the sizes of a test."""
    released = json.loads((CONFIGS / f"{name}.json").read_text())
    return released | RELEASED[name].tiny if tiny else released


def case_of(name: str) -> Case:
    """What is in the file that a test writes."""
    release, config_json = RELEASED[name], config_of(name, tiny=True)
    family, config = described_model(config_json)
    (of_zoo,) = [x for x in zoo.FAMILIES if x.huggingface is family and release.preset.startswith(x.prefix)][:1]
    return Case(config, of_zoo, pad_id=config_json.get("pad_token_id", 0))


def write_release(directory: pathlib.Path, name: str) -> Case:
    """Writes config.json, tensors under their released names, and a tokenizer."""
    release, case = RELEASED[name], case_of(name)
    family, config = case.family.huggingface, case.config
    state = to_huggingface(family.names(config), weights(config))
    state |= {name: np.zeros(shape, np.float32) for name, shape in family.zeros(config).items()}
    state |= {copy: state[original] for copy, original in family.tied(config).items()}
    tensors = {}
    for theirs in names_of(release, config.num_layers):
        ours = re.sub("gamma$", "weight", re.sub("beta$", "bias", release.base + theirs))
        tensors[theirs] = np.ascontiguousarray(state[ours] if ours in state else _no_weight(theirs, config))
    directory.mkdir()
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config_of(name, tiny=True)))
    write_tokenizer(directory, case.pad_id)
    return case


def _no_weight(name: str, config: ModelConfig) -> np.ndarray:
    """What a file holds beside the weights of its class: buffers, and parts of other classes."""
    length = config.position.max_length or 20
    if name.endswith("embed_positions.weight"):  # Marian's table, which it computes too
        angles = np.arange(length)[:, None] / 10_000 ** (np.arange(config.d_model // 2) * 2 / config.d_model)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    buffers = {
        "attn.bias": np.tril(np.ones((1, 1, length, length), np.float32)),
        "attention.bias": np.tril(np.ones((1, 1, length, length), np.uint8)),
        "masked_bias": np.array(-1e9, np.float32),
        "position_ids": np.arange(length)[None],
        "version": np.array([3.0], np.float32),
        "inv_freq": 10_000.0 ** -np.linspace(0, 1, config.dim_per_head // 2, endpoint=False, dtype=np.float32),
    }
    known = [x for end, x in buffers.items() if name.endswith(end)]
    return known[0] if known else np.ones(config.d_model, np.float32)
