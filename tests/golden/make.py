"""What transformers computes with tiny models of random weights. `python tests/golden/make.py` writes the .npz files
(extra `parity`); the parity tests read them, and where torch is installed also compare with `reference` live."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrainax.config import (
    LearnedPositions,
    LongContextScaling,
    ModelConfig,
    RelativePositionBuckets,
    RotaryPositions,
)
from pretrainax.zoo import bert, gpt, llama, t5

FOLDER = Path(__file__).parent
LENGTHS = np.array([12, 9, 5])  # real tokens of each row; the rest is padding
ENCODER_LENGTHS = np.array([11, 15, 4])
VOCABULARY = 99


class Family(NamedTuple):
    config: ModelConfig
    huggingface_names: Callable
    build: Callable  # () -> the model in transformers


def _bert():
    from transformers import BertConfig, BertForMaskedLM

    c = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=20,
        layer_norm_eps=1e-12,
        hidden_act="gelu",
        attn_implementation="eager",
    )
    return BertForMaskedLM(c)


def _t5(**kwargs):
    from transformers import T5Config, T5ForConditionalGeneration

    c = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=6,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        # so few that 15 tokens reach the logarithmic ranges and the last bucket
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
        layer_norm_epsilon=1e-6,
        attn_implementation="eager",
        **kwargs,
    )
    return T5ForConditionalGeneration(c)


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    c = GPT2Config(
        vocab_size=VOCABULARY, n_positions=20, n_embd=32, n_layer=2, n_head=4, n_inner=64, attn_implementation="eager"
    )
    return GPT2LMHeadModel(c)


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,  # so short that planes of all three kinds occur
    }
    c = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(c)


def _shrunk(config: ModelConfig, **changes) -> ModelConfig:
    """A preset at the size of the models above."""
    config = copy.deepcopy(config)
    for name, value in (dict(vocab_size=VOCABULARY, num_layers=2, d_model=32, d_ff=48, num_heads=4) | changes).items():
        assert hasattr(config, name)
        setattr(config, name, value)
    return config


_T5 = dict(head_dim=6, position=RelativePositionBuckets(num_buckets=8, max_distance=10))
_LLAMA = dict(num_kv_heads=2, position=RotaryPositions(128, 10_000.0, LongContextScaling(8.0, 1.0, 4.0, 16)))
FAMILIES = {
    "bert": Family(_shrunk(bert.bert("base"), d_ff=64, position=LearnedPositions(20)), bert.huggingface_names, _bert),
    "t5_1_0": Family(
        _shrunk(t5.t5("v1_0_base"), **_T5),
        t5.huggingface_names,
        lambda: _t5(feed_forward_proj="relu", tie_word_embeddings=True),
    ),
    "t5_1_1": Family(
        _shrunk(t5.t5("base"), **_T5),
        t5.huggingface_names,
        lambda: _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "gpt2": Family(_shrunk(gpt.gpt2("124m"), d_ff=64, position=LearnedPositions(20)), gpt.huggingface_names, _gpt2),
    "llama3": Family(_shrunk(llama.llama("3_1_8b"), **_LLAMA), llama.huggingface_names, _llama),
}


def batch(name: str) -> dict[str, np.ndarray]:
    """Right-padded rows of the keys of the design's Batch table, with a loss on some tokens."""
    rng = np.random.default_rng(0)

    def rows(lengths):
        shape = (len(lengths), lengths.max())
        real = np.arange(shape[1])[None] < lengths[:, None]
        return {
            "tokens": np.where(real, rng.integers(1, VOCABULARY, shape), 0).astype(np.int32),
            "segment_ids": real.astype(np.int32),
            "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        }

    out = rows(LENGTHS)
    real = out["segment_ids"] > 0
    if FAMILIES[name].config.family == "decoder":
        out["targets"] = np.pad(out["tokens"][:, 1:], ((0, 0), (0, 1)))
        out["loss_weights"] = np.pad(real[:, 1:], ((0, 0), (0, 1))).astype(np.float32)
    else:
        out["targets"] = rng.integers(1, VOCABULARY, real.shape).astype(np.int32)
        out["loss_weights"] = (real & (rng.random(real.shape) < 0.6)).astype(np.float32)
    if name == "bert":
        out["token_types"] = rng.integers(0, 2, real.shape).astype(np.int32)
    if name.startswith("t5"):
        out |= {f"encoder_{key}": value for key, value in rows(ENCODER_LENGTHS).items()}
    return out


def reference(name: str) -> dict[str, np.ndarray]:
    """ "state/<tensor>": the state dict, "batch/<name>": the inputs, "logits" [B, T, V] and "loss" of transformers."""
    import torch

    torch.manual_seed(0)
    model = FAMILIES[name].build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough for each term to show in the logits; rounded to float16, to halve the files.
            noise = torch.randn(parameter.shape) * (0.2 if parameter.ndim > 1 else 0.1)
            start = torch.zeros(()) if parameter.ndim > 1 else parameter.detach()
            parameter.copy_((start + noise).half().float())
        inputs = batch(name)
        t = {key: torch.from_numpy(value.astype(np.int64)) for key, value in inputs.items()}
        arguments = {"input_ids": t["tokens"], "attention_mask": t["segment_ids"]}
        if name == "bert":
            arguments |= {"token_type_ids": t["token_types"], "position_ids": t["positions"]}
        if name.startswith("t5"):
            arguments = {
                "input_ids": t["encoder_tokens"],
                "attention_mask": t["encoder_segment_ids"],
                "decoder_input_ids": t["tokens"],
                "decoder_attention_mask": t["segment_ids"],
            }
        if FAMILIES[name].config.family == "decoder":  # it shifts the labels itself
            labels = torch.where(t["segment_ids"] > 0, t["tokens"], -100)
        else:
            labels = torch.where(t["loss_weights"] > 0, t["targets"], -100)
        out = model(**arguments, labels=labels)
    # tied matrices are in it once
    names = {
        row.name.format(layer=i) for row in FAMILIES[name].huggingface_names(FAMILIES[name].config) for i in (0, 1)
    }
    state = {key: value.numpy() for key, value in model.state_dict().items() if key in names}
    result = {f"state/{key}": value for key, value in state.items()}
    result |= {f"batch/{key}": value for key, value in inputs.items()}
    return result | {"logits": out.logits.numpy(), "loss": out.loss.numpy()}


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as f:
        return {key: value.astype(np.float32) if key.startswith("state/") else value for key, value in f.items()}


if __name__ == "__main__":
    for name in FAMILIES:
        arrays = reference(name)
        arrays = {key: value.astype(np.float16) if key.startswith("state/") else value for key, value in arrays.items()}
        np.savez_compressed(FOLDER / f"{name}.npz", allow_pickle=False, **arrays)
        print(name, (FOLDER / f"{name}.npz").stat().st_size, "bytes, loss", float(arrays["loss"]))
