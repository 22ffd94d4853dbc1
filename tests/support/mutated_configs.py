"""Generates config.json files as other programs might write them.

The files start from released and minimal configs. Mutations remove, null or change keys, or spell them as another
version does.
"""

import copy
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from pretrainax.config import ModelConfig, UserError
from pretrainax.inference.verification.settings import comparable, field_differences, their_config
from pretrainax.interop.architectures import described_model
from pretrainax.zoo.family import ConfigJson
from tests.support.released import RELEASED, config_of

# Small sizes for keys that the tiny releases leave at the released size.
_SMALL: ConfigJson = {"sliding_window": 4, "local_attention": 8, "window_size": 4, "attention_window": 4} | {
    "query_pre_attn_scalar": 8
}
_STRINGS = {
    "hidden_act": ("gelu", "relu", "silu", "gelu_new", "gelu_pytorch_tanh", "swish", "quick_gelu", "tanh"),
    "problem_type": ("regression", "single_label_classification", "multi_label_classification"),
    "feed_forward_proj": ("relu", "gated-gelu", "gelu", "gated-silu", "gelu_new", "gated-relu", "gated-gelu_new"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "attention_type": ("block_sparse", "original_full"),
    "pos_att_type": ("p2c|c2p", "c2p|p2c", "c2p", "P2C|C2P"),
    "norm_rel_ebd": ("layer_norm", "none"),
    "scoring_func": ("softmax", "sigmoid"),
    "classifier_pooling": ("cls", "mean", "late", "bos"),
    "position_embedding_type": ("absolute", "relative_key"),
    "summary_type": ("first", "last", "mean", "cls_index"),
    "summary_activation": ("gelu", "tanh", "relu"),
    "router_dtype": ("float32", "bfloat16"),
}
_ACTIVATIONS = "afn", "activation", "activation_function", "dense_act_fn", "hidden_activation", "pooler_hidden_act"
_STRINGS |= dict.fromkeys((*_ACTIVATIONS, "classifier_activation", "conv_act"), _STRINGS["hidden_act"])
_ABSENT: ConfigJson = {  # optional keys that most files do not have
    **{"num_experts": 5, "num_local_experts": 5, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 6, "max_window_layers": 1},
    **{"use_sliding_window": True, "use_cache": False},
    **{"layer_types": ["full_attention"] * 3, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    **{"num_labels": 3, "n_inner": 24, "num_decoder_layers": 2, "expert_capacity": 3, "topk_group": 1, "n_group": 2},
    **{"q_lora_rank": None, "no_rope_layer_interval": 2, "sliding_window_pattern": 2, "swiglu_limit": 5.0},
    **{"use_bidirectional_attention": True, "qk_layernorm": True, "clip_qkv": 5.0, "is_decoder": True},
    **{"final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0, "decoder_vocab_size": 98, "mlp_only_layers": [0]},
    **{"decoder_sparse_step": 2, "moe_layer_freq": 2, "routed_scaling_factor": 2.0, "global_attn_every_n_layers": 2},
    **{"scale_decoder_outputs": False, "id2label": {"0": "a", "1": "b", "2": "c"}, "use_bias": False},
}


class Mutated(NamedTuple):
    name: str  # name of the release
    changes: tuple[str, ...]  # the applied mutations
    json: ConfigJson


def bases(name: str) -> dict[str, ConfigJson]:
    """Returns the release at test size, a file with only its sizes, and the file that their class writes."""
    released = config_of(name, tiny=True)
    released |= {key: value for key, value in _SMALL.items() if type(released.get(key)) is int}
    keep = {"model_type", "architectures", *RELEASED[name].tiny, "layer_types", "no_rope_layers"}
    found = {"released": released, "bare": {key: x for key, x in released.items() if key in keep}}
    return found if name == "deepseek-moe" else found | {"theirs": their_config(released)}  # no class


def mutated(count: int, seed: int = 0) -> Iterator[Mutated]:
    """Yields `count` files, with random changes by `seed`, and with equal numbers of each release."""
    rng, names = random.Random(seed), list(RELEASED)
    known = {name: bases(name) for name in names}
    for i in range(count):
        name = names[i % len(names)]
        base = rng.choice(list(known[name]))
        json, changes = copy.deepcopy(known[name][base]), [base]
        for _ in range(rng.choice((1, 1, 2, 3))):
            changes.append(_mutate(json, rng))
        yield Mutated(name, tuple(changes), json)


def _mutate(json: ConfigJson, rng: random.Random) -> str:
    """Changes a file in place, and returns a description of the change."""
    rotary = any(key.startswith("rope_") for key in json) or json["model_type"] in _ROTARY
    if rotary and rng.random() < 0.5:
        return _mutate_positions(json, rng)
    if json["model_type"] == "t5gemma" and rng.random() < 0.8:
        stack = rng.choice(("encoder", "decoder"))
        part = json.get(stack)
        return f"{stack}: {_mutate_key(part, rng)}" if part else "-"
    return _mutate_key(json, rng)


_ROTARY = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "olmo2", "olmo3", "olmoe", "phi", "phi3")
_ROTARY += (
    "smollm3",
    "gpt_oss",
    "gemma",
    "gemma2",
    "gemma3_text",
    "deepseek_v2",
    "deepseek_v3",
    "eurobert",
    "modernbert",
)


def _mutate_key(json: ConfigJson, rng: random.Random) -> str:
    if rng.random() < 0.2:
        key = rng.choice(list(_ABSENT))
        json[key] = copy.deepcopy(_ABSENT[key])
        return f"{key}={_ABSENT[key]}"
    key = rng.choice([key for key in json if key != "model_type"])
    kind = rng.choice(("delete", "null", "other", "other"))
    if kind == "delete":
        del json[key]
        return f"no {key}"
    json[key] = None if kind == "null" else other_value(key, json[key], rng)
    return f"{key}={json[key]!r}"


def other_value(key: str, value: Any, rng: random.Random) -> Any:
    """Returns another value of the same type."""
    if key in _STRINGS:
        return rng.choice(_STRINGS[key])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, 2 * value, value // 2, 1, 0, 3, -1))
    if isinstance(value, float):
        return rng.choice((value / 2, 2 * value, 0.0, 1.0))
    if isinstance(value, list) and key.endswith(("types", "layers")):
        return rng.choice((value[::-1], value[:-1], value[:1] * len(value), []))
    return value


def _mutate_positions(json: ConfigJson, rng: random.Random) -> str:
    """Rewrites the positions with a random scaling or none, in the keys of either version or of both."""
    kind = rng.choice(("default", "linear", "llama3", "yarn", "yarn", "yarn", "longrope", "dynamic", "su"))
    planes = _planes(json)
    factors = {"short_factor": [1.0 + i / 8 for i in range(planes)], "long_factor": [2.0] * planes}
    scaling: ConfigJson = {
        "default": {},
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 2.0},
        "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": 4.0},
        "longrope": factors,
        "su": factors,
    }[kind]
    if kind == "yarn":
        more = ({}, {"beta_fast": 16, "beta_slow": 2}, {"truncate": False}, {"beta_fast": None, "beta_slow": 2.0})
        scales = ({}, {"mscale": 0.7}, {"mscale": 0.7, "mscale_all_dim": 0.7}, {"mscale": 1.0, "mscale_all_dim": 0.5})
        scales += {"mscale_all_dim": 1.0}, {"attention_factor": 1.1386294361119891}, {"attention_factor": 1.5}
        scaling = scaling | rng.choice(more) | rng.choice(scales)
    if kind == "longrope" and rng.random() < 0.3:
        scaling = scaling | rng.choice(({"factor": 3.0}, {"attention_factor": 1.2}))
    if kind in ("yarn", "llama3", "longrope", "linear") and rng.random() < 0.7:
        scaling = scaling | {"original_max_position_embeddings": 12}
    if scaling and rng.random() < 0.15:
        scaling = {key: x for key, x in scaling.items() if key != rng.choice(list(scaling))}
    for key in ("rope_scaling", "rope_parameters"):
        json.pop(key, None)
    spelled = rng.choice(("legacy", "old legacy", "new", "both", "null", "per layer"))
    inner = {"rope_theta": 30.0} if rng.random() < 0.7 else {}
    if rng.random() < 0.2:
        inner["partial_rotary_factor"] = rng.choice((0.5, 1.0, None))
    if spelled == "null":
        json["rope_scaling"] = None
    if spelled in ("legacy", "both"):
        json["rope_scaling"] = {"rope_type": kind, **scaling}
    if spelled == "old legacy":
        json["rope_scaling"] = {"type": kind, **scaling}
    if spelled == "new":
        json["rope_parameters"] = {"rope_type": kind, **scaling, **inner}
    if spelled == "both":
        json["rope_parameters"] = {"rope_type": "default", **inner}
    if spelled == "per layer":
        plain = {"rope_type": "default", **({"rope_theta": 20.0} if rng.random() < 0.7 else {})}
        json["rope_parameters"] = {"full_attention": {"rope_type": kind, **scaling, **inner}}
        json["rope_parameters"] |= {"sliding_attention": plain} if rng.random() < 0.7 else {}
    tops: dict[str, tuple[Any, ...]] = {
        "rope_theta": (40.0, 50),
        "original_max_position_embeddings": (10, 10, None),
        "partial_rotary_factor": (0.5, 1.0, None),
    }
    chosen = {key: rng.choice(values) for key, values in tops.items() if rng.random() < 0.3}
    json |= chosen
    return f"{spelled} {kind} {scaling} {inner} {chosen}"


