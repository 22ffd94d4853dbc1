"""Compares model configs by the function that they compute."""

import dataclasses
from typing import TypeVar

from pretrainax.config import DecoderSizes, HeadConfig, MixtureOfExperts, ModelConfig, SparseAttention

_Part = TypeVar("_Part", HeadConfig, MixtureOfExperts, SparseAttention)

# Fields that matter only in training. They do not affect the logits, so config.json need not contain them.
_TRAINING_FIELDS = ("dropout_rate", "attention_dropout_rate", "init_stddev", "scale_residual_init")


def biases(config: ModelConfig) -> tuple[bool, bool]:
    """Returns two flags: linear layers have biases; query, key and value projections have biases."""
    return config.use_bias, config.use_bias if config.qkv_bias is None else config.qkv_bias


def differences(a: ModelConfig, b: ModelConfig) -> list[str]:
    """Lists the fields that differ between two model configs, except fields that affect only training."""
    return [f.name for f in dataclasses.fields(a) if _differ(a, b, f.name)]


def _differ(a: ModelConfig, b: ModelConfig, name: str) -> bool:
    """Returns True if two model configs differ in the field `name` in a way that affects the logits."""
    if name == "num_kv_heads":  # None is equivalent to the number of query heads
        return a.kv_heads != b.kv_heads
    if name == "head_dim":
        return a.dim_per_head != b.dim_per_head
    value_a, value_b = getattr(a, name), getattr(b, name)
    if name == "experts" and value_a is not None and value_b is not None:  # a width of None means the model's d_ff
        value_a, value_b = (dataclasses.replace(x.experts, d_ff=x.experts.d_ff or x.d_ff) for x in (a, b))
    if name in ("head", "experts", "sparse_attention") and value_a is not None and value_b is not None:
        return without_training(value_a) != without_training(value_b)
    if name == "num_decoder_layers":
        return "encoder_decoder" in (a.family, b.family) and a.last_stack.num_layers != b.last_stack.num_layers
    if name == "decoder" and value_a != value_b:
        return any(_differ(a.last_stack, b.last_stack, size) for size in DecoderSizes.__dataclass_fields__)
    return name not in _TRAINING_FIELDS and value_a != value_b


def without_training(module_config: _Part) -> _Part:
    """Copies a head, experts or sparse-attention config, setting its training-only fields to fixed values.

    Two configs then differ only if their logits differ.
    """
    fixed_values = {"dropout_rate": None, "follows": (), "capacity": None, "balance_weight": 0.0, "z_weight": 0.0}
    fixed_values |= {"balance_over": "batch", "longest_question": 0}
    if getattr(module_config, "bias_rate", None) is not None:  # logits depend on the bias but not on its update rate
        fixed_values["bias_rate"] = 0.0
    return dataclasses.replace(
        module_config, **{name: x for name, x in fixed_values.items() if name in vars(module_config)}
    )
