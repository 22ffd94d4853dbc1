"""GPT-1 (Radford et al. 2018), GPT-2 (Radford et al. 2019), GPT-3 (Brown et al. 2020, arXiv 2005.14165) and GPT-Neo
(Black et al. 2021)."""

from collections.abc import Callable

from pretrainax.config import LearnedPositions, ModelConfig, UserError
from pretrainax.zoo.family import (
    LAST,
    WHOLE,
    ConfigJson,
    Family,
    FusedPart,
    HuggingFace,
    NameRow,
    TaskClass,
    config_variants,
    layer_norm,
    linear,
    question_answering_class,
    token_classification_class,
)
from pretrainax.zoo.patterns import kinds, shortest
from pretrainax.zoo.task_heads import HeadDropout
from pretrainax.zoo.variants import pick

# variant -> (layers, width, heads). The feed-forward width is 4 x the width.
GPT1_SIZES = {"117m": (12, 768, 12)}
GPT2_SIZES = {  # named by the parameter counts of the released files; the counts in the paper are wrong
    "124m": (12, 768, 12),
    "355m": (24, 1024, 16),
    "774m": (36, 1280, 20),
    "1558m": (48, 1600, 25),
}
GPT3_SIZES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 16),
    "1_3b": (24, 2048, 16),
    "2_7b": (32, 2560, 32),
    "6_7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "175b": (96, 12288, 96),
}
GPT_NEO_SIZES = {
    "125m": (12, 768, 12),
    "1_3b": (24, 2048, 16),
    "2_7b": (32, 2560, 20),
}


def gpt1(variant: str = "117m") -> ModelConfig:
    """Builds the model config of GPT-1, which applies LayerNorm after each residual addition.

    Raises:
      UserError: the variant is unknown.
    """
    config = _decoder(*pick("gpt1", variant, GPT1_SIZES), context=512)
    config.vocab_size, config.norm_at, config.scale_residual_init = 40_478, "post", False
    return config


def gpt2(variant: str = "124m") -> ModelConfig:
    """Builds the model config of GPT-2; raises UserError for an unknown variant."""
    return _decoder(*pick("gpt2", variant, GPT2_SIZES), context=1024)


def gpt3(variant: str = "125m") -> ModelConfig:
    """Builds the model config of GPT-3: GPT-2 with local attention in every second layer.

    The window has 256 tokens, as in GPT-Neo.

    Raises:
      UserError: the variant is unknown.
    """
    config = _decoder(*pick("gpt3", variant, GPT3_SIZES), context=2048)
    config.layer_pattern, config.window = ("global", "local"), 256
    config.dropout_rate = config.attention_dropout_rate = 0.0
    return config


def gpt_neo(variant: str = "125m") -> ModelConfig:
    """Builds the model config of GPT-Neo, which does not scale attention logits.

    Raises:
      UserError: the variant is unknown.
    """
    config = _decoder(*pick("gpt_neo", variant, GPT_NEO_SIZES), context=2048)
    config.layer_pattern, config.window = ("global", "local"), 256
    config.dropout_rate = config.attention_dropout_rate = 0.0
    config.attention_scale, config.qkv_bias = 1.0, False
    return config


def _decoder(num_layers: int, d_model: int, num_heads: int, context: int) -> ModelConfig:
    """Builds the model config of GPT-2 with the given sizes; `context` is the number of positions."""
    return ModelConfig(
        family="decoder",
        vocab_size=50_257,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=4 * d_model,
        num_heads=num_heads,
        position=LearnedPositions(context),
        norm="layer",
        norm_at="pre",
        norm_epsilon=1e-5,
        activation="gelu_tanh",
        dropout_rate=0.1,
        attention_dropout_rate=0.1,
        scale_residual_init=True,
    )


# --- Hugging Face --------------------------------------------------------------------------------------------------


def _conv_rows(path: str, name: str, part: FusedPart = WHOLE) -> list[NameRow]:
    """Builds the name-table rows of a linear layer that is a Conv1D in transformers.

    The weight of a Conv1D is [in, out], like our kernel and unlike the weight of a torch.nn.Linear.
    """
    return [NameRow(f"{path}/kernel", f"{name}.weight", part=part), NameRow(f"{path}/bias", f"{name}.bias", part=part)]