def _planes(json: ConfigJson) -> int:
    heads, width = json.get("num_attention_heads") or 4, json.get("hidden_size") or 16
    fraction = json.get("partial_rotary_factor") or 1.0
    return max(1, int((json.get("head_dim") or width // heads) * fraction) // 2)


class Outcome(NamedTuple):
    # equal | both refuse | ours refuses | theirs refuses | a null without meaning | differ | raises | no class
    kind: str
    detail: str = ""


def outcome(case: Mutated) -> Outcome:
    """Compares our config of a file with our config of the file that their class writes."""
    try:
        ours: ModelConfig | UserError = described_model(copy.deepcopy(case.json))[1]
    except UserError as e:
        ours = e
    except Exception as e:
        return Outcome("raises", repr(e))
    if isinstance(ours, UserError) and ("\n" in str(ours) or len(str(ours)) > 600):
        return Outcome("raises", f"not one short line: {ours}")
    if case.name == "deepseek-moe":
        return Outcome("no class")
    try:
        theirs = their_config(case.json)
    except Exception as e:
        return Outcome("both refuse") if isinstance(ours, UserError) else _without_nulls(case, ours, e)
    if isinstance(ours, UserError):
        return Outcome("ours refuses", str(ours))
    try:
        found = field_differences(comparable(ours), theirs)
    except Exception as e:
        return Outcome("raises", f"their view: {e!r}")
    return Outcome("differ", "; ".join(found)) if found else Outcome("equal")


def _without_nulls(case: Mutated, ours: ModelConfig, refusal: Exception) -> Outcome:
    """Classifies a file that their class rejects and we accept.

    The only valid reason is a null for a key that has no meaning for us.
    """
    rest = _without_idle_nulls(case.json, ours)
    try:
        read_of_theirs = comparable(described_model(their_config(rest))[1])
        same = comparable(described_model(rest)[1]) == comparable(ours) == read_of_theirs
    except Exception:
        same = False
    return Outcome("a null without meaning" if same and rest != case.json else "theirs refuses", str(refusal)[-300:])


def _without_idle_nulls(json: ConfigJson, config: ModelConfig) -> ConfigJson:
    """Returns a copy of a file without the nulls that do not affect our config."""
    rest = copy.deepcopy(json)
    for part in (rest, *(rest[key] for key in ("encoder", "decoder") if isinstance(rest.get(key), dict))):
        for key in [key for key, value in part.items() if value is None]:
            del part[key]
            if comparable(described_model(rest)[1]) != comparable(config):
                part[key] = None
    return rest
