"""gpt-oss (OpenAI 2025, arXiv 2508.10925): biased experts, attention sinks, local attention in every second layer."""

from pretrainax.config import MixtureOfExperts, ModelConfig, RotaryPositions, YarnScaling
from pretrainax.zoo import experts, llama, patterns, rotary
from pretrainax.zoo.family import (
    LAST,
    ConfigJson,
    Every,
    Family,
    HuggingFace,
    NameRow,
    TaskClass,
    config_variants,
    linear,
    token_classification_class,
)
from pretrainax.zoo.variants import pick

SIZES = {"20b": (24, 32), "120b": (36, 128)}  # variant -> (layers, experts)


def gpt_oss(variant: str = "20b") -> ModelConfig:
    """Builds the model config of gpt-oss; raises UserError for an unknown variant."""
    layers, num_experts = pick("gpt_oss", variant, SIZES)
    return llama.decoder(
        layers,
        *(2880, 2880, 64, 8),
        vocab_size=201_088,
        head_dim=64,
        position=RotaryPositions(131_072, theta=150_000.0, scaling=YarnScaling(32.0, rounded=False)),
        layer_pattern=("local", "global"),
        window=128,
        norm_epsilon=1e-5,
        use_bias=True,
        attention_sinks=True,
        activation="gelu_sigmoid",
        gate_limit=7.0,
        tie_embeddings=False,
        experts=MixtureOfExperts(num_experts=num_experts, top_k=4, balance_weight=4 * 0.9),
    )


def _expert_rows(config: ModelConfig) -> list[NameRow]:
    ours, theirs = f"{llama.BLOCK}/mlp", f"{llama.LAYER}.mlp"
    rows = linear(f"{ours}/router", f"{theirs}.router", bias=True)
    for name, tensor, part in (("gate", "gate_up_proj", Every(0, 2)), ("up", "gate_up_proj", Every(1, 2))):
        rows.append(NameRow(f"{ours}/experts_{name}/kernel", f"{theirs}.experts.{tensor}", part=part))
        rows.append(NameRow(f"{ours}/experts_{name}/bias", f"{theirs}.experts.{tensor}_bias", part=part))
    rows.append(NameRow(f"{ours}/experts_down/kernel", f"{theirs}.experts.down_proj"))
    rows.append(NameRow(f"{ours}/experts_down/bias", f"{theirs}.experts.down_proj_bias"))
    return rows


def _names(config: ModelConfig) -> list[NameRow]:
    return llama.huggingface_names(config, _expert_rows)


def _base() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = gpt_oss("120b")
    assert isinstance(config.position, RotaryPositions)
    config.position.scaling = None
    return config


_YARN: ConfigJson = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 4096}  # transformers' default, also for rope_scaling null


def _read(json: ConfigJson, config: ModelConfig) -> None:
    rotary.read(json, config, default=_YARN)
    experts.read(json, config)
    patterns.read(json, config, otherwise=patterns.kinds(config))


def _write(config: ModelConfig) -> ConfigJson:
    json = llama.write_heads(config) | rotary.write(config) | experts.write(config) | patterns.write(config)
    if json["rope_scaling"] is None:  # transformers 5 reads null as YaRN, transformers 4 as no scaling
        json["rope_parameters"] = {"rope_type": "default", "rope_theta": config.position.theta}
    return json


FAMILIES = (
    Family(
        name="gpt-oss",
        prefix="gpt_oss_",
        preset=gpt_oss,
        sizes=SIZES,
        paper="OpenAI 2025, arXiv 2508.10925",
        objective="causal language modelling",
        configs=config_variants("gpt_oss", SIZES),
        huggingface=HuggingFace(
            model_type="gpt_oss",
            architecture="GptOssForCausalLM",
            base=_base,
            fields={key: path for key, path in llama.FIELDS.items() if key != "hidden_act"}
            | {
                "num_local_experts": "experts.num_experts",
                "num_experts_per_tok": "experts.top_k",
                "swiglu_limit": "gate_limit",
                "sliding_window": "window",
            },
            table=_names,
            sequence_classification_class=TaskClass("GptOssForSequenceClassification", LAST),
            token_classification_class=token_classification_class("GptOssForCausalLM", "score"),
            constants={"attention_bias": True, "hidden_act": "silu", "swiglu_alpha": 1.702},
            aliases={"num_experts": "num_local_experts"},
            nullable=("sliding_window",),
            read=_read,
            write=_write,
            tied=llama.tied,
        ),
    ),
)