def _conv_block_rows() -> list[NameRow]:
    """Builds the name-table rows of the blocks of GPT-1 and GPT-2."""
    block, layer = "decoder/blocks", "transformer.h.{layer}"
    return [
        *layer_norm(f"{block}/self_attention_norm", f"{layer}.ln_1"),
        *_conv_rows(f"{block}/self_attention/query", f"{layer}.attn.c_attn", part=FusedPart(0, 1, 3)),
        *_conv_rows(f"{block}/self_attention/key", f"{layer}.attn.c_attn", part=FusedPart(1, 1, 3)),
        *_conv_rows(f"{block}/self_attention/value", f"{layer}.attn.c_attn", part=FusedPart(2, 1, 3)),
        *_conv_rows(f"{block}/self_attention/out", f"{layer}.attn.c_proj"),
        *layer_norm(f"{block}/mlp_norm", f"{layer}.ln_2"),
        *_conv_rows(f"{block}/mlp/up", f"{layer}.mlp.c_fc"),
        *_conv_rows(f"{block}/mlp/down", f"{layer}.mlp.c_proj"),
    ]


def _output_rows(config: ModelConfig) -> list[NameRow]:
    return [] if config.tie_embeddings else linear("unembedding", "lm_head", bias=False)


def gpt1_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' OpenAIGPTLMHeadModel."""
    return [
        NameRow("token_embedding/embedding", "transformer.tokens_embed.weight"),
        NameRow("position_embedding/embedding", "transformer.positions_embed.weight"),
        *_conv_block_rows(),
        *_output_rows(config),
    ]


def gpt2_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' GPT2LMHeadModel."""
    return [
        NameRow("token_embedding/embedding", "transformer.wte.weight"),
        NameRow("position_embedding/embedding", "transformer.wpe.weight"),
        *_conv_block_rows(),
        *layer_norm("decoder/final_norm", "transformer.ln_f"),
        *_output_rows(config),
    ]


def gpt_neo_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' GPTNeoForCausalLM."""
    block, layer = "decoder/blocks", "transformer.h.{layer}"
    return [
        NameRow("token_embedding/embedding", "transformer.wte.weight"),
        NameRow("position_embedding/embedding", "transformer.wpe.weight"),
        *layer_norm(f"{block}/self_attention_norm", f"{layer}.ln_1"),
        *linear(f"{block}/self_attention/query", f"{layer}.attn.attention.q_proj", bias=False),
        *linear(f"{block}/self_attention/key", f"{layer}.attn.attention.k_proj", bias=False),
        *linear(f"{block}/self_attention/value", f"{layer}.attn.attention.v_proj", bias=False),
        *linear(f"{block}/self_attention/out", f"{layer}.attn.attention.out_proj", bias=True),
        *layer_norm(f"{block}/mlp_norm", f"{layer}.ln_2"),
        *linear(f"{block}/mlp/up", f"{layer}.mlp.c_fc", bias=True),
        *linear(f"{block}/mlp/down", f"{layer}.mlp.c_proj", bias=True),
        *layer_norm("decoder/final_norm", "transformer.ln_f"),
        *_output_rows(config),
    ]


_FIELDS = {  # key in config.json of GPT-1 and GPT-2 -> field of ModelConfig
    "vocab_size": "vocab_size",
    "n_embd": "d_model",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_positions": "position.max_length",
    "resid_pdrop": "dropout_rate",
    "attn_pdrop": "attention_dropout_rate",
    "layer_norm_epsilon": "norm_epsilon",
    "initializer_range": "init_stddev",
    "tie_word_embeddings": "tie_embeddings",
}
_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_GPT1_ACTIVATIONS = {
    "gelu": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}  # name in config.json -> our name


def _tied(token_embedding: str) -> Callable[[ModelConfig], dict[str, str]]:
    return lambda config: {"lm_head.weight": token_embedding} if config.tie_embeddings else {}


def _read_gpt1(json: ConfigJson, config: ModelConfig) -> None:
    config.d_ff = 4 * config.d_model  # config.json has no key for d_ff
    if "afn" in json:
        if json["afn"] not in _GPT1_ACTIVATIONS:
            raise UserError(f"config.json has afn {json['afn']!r}; supported: {', '.join(_GPT1_ACTIVATIONS)}")
        config.activation = _GPT1_ACTIVATIONS[json["afn"]]


def _write_gpt1(config: ModelConfig) -> ConfigJson:
    theirs = {"gelu_tanh": "gelu"}  # "gelu" is read as gelu_tanh, so write_config rejects our exact "gelu"
    return {"afn": theirs.get(config.activation, config.activation), "embd_pdrop": config.dropout_rate}


def _read_gpt2(json: ConfigJson, config: ModelConfig) -> None:
    if json.get("n_inner") is None:
        config.d_ff = 4 * config.d_model


def _write_gpt2(config: ModelConfig) -> ConfigJson:
    # n_ctx is the former name of n_positions; llama.cpp's converter reads it.
    return {"embd_pdrop": config.dropout_rate, "n_ctx": config.position.max_length}


