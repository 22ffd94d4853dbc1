"""DeepSeekMoE (Dai et al. 2024, arXiv 2401.06066), DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434), and DeepSeek-V3
(2024, arXiv 2412.19437), whose architecture R1 (2025, arXiv 2501.12948) shares."""

from collections.abc import Callable

from pretrainax.config import LatentAttention, MixtureOfExperts, ModelConfig, RotaryPositions, UserError, YarnScaling
from pretrainax.layers.feed_forward import layer_groups
from pretrainax.zoo import experts, llama, rotary
from pretrainax.zoo.family import (
    LAST,
    NULLABLE,
    ConfigJson,
    Family,
    HuggingFace,
    NameRow,
    TaskClass,
    config_variants,
    linear,
    token_classification_class,
)
from pretrainax.zoo.variants import pick

# variant -> (layers, width, feed-forward width of the first, dense layers, heads)
SIZES_MOE = {"moe_16b": (28, 2048, 10_944, 16)}
SIZES_2 = {"v2_lite": (27, 2048, 10_944, 16), "v2": (60, 5120, 12_288, 128)}
SIZES_3 = {"v3": (61, 7168, 18_432, 128), "r1": (61, 7168, 18_432, 128)}


def deepseek(variant: str = "v3") -> ModelConfig:
    """Builds the model config of DeepSeek with the context length of its release.

    Raises:
      UserError: the variant is unknown.
    """
    layers, width, d_ff, heads = pick("deepseek", variant, SIZES_MOE | SIZES_2 | SIZES_3)
    variant_fields = (
        _moe_fields() if variant in SIZES_MOE else _v3_fields() if variant in SIZES_3 else _v2_fields(variant)
    )
    config = llama.decoder(layers, width, d_ff, heads, heads, norm_epsilon=1e-6, tie_embeddings=False, **variant_fields)
    set_balance(config, _BALANCE[variant])
    return config


# variant -> weight of each layer's balance loss (expert-level balance factor)
_BALANCE = {"moe_16b": 0.001, "v2_lite": 0.001, "v2": 0.003, "v3": 0.0001, "r1": 0.0001}


def set_balance(config: ModelConfig, coefficient: float) -> None:
    """Sets the weight of the balance loss from DeepSeek's coefficient.

    DeepSeek adds up the balance losses of all layers, each times the coefficient (the released modeling_deepseek.py,
    AddAuxiliaryLoss). PretrainAX averages over layers, so its weight is the coefficient times the number of layers
    with experts, including the layers of the multi-token head.
    """
    assert config.experts is not None
    config.experts.balance_weight = coefficient * _expert_layers(config)


def _expert_layers(config: ModelConfig) -> int:
    layers = len(layer_groups(config, config.num_layers)[1].numbers)
    return layers + (config.multi_token.depth if config.multi_token else 0)


def _moe_fields() -> dict:
    mixture = MixtureOfExperts(num_experts=64, top_k=6, d_ff=1408, **_MIXTURE_FIELDS)
    return {"vocab_size": 102_400, "position": RotaryPositions(4096), "experts": mixture}


_MIXTURE_FIELDS: dict = {"shared_experts": 2, "normalized": False, "first_dense": 1, "balance_over": "row"}


def _v2_fields(variant: str) -> dict:
    """Returns DeepSeek-V2's ModelConfig fields, apart from the sizes."""
    mixture = MixtureOfExperts(num_experts=64, top_k=6, d_ff=1408, **_MIXTURE_FIELDS)
    if variant == "v2":
        mixture.num_experts, mixture.d_ff, mixture.groups, mixture.top_groups, mixture.scale = 160, 1536, 8, 3, 16.0
    latent = LatentAttention(query_rank=1536 if variant == "v2" else None)
    position = _yarn_positions(mscale=0.707)
    return {"vocab_size": 102_400, "position": position, "head_dim": 192, "latent_attention": latent} | {
        "experts": mixture
    }


