"""Converts prompt tuning and prefix tuning between PretrainAX and PEFT.

PEFT puts the keys of a prefix into the KV cache, so a model with rotary positions does not rotate them. PretrainAX
rotates them as keys of the positions 0, 1, … The conversion applies this rotation, or its inverse.
"""

import jax.numpy as jnp
import numpy as np

from pretrainax.adapt import PrefixTuning, PromptTuning
from pretrainax.config import LearnedPositions, LongRopeScaling, ModelConfig, NoPositions, RotaryPositions, UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.interop.adapters.fields import CONFIG, WEIGHTS, number
from pretrainax.interop.adapters.modules import Adapter, State
from pretrainax.layers.feed_forward import layer_groups
from pretrainax.layers.positions.base import AttentionPositions, positions_for

_NAME = "prompt_embeddings"  # name of the only tensor of an adapter
_ATTENTION = "decoder/blocks/self_attention"
_PROMPT = "token_embedding/prompt"


# --- prefixes --------------------------------------------------------------------------------------------------------


def prefix_to_peft(tuning: PrefixTuning, trained: State, model: ModelConfig) -> Adapter:
    """Converts the trained arrays of a prefix-tuning run to a PEFT adapter.

    Args:
      trained: trained arrays by parameter path.

    Returns:
      The contents of adapter_config.json, and the tensors by name.
    """
    _check_prefix(model)
    params = tuning.expanded(dict(trained))
    keys, values = (np.asarray(params[f"{_ATTENTION}/{name}/prefix"]) for name in ("key", "value"))
    keys = np.einsum("LPHK,LPKJ->LPHJ", keys, _rotations(model, tuning.length)).astype(np.float32)
    # 2 × [L, P, H, K] -> [P, L, 2, H, K] -> [P, L · 2 · H · K]
    vectors = np.stack((keys, values), axis=2).transpose(1, 0, 2, 3, 4).reshape(tuning.length, -1)
    adapter_config = {
        "peft_type": "PREFIX_TUNING",
        "num_virtual_tokens": tuning.length,
        "token_dim": model.kv_heads * model.dim_per_head,
        "num_layers": model.num_layers,
        "num_attention_heads": model.kv_heads,
        "num_transformer_submodules": 1,
        "encoder_hidden_size": model.d_model,
        "prefix_projection": False,
    }
    return adapter_config, {_NAME: np.ascontiguousarray(vectors)}


def prefix_from_peft(described: JsonObject, tensors: State, model: ModelConfig) -> tuple:
    """Converts a PEFT adapter to a `PrefixTuning` config and its trained arrays by parameter path.

    Raises:
      UserError: the tensors do not match the model, or the model is not supported.
    """
    _check_prefix(model)
    sizes = (model.num_layers, 2, model.kv_heads, model.dim_per_head)
    vectors = _vectors(described, tensors, int(np.prod(sizes)))
    vectors = vectors.reshape(len(vectors), *sizes)
    keys, values = (vectors[:, :, i].swapaxes(0, 1) for i in range(2))
    keys = np.einsum("LPHK,LPKJ->LPHJ", keys, np.linalg.inv(_rotations(model, len(vectors)))).astype(np.float32)
    trained = {f"{_ATTENTION}/key/prefix": keys, f"{_ATTENTION}/value/prefix": values}
    return PrefixTuning(len(vectors)), trained


