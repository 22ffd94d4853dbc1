"""Switch Transformer (Fedus et al. 2021, arXiv 2101.03961): T5 with experts in every second layer, top-1 routed.

NOTE In transformers, an expert processes at most 64 tokens per sequence (`expert_capacity`), including padding, and
drops all other tokens. In this package, an expert processes all its tokens unless `config.model.experts.capacity` is
set. An import reports the ignored key.
"""

from pretrainax.config import MixtureOfExperts, ModelConfig, UserError
from pretrainax.layers.feed_forward import layer_groups
from pretrainax.zoo import experts, t5
from pretrainax.zoo.family import ConfigJson, Family, HuggingFace, NameRow, config_variants, linear
from pretrainax.zoo.variants import pick

# variant -> (layers of each stack, width, feed-forward, heads, experts)
SIZES = {
    "base_8": (12, 768, 3072, 12, 8),
    "base_16": (12, 768, 3072, 12, 16),
    "base_32": (12, 768, 3072, 12, 32),
    "base_64": (12, 768, 3072, 12, 64),
    "base_128": (12, 768, 3072, 12, 128),
    "base_256": (12, 768, 3072, 12, 256),
    "large_128": (24, 1024, 4096, 16, 128),
    "xxl_128": (24, 4096, 10240, 64, 128),
    "c_2048": (15, 2080, 6144, 30, 2048),
}
_UNLIMITED_CAPACITY = 2**31 - 1  # value of expert_capacity, in tokens per sequence, that never drops tokens


def switch(variant: str = "base_8") -> ModelConfig:
    """Builds the model config of Switch Transformer; raises UserError for an unknown variant."""
    layers, d_model, d_ff, num_heads, num_experts = pick("switch", variant, SIZES)
    config = t5.t5("v1_0_base")
    config.num_layers, config.d_model, config.d_ff, config.num_heads = layers, d_model, d_ff, num_heads
    config.dropout_rate = config.attention_dropout_rate = 0.0
    if variant == "xxl_128":
        config.activation, config.gated = "gelu_tanh", True
    config.tie_embeddings = config.scale_tied_logits = variant not in ("xxl_128", "c_2048")
    every = None if variant == "c_2048" else 2
    config.experts = MixtureOfExperts(
        num_experts=num_experts, top_k=1, normalized=False, every=every, balance_weight=0.01
    )
    return config


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' SwitchTransformersForConditionalGeneration."""
    rows = t5.outer_rows(config)
    for stack, stack_config in config.stacks.items():
        dense_group, expert_group = layer_groups(stack_config, stack_config.num_layers)
        router = f"{stack}.block.{{layer}}.layer.{2 if stack == 'decoder' else 1}.mlp.router.classifier"
        dense_rows = t5.feed_forward_rows(stack, "mlp", config.gated)
        expert_rows = t5.feed_forward_rows(stack, "mlp.experts.expert_{expert}", config.gated, "experts_")
        expert_rows += linear(f"{stack}/blocks/mlp/router", router, bias=False)
        rows += experts.rows_of_kind(dense_group, stack, t5.attention_rows(stack) + dense_rows)
        rows += experts.rows_of_kind(expert_group, stack, t5.attention_rows(stack) + expert_rows)
    return rows


def _read(json: ConfigJson, config: ModelConfig) -> None:
    """Sets T5's fields, embedding tying and the spacing of expert layers from config.json."""
    t5.read_common(json, config, json.get("dense_act_fn", "relu"))
    config.tie_embeddings = config.scale_tied_logits = json.get("tie_word_embeddings", True)
    assert config.experts is not None
    counts = {stack: json.get(f"num_sparse_{stack}_layers", 3) for stack in config.stacks}
    layers = [stack.num_layers for stack in config.stacks.values()]
    steps = [step for step in (1, 2) if [count * step for count in counts.values()] == layers]
    if not steps or any(json.get(f"{stack}_sparse_step", steps[0]) != steps[0] for stack in config.stacks):
        unsupported = " and ".join(f"num_sparse_{stack}_layers {count}" for stack, count in counts.items())
        raise UserError(
            f"config.json has {unsupported}; only all layers, or every second one, of both stacks are supported"
        )
    config.experts.every = None if steps == [1] else 2


def _notes(json: ConfigJson) -> list[str]:
    if (capacity := json.get("expert_capacity", 64)) == _UNLIMITED_CAPACITY:
        return []
    return [
        f"expert_capacity {capacity} was ignored: in transformers, each expert skips its tokens after the first "
        f"{capacity} of a sequence, here it skips none"
    ]


def _write(config: ModelConfig) -> ConfigJson:
    """Returns the config.json keys of T5 and of the experts; raises UserError if transformers lacks a feature."""
    assert config.experts is not None
    every = config.experts.every or 1
    # NOTE The class in transformers has no gated feed-forward, although the released files of xxl_128 contain gated
    # layers. Without a tied output matrix, the class does not load the embeddings of the stacks; they stay random.
    supported = {"gated": False, "tie_embeddings": True}
    unsupported = [
        f"config.model.{name}={not value}" for name, value in supported.items() if getattr(config, name) != value
    ]
    unsupported += [f"config.model.experts.every={every}"] * (every > 2)
    if unsupported:
        raise UserError(f"SwitchTransformersForConditionalGeneration of transformers cannot express {unsupported[0]}")
    json = t5.write(config)
    json["dense_act_fn"], _ = t5.PROJECTIONS[json["feed_forward_proj"]]
    for stack, stack_config in config.stacks.items():
        json |= {f"num_sparse_{stack}_layers": stack_config.num_layers // every, f"{stack}_sparse_step": every}
    return json | {"expert_capacity": _UNLIMITED_CAPACITY, "router_jitter_noise": 0.0}


def _base() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = switch("base_8")
    config.d_ff, config.dropout_rate, config.num_decoder_layers = 2048, 0.1, 12
    assert config.experts is not None
    config.experts.balance_weight = config.experts.z_weight = 0.001
    return config


FAMILIES = (
    Family(
        name="Switch Transformer",
        prefix="switch_",
        preset=switch,
        sizes=SIZES,
        paper="Fedus et al. 2021, arXiv 2101.03961",
        objective="span corruption",
        configs=config_variants("switch_base", SIZES),
        huggingface=HuggingFace(
            model_type="switch_transformers",
            architecture="SwitchTransformersForConditionalGeneration",
            base=_base,
            fields={
                **t5.HUGGINGFACE.fields,
                "num_experts": "experts.num_experts",
                "router_aux_loss_coef": "experts.balance_weight",
                "router_z_loss_coef": "experts.z_weight",
            },
            table=huggingface_names,
            nullable=t5.HUGGINGFACE.nullable,
            constants={**t5.HUGGINGFACE.constants, "router_bias": False, "router_ignore_padding_tokens": False},
            aliases={key: name for key, name in t5.ALIASES.items() if key != "head_dim"},
            notes=_notes,
            read=_read,
            write=_write,
            # In the files of xxl_128 and c_2048, the output matrix has a different name.
            tied=lambda config: (
                t5.HUGGINGFACE.tied(config)
                | ({} if config.tie_embeddings else {"decoder.lm_head.weight": "lm_head.weight"})
            ),
        ),
    ),
)
