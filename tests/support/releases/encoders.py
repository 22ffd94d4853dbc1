"""Defines the releases of encoders."""

from tests.support.releases.release import ENCODER_SIZES, LLAMA, LLAMA_SIZES, WB, Release, under

BERT_BLOCK = (
    f"attention.self.{{query,key,value}}.{WB} attention.output.dense.{WB} intermediate.dense.{WB} output.dense.{WB}"
)
NEW_NORMS = f"attention.output.LayerNorm.{WB} output.LayerNorm.{WB}"
OLD_NORMS = "attention.output.LayerNorm.{gamma,beta} output.LayerNorm.{gamma,beta}"
EMBEDDINGS = "embeddings.{word,position,token_type}_embeddings.weight"

ROBERTA_NAMES = " ".join(
    (
        under("roberta", f"embeddings.position_ids {EMBEDDINGS} embeddings.LayerNorm.{WB} pooler.dense.{WB}"),
        under("roberta.encoder.layer.#", f"{BERT_BLOCK} {NEW_NORMS}"),
        f"lm_head.bias lm_head.decoder.weight lm_head.dense.{WB} lm_head.layer_norm.{WB}",
    )
)

LONGFORMER_NAMES = ROBERTA_NAMES.replace("roberta", "longformer").replace(
    "{query,key,value}", "{query,key,value,query_global,key_global,value_global}"
)

ELECTRA_NAMES = " ".join(
    (
        under("electra", f"embeddings.position_ids {EMBEDDINGS} embeddings.LayerNorm.{WB} embeddings_project.{WB}"),
        under("electra.encoder.layer.#", f"{BERT_BLOCK} {NEW_NORMS}"),
    )
)

ENCODERS = {
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
    "longformer": Release(  # allenai/longformer-base-4096; names by class
        "longformer_base",
        ENCODER_SIZES | {"max_position_embeddings": 22, "attention_window": [4, 4, 4]},
        LONGFORMER_NAMES,
    ),
    "bigbird": Release(  # google/bigbird-roberta-base; names by class
        "bigbird_base",
        ENCODER_SIZES | {"block_size": 1, "num_random_blocks": 2},
        " ".join(
            (
                under("bert", f"embeddings.position_ids {EMBEDDINGS} embeddings.LayerNorm.{WB} pooler.{WB}"),
                under("bert.encoder.layer.#", f"{BERT_BLOCK} {NEW_NORMS}"),
                f"cls.predictions.bias cls.predictions.decoder.{WB} cls.predictions.transform.dense.{WB} "
                f"cls.predictions.transform.LayerNorm.{WB} cls.seq_relationship.{WB}",
            )
        ),
        changes={"pair_head": True},
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
    "deberta-v3": Release(  # microsoft/deberta-v3-base, and its copies of other sizes
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
                "!model.layers.0.attn_norm.weight",  # the norm of the embeddings replaces it
                "head.dense.weight head.norm.weight decoder.bias",
            )
        ),
    ),
    "eurobert": Release(  # EuroBERT/EuroBERT-610m
        "eurobert_610m",
        LLAMA_SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "mask_token_id": 2},
        f"{LLAMA} lm_head.weight",
    ),
}