def _check_prefix(model: ModelConfig) -> None:
    """Raises UserError unless PEFT and PretrainAX apply a prefix to this model in equivalent ways."""
    position = model.position
    reasons = {
        f"config.model.family {model.family!r}": model.family != "decoder",
        f"config.model.head {model.head}": model.head is not None,
        "config.model.qk_norm": model.qk_norm,
        "config.model.latent_attention": model.latent_attention is not None,
        "local layers in config.model.layer_pattern": "local" in model.layer_pattern,
        "config.model.experts with layers of two kinds": bool(layer_groups(model, model.num_layers)[0].numbers),
        f"config.model.position {position}": not isinstance(position, (LearnedPositions, NoPositions, RotaryPositions))
        or (
            isinstance(position, RotaryPositions)
            and (position.interleaved or isinstance(position.scaling, LongRopeScaling))
        ),
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise UserError(
            f"prefixes for peft need a decoder whose layers keep the same keys in the cache, which excludes "
            f"{', '.join(found)}: use LoRA"
        )


def _rotations(model: ModelConfig, length: int) -> np.ndarray:
    """Returns the matrices by which each layer multiplies the keys of the positions 0 to length - 1, [L, P, K, K]."""
    positions = jnp.arange(length)[None]
    terms = positions_for(model).terms(AttentionPositions(positions), causal=True, dtype=jnp.float32)
    basis = jnp.broadcast_to(jnp.eye(model.dim_per_head), (1, length, model.dim_per_head, model.dim_per_head))
    layers = [terms.in_block(model, jnp.bool_(False), jnp.int32(i), True) for i in range(model.num_layers)]
    return np.stack([np.asarray(layer.rotate(basis, basis)[1][0], np.float64) for layer in layers])


# --- prompts ---------------------------------------------------------------------------------------------------------


def prompt_to_peft(tuning: PromptTuning, trained: State, model: ModelConfig) -> Adapter:
    """Converts the trained embeddings of a prompt-tuning run to a PEFT adapter.

    Args:
      trained: trained arrays by parameter path.

    Returns:
      The contents of adapter_config.json, and the tensors by name.
    """
    _check_prompt(model)
    adapter_config = {
        "peft_type": "PROMPT_TUNING",
        "num_virtual_tokens": tuning.length,
        "token_dim": model.d_model,
        "num_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_transformer_submodules": 1,
        "prompt_tuning_init": "RANDOM",
    }
    return adapter_config, {_NAME: np.asarray(trained[_PROMPT]) * np.float32(_embedding_scale(model))}


def prompt_from_peft(described: JsonObject, tensors: State, model: ModelConfig) -> tuple:
    """Converts a PEFT adapter to a `PromptTuning` config and its trained arrays by parameter path.

    Raises:
      UserError: the tensors do not match the model, or the model is not supported.
    """
    _check_prompt(model)
    vectors = _vectors(described, tensors, model.d_model)
    return PromptTuning(len(vectors)), {_PROMPT: vectors / np.float32(_embedding_scale(model))}


def _check_prompt(model: ModelConfig) -> None:
    """Raises UserError unless PEFT and PretrainAX apply a prompt to this model in the same way."""
    if model.family not in ("decoder", "encoder_decoder") or model.head is not None:
        raise UserError(
            f"prompts for peft need a language model, but config.model.family is {model.family!r} and "
            f"config.model.head {model.head}: PEFT also applies the heads to the prompt. Use LoRA"
        )


def _embedding_scale(model: ModelConfig) -> float:
    """Returns the factor by which transformers multiplies token embeddings before PEFT adds the prompt.

    T5Gemma, the encoder-decoder with Gemma's norm, multiplies the embeddings later, together with the prompt.
    """
    is_t5gemma = model.family == "encoder_decoder" and model.norm == "rms_plus_one"
    return model.d_model**0.5 if model.scale_embeddings and not is_t5gemma else 1.0


def _vectors(described: JsonObject, tensors: State, width: int) -> np.ndarray:
    """Returns the virtual tokens of an adapter, [P, width] float32; raises UserError for a wrong shape."""
    length, stacks = (number(described, f"num_{name}", 1) for name in ("virtual_tokens", "transformer_submodules"))
    if length < 1 or length != (length := int(length)):
        raise UserError(f"{CONFIG} has num_virtual_tokens {length}, it must be a whole number of at least 1")
    shapes = {name: list(x.shape) for name, x in tensors.items()}
    # PEFT stores a second prompt for the decoder of an encoder-decoder, and does not use it.
    expected = [[length, width], [length * stacks, width]] if described.get("peft_type") == "PROMPT_TUNING" else []
    if set(tensors) != {_NAME} or shapes[_NAME] not in (expected or [[length, width]]):
        raise UserError(f"{WEIGHTS} holds {shapes}, but this model needs {_NAME} {[length, width]}")
    return tensors[_NAME][:length]