def _v3_fields() -> dict:
    """Returns the ModelConfig fields of DeepSeek-V3 and R1, apart from the sizes."""
    mixture = MixtureOfExperts(
        num_experts=256,
        top_k=8,
        d_ff=2048,
        shared_experts=1,
        scores="sigmoid",
        scale=2.5,
        groups=8,
        top_groups=4,
        group_score="best_two",
        first_dense=3,
        balance_over="row",
        bias_rate=0.001,
    )
    position = _yarn_positions(mscale=1.0)
    return {
        "vocab_size": 129_280,
        "position": position,
        "head_dim": 192,
        "latent_attention": LatentAttention(query_rank=1536),
    } | {"experts": mixture}


def _yarn_positions(mscale: float) -> RotaryPositions:
    scaling = YarnScaling(mscale=mscale, mscale_all_dim=mscale)
    return RotaryPositions(163_840, scaling=scaling, interleaved=True)


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def _latent_rows(config: ModelConfig) -> list[NameRow]:
    """Builds the name-table rows of multi-head latent attention."""
    ours, theirs = f"{llama.BLOCK}/self_attention", f"{llama.LAYER}.self_attn"
    assert config.latent_attention is not None
    if config.latent_attention.query_rank is None:
        query = linear(f"{ours}/query", f"{theirs}.q_proj", bias=False)
    else:
        query = [
            *linear(f"{ours}/query_down", f"{theirs}.q_a_proj", bias=False),
            NameRow(f"{ours}/query_down_norm/scale", f"{theirs}.q_a_layernorm.weight"),
            *linear(f"{ours}/query_up", f"{theirs}.q_b_proj", bias=False),
        ]
    return [
        *query,
        *linear(f"{ours}/key_value_down", f"{theirs}.kv_a_proj_with_mqa", bias=False),
        NameRow(f"{ours}/key_value_down_norm/scale", f"{theirs}.kv_a_layernorm.weight"),
        *linear(f"{ours}/key_value_up", f"{theirs}.kv_b_proj", bias=False),
        *linear(f"{ours}/out", f"{theirs}.o_proj", bias=False),
    ]


def _mixture_rows(config: ModelConfig) -> list[NameRow]:
    """Builds the name-table rows of the router, the experts and the shared experts."""
    assert config.experts is not None
    ours, theirs = f"{llama.BLOCK}/mlp", f"{llama.LAYER}.mlp"
    rows = experts.rows("mlp", gate="gate_proj", up="up_proj", down="down_proj")
    for name in ("gate", "up", "down") if config.experts.shared_experts else ():
        rows += linear(f"{ours}/shared_{name}", f"{theirs}.shared_experts.{name}_proj", bias=False)
    if config.experts.bias_rate is not None:
        rows.append(NameRow(f"{ours}/router/balance", f"{theirs}.gate.e_score_correction_bias"))
    return rows


def _names(config: ModelConfig) -> list[NameRow]:
    attention = llama.attention_rows if config.latent_attention is None else _latent_rows
    dense_group, expert_group = layer_groups(config, config.num_layers)
    dense_rows = llama.block_rows(dense_group.config, attention, llama.feed_forward_rows)
    return [
        *llama.outer_rows(config),
        *experts.rows_of_kind(expert_group, "decoder", llama.block_rows(expert_group.config, attention, _mixture_rows)),
        *experts.rows_of_kind(dense_group, "decoder", dense_rows),
    ]


_FIELDS = {key: path for key, path in llama.FIELDS.items() if key != "head_dim"} | {
    "n_routed_experts": "experts.num_experts",
    "num_experts_per_tok": "experts.top_k",
    "moe_intermediate_size": "experts.d_ff",
    "norm_topk_prob": "experts.normalized",
    "n_shared_experts": "experts.shared_experts",
    "routed_scaling_factor": "experts.scale",
    "first_k_dense_replace": "experts.first_dense",
}
_LATENT_FIELDS = {key: path for key, path in _FIELDS.items() if key != "rms_norm_eps"} | {
    "kv_lora_rank": "latent_attention.rank",
    "q_lora_rank": "latent_attention.query_rank",
    "qk_rope_head_dim": "latent_attention.rotary_dim",
    "v_head_dim": "latent_attention.value_dim",
    "n_group": "experts.groups",
    "topk_group": "experts.top_groups",
}


