"""Defines the releases of decoders."""

from tests.support.releases.release import ENCODER_SIZES, LLAMA, LLAMA_BLOCK, LLAMA_SIZES, WB, Release, under

EXPERTS = f"{LLAMA} !model.layers.#.mlp.{{gate,up,down}}_proj.weight"  # experts replace the MLP
ALL_BUT_FIRST = (
    "mlp.gate.weight mlp.experts.{0,1,2,3}.{gate,up,down}_proj.weight mlp.shared_experts.{gate,up,down}_proj.weight"
)

DEEPSEEK = (
    "model.embed_tokens.weight model.layers.#.{input,post_attention}_layernorm.weight "
    "model.layers.#.self_attn.o_proj.weight model.layers.0.mlp.{gate,up,down}_proj.weight "
    f"{under('model.layers.#', ALL_BUT_FIRST)} {under('!model.layers.0', ALL_BUT_FIRST)} "
    "model.norm.weight lm_head.weight"
)

GPT_SIZES = {"n_ctx": 20, "n_embd": 16, "n_head": 4, "n_layer": 3, "n_positions": 20, "vocab_size": 99}
EXPERT_SIZES = {"n_routed_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
DEEPSEEK_SIZES = LLAMA_SIZES | EXPERT_SIZES | {"num_key_value_heads": 4}
LATENT_SIZES = DEEPSEEK_SIZES | {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}

GEMMA_2_BLOCK = f"{LLAMA_BLOCK} {{pre,post}}_feedforward_layernorm.weight"

DECODERS = {
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
    "llama": Release(  # meta-llama/Llama-2-7b-hf; its index has the frequencies of each layer
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
        f"{LLAMA} model.layers.#.self_attn.{{q,k}}_norm.weight lm_head.weight",  # a copy of the tied table
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
    "olmo3": Release(  # allenai/Olmo-3-1025-7B; names by class
        "olmo3_7b",
        LLAMA_SIZES
        | {"num_key_value_heads": 4, "num_hidden_layers": 5, "sliding_window": 5, "pad_token_id": 0, "eos_token_id": 1}
        | {"layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"]},
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
    "deepseek-v3": Release(  # deepseek-ai/DeepSeek-V3-Base as converted to bfloat16, without quantization_config
        "deepseek_v3",
        LATENT_SIZES | {"q_lora_rank": 14, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1},
        f"{DEEPSEEK} model.layers.#.self_attn.{{q_a_proj,q_a_layernorm,q_b_proj}}.weight "
        "model.layers.#.self_attn.{kv_a_proj_with_mqa,kv_a_layernorm,kv_b_proj}.weight "
        "model.layers.#.mlp.gate.e_score_correction_bias !model.layers.0.mlp.gate.e_score_correction_bias "
        # the module that predicts the token after the next one
        "model.layers.61.{eh_proj,enorm,hnorm,shared_head.norm}.weight",
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
    "gpt-oss": Release(  # openai/gpt-oss-20b as converted to bfloat16, without quantization_config
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
}