def _read_gpt_neo(json: ConfigJson, config: ModelConfig) -> None:
    if json.get("intermediate_size") is None:
        config.d_ff = 4 * config.d_model
    types = json.get("attention_types") or [[["global", "local"], 12]]
    layers = [kind for period, repeats in types for kind in period * repeats]
    if len(layers) != config.num_layers or set(layers) - {"global", "local"}:
        raise UserError(f"config.json has attention_types {types}: not {config.num_layers} layers, 'global' or 'local'")
    if json.get("attention_layers", layers) != layers:
        raise UserError(f"config.json has attention_types {types}, and other attention_layers")
    config.layer_pattern = shortest(layers, usual=config.layer_pattern)
    if "local" not in layers:
        config.window = None


def _write_gpt_neo(config: ModelConfig) -> ConfigJson:
    period = list(config.layer_pattern)
    repeats, remainder = divmod(config.num_layers, len(period))
    return {
        "attention_types": [[kinds(config), 1]] if remainder else [[period, repeats]],
        "attention_layers": kinds(config),
        "embed_dropout": config.dropout_rate,
    }


FAMILIES = (
    Family(
        name="GPT-1",
        prefix="gpt1_",
        preset=gpt1,
        sizes=GPT1_SIZES,
        paper="Radford et al. 2018",
        objective="causal language modelling",
        huggingface=HuggingFace(
            model_type="openai-gpt",
            architecture="OpenAIGPTLMHeadModel",
            base=gpt1,
            fields=_FIELDS,
            table=gpt1_names,
            sequence_classification_class=TaskClass("OpenAIGPTForSequenceClassification", LAST),
            aliases=_ALIASES,
            read=_read_gpt1,
            write=_write_gpt1,
            tied=_tied("transformer.tokens_embed.weight"),
            ignored=(r"transformer\.h\.\d+\.attn\.bias", r"transformer\.position_ids"),
        ),
    ),
    Family(
        name="GPT-2",
        prefix="gpt2_",
        preset=gpt2,
        sizes=GPT2_SIZES,
        paper="Radford et al. 2019",
        objective="causal language modelling",
        configs=config_variants("gpt2", GPT2_SIZES),
        huggingface=HuggingFace(
            model_type="gpt2",
            architecture="GPT2LMHeadModel",
            base=gpt2,
            fields=_FIELDS | {"activation_function": "activation", "n_inner": "d_ff"},
            nullable=("n_inner",),
            table=gpt2_names,
            sequence_classification_class=TaskClass("GPT2ForSequenceClassification", LAST),
            token_classification_class=token_classification_class("GPT2ForCausalLM", dropout=HeadDropout(default=0.1)),
            question_answering_class=question_answering_class("GPT2ForCausalLM"),
            constants={
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False,
                "add_cross_attention": False,
            },
            aliases=_ALIASES,
            read=_read_gpt2,
            write=_write_gpt2,
            tied=_tied("transformer.wte.weight"),
            ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        ),
    ),
    Family(
        name="GPT-3",
        prefix="gpt3_",
        preset=gpt3,
        sizes=GPT3_SIZES,
        paper="Brown et al. 2020, arXiv 2005.14165",
        objective="causal language modelling",
        configs=config_variants("gpt3", GPT3_SIZES),
        # transformers has no class for GPT-3. Its GPT-2 has no local layers. Its GPT-Neo has no biases of queries, keys
        # and values, and does not scale attention logits.
        huggingface=None,
    ),
    Family(
        name="GPT-Neo",
        prefix="gpt_neo_",
        preset=gpt_neo,
        sizes=GPT_NEO_SIZES,
        paper="Black et al. 2021, 10.5281/zenodo.5297715",
        objective="causal language modelling",
        huggingface=HuggingFace(
            model_type="gpt_neo",
            architecture="GPTNeoForCausalLM",
            base=lambda: gpt_neo("1_3b"),
            fields={
                "vocab_size": "vocab_size",
                "hidden_size": "d_model",
                "num_layers": "num_layers",
                "num_heads": "num_heads",
                "intermediate_size": "d_ff",
                "window_size": "window",
                "max_position_embeddings": "position.max_length",
                "activation_function": "activation",
                "resid_dropout": "dropout_rate",
                "attention_dropout": "attention_dropout_rate",
                "layer_norm_epsilon": "norm_epsilon",
                "initializer_range": "init_stddev",
                "tie_word_embeddings": "tie_embeddings",
            },
            table=gpt_neo_names,
            sequence_classification_class=TaskClass("GPTNeoForSequenceClassification", LAST),
            token_classification_class=token_classification_class(
                "GPTNeoForCausalLM", dropout=HeadDropout(default=0.1)
            ),
            question_answering_class=question_answering_class("GPTNeoForCausalLM"),
            aliases={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
            nullable=("intermediate_size",),
            read=_read_gpt_neo,
            write=_write_gpt_neo,
            tied=_tied("transformer.wte.weight"),
            ignored=(r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias",),
        ),
    ),
)