def _read(json: ConfigJson, config: ModelConfig) -> None:
    """Sets rotary positions, latent attention and the mixture of experts from config.json."""
    mixture, latent = config.experts, config.latent_attention
    assert mixture is not None
    if json.get("moe_layer_freq", 1) != 1:
        raise UserError(f"config.json has moe_layer_freq {json['moe_layer_freq']}; only 1 is supported")
    rotary.read(json, config)
    if latent is not None:
        config.head_dim = json.get("qk_nope_head_dim", 128) + latent.rotary_dim
    mixture.shared_experts, mixture.first_dense = mixture.shared_experts or None, mixture.first_dense or None
    mixture.scale = None if mixture.scale == 1 else mixture.scale
    set_balance(config, json.get("aux_loss_alpha", 0.001))


def _read_latent(json: ConfigJson, config: ModelConfig) -> None:
    """Sets the fields of DeepSeek-V3 from config.json, which DeepSeek-V2 shares."""
    _read(json, config)
    assert config.experts is not None and config.latent_attention is not None
    groups = config.experts.groups, config.experts.top_groups
    if None in groups:
        raise UserError(f"config.json has n_group {groups[0]} and topk_group {groups[1]}; both must be numbers")
    config.experts.groups, config.experts.top_groups = (None, None) if groups == (1, 1) else groups


def _read_v2(json: ConfigJson, config: ModelConfig) -> None:
    """Sets the fields of DeepSeek-V2 from config.json; `topk_method` determines if the model has expert groups."""
    method = json.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(f"config.json has topk_method {method!r}; supported: greedy, group_limited_greedy")
    if json.get("num_experts_per_tok") is None:
        raise UserError("config.json has no num_experts_per_tok, the number of experts of a token")
    assert config.experts is not None
    if method == "greedy":
        config.experts.groups = config.experts.top_groups = 1
    _read_latent(json, config)


def _read_v3(json: ConfigJson, config: ModelConfig) -> None:
    """Sets the fields of DeepSeek-V3; in transformers, `head_dim` replaces `qk_rope_head_dim` in rotary positions."""
    _read_latent(json, config)
    assert config.latent_attention is not None
    width = config.latent_attention.rotary_dim
    if json.get("head_dim", width) != width:
        raise UserError(f"config.json has head_dim {json['head_dim']}, which must be qk_rope_head_dim, {width}")


def _write(config: ModelConfig) -> ConfigJson:
    """Returns the config.json keys for rotary positions, latent attention and the mixture of experts."""
    mixture, latent = config.experts, config.latent_attention
    assert mixture is not None
    json = {
        "num_key_value_heads": config.kv_heads,
        "n_shared_experts": mixture.shared_experts or 0,
        "first_k_dense_replace": mixture.first_dense or 0,
        "routed_scaling_factor": mixture.scale or 1.0,
        "aux_loss_alpha": mixture.balance_weight / max(_expert_layers(config), 1),
    }
    if latent is not None:
        json |= {"qk_nope_head_dim": config.dim_per_head - latent.rotary_dim}
        json |= {"n_group": mixture.groups or 1, "topk_group": mixture.top_groups or 1}
    return json | experts.width(config) | rotary.write(config)


def _write_v2(config: ModelConfig) -> ConfigJson:
    assert config.experts is not None
    return _write(config) | {"topk_method": "greedy" if config.experts.groups is None else "group_limited_greedy"}


def _base(variant: str, **mixture: object) -> Callable[[], ModelConfig]:
    """Returns a function, used as `HuggingFace.base`, that builds the model config with transformers' defaults.

    Args:
      variant: the variant that supplies the defaults, except for YaRN, which is off, and the fields in `mixture`.
      mixture: fields of `config.experts`, with transformers' defaults where these differ from the variant.
    """

    def base() -> ModelConfig:
        config = deepseek(variant)
        config.position.scaling = None  # pyright: ignore[reportAttributeAccessIssue]
        for name, value in mixture.items():
            setattr(config.experts, name, value)
        return config

    return base


def _base_v2() -> ModelConfig:
    """Builds the DeepSeek-V2 config with transformers' defaults, which apply to keys missing from config.json."""
    config = _base("v2", first_dense=None, groups=None, top_groups=None, scale=None, num_experts=64, d_ff=1407)()
    config.num_layers, config.d_model, config.d_ff, config.num_heads, config.num_kv_heads = 32, 4096, 11008, 32, None
    config.position.max_length = 2048
    return config


