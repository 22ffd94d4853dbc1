"""Released models as their files are: config.json with every key it has, and the names of the tensors.

A `Release` has both as they were published, and the sizes at which a test writes such files. Names are written short:
"#" is the number of a layer, {a,b} is a or b, and "!" is before one that is not there. They are not those that
`save_pretrained` of today would give: bare ones, old ones of norms, copies of tied tensors, buffers, heads that a class
leaves out.

Lists are from the models' own files as public code and logs show them, or, marked "by class", from what the class of
that time registered and saved, which is how they were made; the files themselves were not at hand.
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
from tests.golden.case import Case, weights
from tests.support.huggingface_weights import write_tokenizer


class Release(NamedTuple):
    preset: str  # of the zoo, which the config is that of
    config: dict[str, Any]  # config.json
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


SUMMARY = {
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
}
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
BERT_CONFIG = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
ROBERTA_CONFIG = {
    "architectures": ["RobertaForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 514,
    "model_type": "roberta",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 50265,
}
ROBERTA_NAMES = " ".join(
    (
        under("roberta", f"embeddings.position_ids {EMBEDDINGS} embeddings.LayerNorm.{WB} pooler.dense.{WB}"),
        under("roberta.encoder.layer.#", f"{BERT_BLOCK} {NEW_NORMS}"),
        f"lm_head.bias lm_head.decoder.weight lm_head.dense.{WB} lm_head.layer_norm.{WB}",
    )
)
ELECTRA_CONFIG = {
    "architectures": ["ElectraForPreTraining"],
    "attention_probs_dropout_prob": 0.1,
    "embedding_size": 128,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "electra",
    "num_attention_heads": 4,
    "num_hidden_layers": 12,
    "summary_activation": "gelu",
    "summary_last_dropout": 0.1,
    "summary_type": "first",
    "summary_use_proj": True,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
ELECTRA_NAMES = " ".join(
    (
        under("electra", f"embeddings.position_ids {EMBEDDINGS} embeddings.LayerNorm.{WB} embeddings_project.{WB}"),
        under("electra.encoder.layer.#", f"{BERT_BLOCK} {NEW_NORMS}"),
    )
)
T5_CONFIG = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "task_specific_params": {"summarization": {"early_stopping": True, "num_beams": 4, "prefix": "summarize: "}},
    "vocab_size": 32128,
}
T5_1_1_CONFIG = T5_CONFIG | {
    "d_ff": 1024,
    "feed_forward_proj": "gated-gelu",
    "num_decoder_layers": 8,
    "num_heads": 6,
    "num_layers": 8,
    "tie_word_embeddings": False,
}
BART_CONFIG = {
    "activation_dropout": 0.1,
    "activation_function": "gelu",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "architectures": ["BartModel"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "classif_dropout": 0.1,
    "classifier_dropout": 0.0,
    "d_model": 1024,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 12,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "early_stopping": True,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 12,
    "eos_token_id": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
    "max_position_embeddings": 1024,
    "model_type": "bart",
    "no_repeat_ngram_size": 3,
    "normalize_before": False,
    "num_beams": 4,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "scale_embedding": False,
    "task_specific_params": {"summarization": {"length_penalty": 1.0, "max_length": 128, "num_beams": 4}},
    "use_cache": True,
    "vocab_size": 50265,
}
LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
GEMMA_CONFIG = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_2_BLOCK = f"{LLAMA_BLOCK} {{pre,post}}_feedforward_layernorm.weight"

RELEASED = {
    "openai-gpt": Release(  # config: openai-community/openai-gpt; names by class
        "gpt1_117m",
        {
            "afn": "gelu",
            "architectures": ["OpenAIGPTLMHeadModel"],
            "attn_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "openai-gpt",
            "n_ctx": 512,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 512,
            "n_special": 0,
            "predict_special_tokens": True,
            "resid_pdrop": 0.1,
            **SUMMARY,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 40478,
        },
        GPT_SIZES,
        f"{{tokens,positions}}_embed.weight h.#.attn.bias h.#.attn.{{c_attn,c_proj}}.{WB} h.#.{{ln_1,ln_2}}.{WB} "
        f"h.#.mlp.{{c_fc,c_proj}}.{WB}",
        base="transformer.",
    ),
    "gpt2": Release(  # openai-community/gpt2: its 160 tensors
        "gpt2_124m",
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            **SUMMARY,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
        GPT_SIZES,
        f"{{wte,wpe}}.weight h.#.attn.bias h.#.attn.{{c_attn,c_proj}}.{WB} h.#.{{ln_1,ln_2}}.{WB} "
        f"h.#.mlp.{{c_fc,c_proj}}.{WB} ln_f.{WB}",
        base="transformer.",
    ),
    "gpt-neo": Release(  # EleutherAI/gpt-neo-125m; names by class
        "gpt_neo_125m",
        {
            "activation_function": "gelu_new",
            "architectures": ["GPTNeoForCausalLM"],
            "attention_dropout": 0,
            "attention_layers": ["global", "local"] * 6,
            "attention_types": [[["global", "local"], 6]],
            "bos_token_id": 50256,
            "embed_dropout": 0,
            "eos_token_id": 50256,
            "gradient_checkpointing": False,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": None,
            "layer_norm_epsilon": 1e-05,
            "max_position_embeddings": 2048,
            "model_type": "gpt_neo",
            "num_heads": 12,
            "num_layers": 12,
            "resid_dropout": 0,
            **SUMMARY,
            "transformers_version": "4.9.0.dev0",
            "use_cache": True,
            "vocab_size": 50257,
            "window_size": 256,
        },
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
        BERT_CONFIG,
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
        {
            "activation": "gelu",
            "architectures": ["DistilBertForMaskedLM"],
            "attention_dropout": 0.1,
            "dim": 768,
            "dropout": 0.1,
            "hidden_dim": 3072,
            "initializer_range": 0.02,
            "max_position_embeddings": 512,
            "model_type": "distilbert",
            "n_heads": 12,
            "n_layers": 6,
            "pad_token_id": 0,
            "qa_dropout": 0.1,
            "seq_classif_dropout": 0.2,
            "sinusoidal_pos_embds": False,
            "tie_weights_": True,
            "transformers_version": "4.10.0.dev0",
            "vocab_size": 30522,
        },
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
        "roberta_base", ROBERTA_CONFIG, ENCODER_SIZES | {"max_position_embeddings": 22}, ROBERTA_NAMES
    ),
    "xlm-roberta": Release(  # FacebookAI/xlm-roberta-base; names by class
        "xlm_roberta_base",
        ROBERTA_CONFIG
        | {
            "architectures": ["XLMRobertaForMaskedLM"],
            "model_type": "xlm-roberta",
            "output_past": True,
            "vocab_size": 250002,
        },
        ENCODER_SIZES | {"max_position_embeddings": 22},
        ROBERTA_NAMES,
    ),
    "albert": Release(  # albert/albert-base-v2; names by class
        "albert_base",
        {
            "architectures": ["AlbertForMaskedLM"],
            "attention_probs_dropout_prob": 0,
            "bos_token_id": 2,
            "classifier_dropout_prob": 0.1,
            "down_scale_factor": 1,
            "embedding_size": 128,
            "eos_token_id": 3,
            "gap_size": 0,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "inner_group_num": 1,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-12,
            "max_position_embeddings": 512,
            "model_type": "albert",
            "net_structure_type": 0,
            "num_attention_heads": 12,
            "num_hidden_groups": 1,
            "num_hidden_layers": 12,
            "num_memory_blocks": 0,
            "pad_token_id": 0,
            "type_vocab_size": 2,
            "vocab_size": 30000,
        },
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
        ELECTRA_CONFIG,
        ENCODER_SIZES | {"embedding_size": 8},
        f"{ELECTRA_NAMES} discriminator_predictions.{{dense,dense_prediction}}.{WB}",
        changes={"generator": None},
    ),
    "electra-generator": Release(  # google/electra-small-generator; names by class
        "electra_small",
        ELECTRA_CONFIG | {"architectures": ["ElectraForMaskedLM"]},
        ENCODER_SIZES | {"embedding_size": 8},
        f"{ELECTRA_NAMES} generator_predictions.{{LayerNorm,dense}}.{WB} generator_lm_head.{WB}",
        changes={"generator": None, "masked_lm_head": True, "replaced_token_head": False},
    ),
    "deberta-v3": Release(  # microsoft/deberta-v3-base, and the copies of other sizes beside it
        "deberta_v3_base",
        {
            "model_type": "deberta-v2",
            "attention_probs_dropout_prob": 0.1,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "max_position_embeddings": 512,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": "p2c|c2p",
            "layer_norm_eps": 1e-7,
            "max_relative_positions": -1,
            "position_biased_input": False,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "type_vocab_size": 0,
            "vocab_size": 128100,
        },
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
        {
            "architectures": ["ModernBertForMaskedLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 50281,
            "classifier_activation": "gelu",
            "classifier_bias": False,
            "classifier_dropout": 0.0,
            "classifier_pooling": "mean",
            "cls_token_id": 50281,
            "decoder_bias": True,
            "deterministic_flash_attn": False,
            "embedding_dropout": 0.0,
            "eos_token_id": 50282,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "gradient_checkpointing": False,
            "hidden_activation": "gelu",
            "hidden_size": 768,
            "initializer_cutoff_factor": 2.0,
            "initializer_range": 0.02,
            "intermediate_size": 1152,
            "layer_norm_eps": 1e-05,
            "local_attention": 128,
            "local_rope_theta": 10000.0,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "mlp_dropout": 0.0,
            "model_type": "modernbert",
            "norm_bias": False,
            "norm_eps": 1e-05,
            "num_attention_heads": 12,
            "num_hidden_layers": 22,
            "pad_token_id": 50283,
            "position_embedding_type": "absolute",
            "sep_token_id": 50282,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "transformers_version": "4.47.0.dev0",
            "vocab_size": 50368,
        },
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
    "t5": Release(  # google-t5/t5-small: with copies of the tied table, and a bias that nothing reads
        "t5_v1_0_small",
        T5_CONFIG,
        T5_SIZES | {"n_positions": 20, "relative_attention_num_buckets": 8},
        t5_names("DenseReluDense.{wi,wo}.weight")
        + " {encoder,decoder}.embed_tokens.weight"
        + " decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    ),
    "t5-v1.1": Release(  # google/t5-v1_1-small; names by class
        "t5_small",
        T5_1_1_CONFIG,
        T5_SIZES | {"num_decoder_layers": 3, "relative_attention_num_buckets": 8},
        t5_names("DenseReluDense.{wi_0,wi_1,wo}.weight") + " {encoder,decoder}.embed_tokens.weight lm_head.weight",
    ),
    "mt5": Release(  # google/mt5-small; names by class
        "mt5_small",
        T5_1_1_CONFIG
        | {
            "architectures": ["MT5ForConditionalGeneration"],
            "model_type": "mt5",
            "tokenizer_class": "T5Tokenizer",
            "vocab_size": 250112,
        },
        T5_SIZES | {"num_decoder_layers": 3, "relative_attention_num_buckets": 8},
        t5_names("DenseReluDense.{wi_0,wi_1,wo}.weight") + " {encoder,decoder}.embed_tokens.weight lm_head.weight",
    ),
    "bart": Release(  # facebook/bart-large: without its first "model.", and with fairseq's versions
        "bart_large",
        BART_CONFIG,
        BART_SIZES,
        "shared.weight {encoder,decoder}.version {encoder,decoder}.embed_tokens.weight "
        f"{{encoder,decoder}}.embed_positions.weight {{encoder,decoder}}.layernorm_embedding.{WB} {BART_STACKS}",
        base="model.",
    ),
    "llama": Release(  # meta-llama/Llama-2-7b-hf, whose index has the frequencies of each layer
        "llama2_7b",
        LLAMA_CONFIG,
        LLAMA_SIZES | {"num_key_value_heads": 4},
        f"{LLAMA} model.layers.#.self_attn.rotary_emb.inv_freq lm_head.weight",
    ),
    "llama-3.2": Release(  # meta-llama/Llama-3.2-1B
        "llama3_2_1b",
        LLAMA_CONFIG
        | {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0",
            "vocab_size": 128256,
        },
        LLAMA_SIZES | {"head_dim": 4},
        LLAMA,
    ),
    "mistral": Release(  # mistralai/Mistral-7B-v0.1
        "mistral_7b",
        {key: value for key, value in LLAMA_CONFIG.items() if key not in ("pretraining_tp", "rope_scaling")}
        | {
            "architectures": ["MistralForCausalLM"],
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_key_value_heads": 8,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.34.0.dev0",
        },
        LLAMA_SIZES | {"sliding_window": 5},
        f"{LLAMA} lm_head.weight",
    ),
    "qwen2.5": Release(  # Qwen/Qwen2.5-0.5B
        "qwen2_5_0_5b",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "hidden_act": "silu",
            "hidden_size": 896,
            "initializer_range": 0.02,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.40.1",
            "use_cache": True,
            "use_mrope": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        LLAMA_SIZES,
        f"{LLAMA} model.layers.#.self_attn.{{q,k,v}}_proj.bias",
    ),
    "qwen3": Release(  # Qwen/Qwen3-0.6B-Base
        "qwen3_0_6b",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        LLAMA_SIZES | {"head_dim": 8},
        f"{LLAMA} model.layers.#.self_attn.{{q,k}}_norm.weight lm_head.weight",  # a copy: its table is tied
    ),
    "gemma": Release("gemma1_2b", GEMMA_CONFIG, LLAMA_SIZES | {"head_dim": 8}, LLAMA),  # google/gemma-2b
    "gemma-2": Release(  # google/gemma-2-2b
        "gemma2_2b",
        GEMMA_CONFIG
        | {
            "architectures": ["Gemma2ForCausalLM"],
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "model_type": "gemma2",
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "transformers_version": "4.42.4",
        },
        LLAMA_SIZES | {"num_hidden_layers": 4, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
        f"model.embed_tokens.weight {under('model.layers.#', GEMMA_2_BLOCK)} model.norm.weight",
    ),
    "gemma-3": Release(  # google/gemma-3-1b-it
        "gemma3_1b",
        {key: value for key, value in GEMMA_CONFIG.items() if key != "hidden_act"}
        | {
            "architectures": ["Gemma3ForCausalLM"],
            "attn_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "eos_token_id": [1, 106],
            "final_logit_softcapping": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "transformers_version": "4.50.0.dev0",
            "vocab_size": 262144,
        },
        LLAMA_SIZES | {"num_hidden_layers": 7, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
        f"model.embed_tokens.weight {under('model.layers.#', GEMMA_2_BLOCK)} "
        "model.layers.#.self_attn.{q,k}_norm.weight model.norm.weight",
    ),
}
# Helsinki-NLP/opus-mt-en-de, whose padding is its last id; names by class. Of its released weights final_logits_bias is
# not zero, and refused: here it is, as of a model that was trained without.
RELEASED["opus-mt"] = Release(
    "transformer_base",
    {
        "_num_labels": 3,
        "activation_dropout": 0.0,
        "activation_function": "swish",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "architectures": ["MarianMTModel"],
        "attention_dropout": 0.0,
        "bad_words_ids": [[58100]],
        "bos_token_id": 0,
        "classif_dropout": 0.0,
        "d_model": 512,
        "decoder_attention_heads": 8,
        "decoder_ffn_dim": 2048,
        "decoder_layerdrop": 0.0,
        "decoder_layers": 6,
        "decoder_start_token_id": 58100,
        "dropout": 0.1,
        "encoder_attention_heads": 8,
        "encoder_ffn_dim": 2048,
        "encoder_layerdrop": 0.0,
        "encoder_layers": 6,
        "eos_token_id": 0,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
        "init_std": 0.02,
        "is_encoder_decoder": True,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
        "max_length": 512,
        "max_position_embeddings": 512,
        "model_type": "marian",
        "normalize_before": False,
        "normalize_embedding": False,
        "num_beams": 6,
        "num_hidden_layers": 6,
        "pad_token_id": 58100,
        "scale_embedding": True,
        "static_position_embeddings": True,
        "vocab_size": 58101,
    },
    BART_SIZES | {"pad_token_id": 98, "decoder_start_token_id": 98, "bad_words_ids": [[98]]},
    "final_logits_bias model.shared.weight model.{encoder,decoder}.{embed_tokens,embed_positions}.weight "
    + under("model", BART_STACKS)
    + " lm_head.weight",
    changes={"vocab_size": 58_101, "activation": "silu"},
)


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


def case_of(release: Release) -> Case:
    """What is in the file that a test writes."""
    config_json = release.config | release.tiny
    family, config = described_model(config_json)
    (of_zoo,) = [x for x in zoo.FAMILIES if x.huggingface is family and release.preset.startswith(x.prefix)][:1]
    return Case(config, of_zoo, pad_id=config_json.get("pad_token_id", 0))


def write_release(directory: pathlib.Path, release: Release) -> Case:
    """Writes config.json, tensors under their released names, and a tokenizer."""
    case = case_of(release)
    family, config = case.family.huggingface, case.config
    state = to_huggingface(family.names(config), weights(config))
    state |= {name: np.zeros(shape, np.float32) for name, shape in family.zeros(config).items()}
    state |= {copy: state[original] for copy, original in family.tied(config).items()}
    tensors = {}
    for name in names_of(release, config.num_layers):
        ours = re.sub("gamma$", "weight", re.sub("beta$", "bias", release.base + name))
        tensors[name] = np.ascontiguousarray(state[ours] if ours in state else _no_weight(name, config))
    directory.mkdir()
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(release.config | release.tiny))
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