def _base_v3() -> ModelConfig:
    """Builds the DeepSeek-V3 config with transformers' defaults, which apply to keys missing from config.json."""
    config = _base("v3")()
    config.position.max_length = 4096
    return config


def _zeros(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the empty tensors that transformers has for the shared experts of a model without shared experts."""
    assert config.experts is not None
    if config.experts.shared_experts:
        return {}
    layers = layer_groups(config, config.num_layers)[1].numbers
    shapes = {"gate": (0, config.d_model), "up": (0, config.d_model), "down": (config.d_model, 0)}
    names = {f"{llama.LAYER}.mlp.shared_experts.{name}_proj.weight": shape for name, shape in shapes.items()}
    return {name.format(layer=layer): shape for layer in layers for name, shape in names.items()}


_CONSTANTS: ConfigJson = {"attention_bias": False}
_LATENT_CONSTANTS = _CONSTANTS | {"mlp_bias": False, "rms_norm_eps": 1e-6}  # the norms of latents always have 1e-6
_LATENT_NULLABLE = (*NULLABLE, "n_group", "topk_group")
FAMILIES = (
    Family(
        name="DeepSeekMoE",
        prefix="deepseek_",
        preset=deepseek,
        sizes=SIZES_MOE,
        paper="Dai et al. 2024, arXiv 2401.06066",
        objective="causal language modelling",
        configs=config_variants("deepseek", SIZES_MOE),
        huggingface=HuggingFace(
            model_type="deepseek",
            architecture="DeepseekForCausalLM",
            in_transformers=False,
            base=_base("moe_16b", first_dense=None),
            fields=_FIELDS,
            nullable=(*NULLABLE, "n_shared_experts", "routed_scaling_factor", "first_k_dense_replace"),
            table=_names,
            constants=_CONSTANTS | {"scoring_func": "softmax"},
            read=_read,
            write=_write,
            tied=llama.tied,
        ),
    ),
    Family(
        name="DeepSeek-V2",
        prefix="deepseek_",
        preset=deepseek,
        sizes=SIZES_2,
        paper="DeepSeek-AI 2024, arXiv 2405.04434",
        objective="causal language modelling",
        configs=config_variants("deepseek", SIZES_2),
        huggingface=HuggingFace(
            model_type="deepseek_v2",
            architecture="DeepseekV2ForCausalLM",
            base=_base_v2,
            divisible=True,
            aliases={"num_experts": "n_routed_experts"},
            fields={key: path for key, path in _LATENT_FIELDS.items() if key != "norm_topk_prob"},
            nullable=_LATENT_NULLABLE,
            table=_names,
            constants=_LATENT_CONSTANTS | {"norm_topk_prob": False, "scoring_func": "softmax"},
            read=_read_v2,
            write=_write_v2,
            zeros=_zeros,
            tied=llama.tied,
            sequence_classification_class=TaskClass("DeepseekV2ForSequenceClassification", LAST),
        ),
    ),
    Family(
        name="DeepSeek-V3, R1",
        prefix="deepseek_",
        preset=deepseek,
        sizes=SIZES_3,
        paper="DeepSeek-AI 2024, arXiv 2412.19437; 2025, arXiv 2501.12948",
        objective="causal language modelling",
        configs=config_variants("deepseek", ["v3"]),
        huggingface=HuggingFace(
            model_type="deepseek_v3",
            architecture="DeepseekV3ForCausalLM",
            base=_base_v3,
            aliases={"num_local_experts": "n_routed_experts"},
            fields=_LATENT_FIELDS,
            nullable=_LATENT_NULLABLE,
            table=_names,
            constants=_LATENT_CONSTANTS
            | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
            read=_read_v3,
            write=_write,
            zeros=_zeros,
            tied=llama.tied,
            sequence_classification_class=TaskClass("DeepseekV3ForSequenceClassification", LAST),
            token_classification_class=token_classification_class("DeepseekV3ForCausalLM", "score"),
            ignored=(r"model\.layers\.61\..*",),  # the multi-token prediction layer
        ),
    ),
)
