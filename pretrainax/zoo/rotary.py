"""Converts rotary positions between `RotaryPositions` and config.json, as the config classes of transformers read them.

Files written before transformers 5 have `rope_scaling` and `rope_theta`, later files have `rope_parameters`. If a file
has both, `rope_scaling` has priority.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Optional

from pretrainax.config import (
    LinearScaling,
    LongContextScaling,
    LongRopeScaling,
    ModelConfig,
    RotaryScaling,
    UserError,
    YarnScaling,
    nearest,
)
from pretrainax.zoo.family import ConfigJson

_SCALINGS = {  # rope_type of config.json -> (our class, {key of config.json: field of our class})
    "linear": (LinearScaling, {"factor": "factor"}),
    "llama3": (
        LongContextScaling,
        {
            "factor": "factor",
            "low_freq_factor": "low_frequency_factor",
            "high_freq_factor": "high_frequency_factor",
            "original_max_position_embeddings": "original_length",
        },
    ),
    "yarn": (
        YarnScaling,
        {
            "factor": "factor",
            "beta_fast": "fast",
            "beta_slow": "slow",
            "original_max_position_embeddings": "original_length",
            "truncate": "rounded",
            "mscale": "mscale",
            "mscale_all_dim": "mscale_all_dim",
        },
    ),
    "longrope": (
        LongRopeScaling,
        {
            "short_factor": "short_factors",
            "long_factor": "long_factors",
            "factor": "factor",
            "original_max_position_embeddings": "original_length",
        },
    ),
}
_FRACTION, _LENGTH = "partial_rotary_factor", "original_max_position_embeddings"
_FACTORS = "short_factor", "long_factor"


# --- reading ---------------------------------------------------------------------------------------------------------


def read(json: ConfigJson, config: ModelConfig, default: Optional[ConfigJson] = None, partial: bool = False) -> None:
    """Sets theta and the scaling of rotary positions from config.json; they are the same in all layers.

    Args:
      default: the parameters if config.json has none; None: no scaling.
      partial: whether the family can rotate a fraction of the dimensions of a head.

    Raises:
      UserError: the scaling is not supported.
    """
    parameters, position = json.get("rope_scaling") or json.get("rope_parameters"), config.position
    parameters = (default or {}) if parameters is None else parameters
    position.theta = parameters.get("rope_theta", json.get("rope_theta", position.theta))
    fraction = json.get(_FRACTION, position.fraction)
    fraction = 1.0 if fraction is None and (_FRACTION not in json or not partial) else fraction
    fraction = parameters.get(_FRACTION, fraction)
    if fraction is None or (fraction != 1.0 and not partial):
        supported = "a number from 0 to 1" if partial else "only 1.0"
        raise UserError(f"config.json has {_FRACTION} {fraction!r}; supported: {supported}")
    position.fraction = None if fraction == 1.0 else fraction
    length = {_LENGTH: json[_LENGTH]} if _LENGTH in json else {}  # has priority; Phi-3 has it only here
    if None in length.values():
        raise UserError(f"config.json has {_LENGTH} null; it must be a number, or absent")
    position.scaling = scaling_of(parameters, position.max_length, length, config.latent_attention is not None)


def read_both(json: ConfigJson, config: ModelConfig, theta: float, local_theta: float) -> None:
    """Sets theta and the scaling of global layers, and theta of local layers, for classes that have both.

    Args:
      theta: theta of global layers if `rope_parameters` has none.
      local_theta: theta of local layers if `rope_parameters` has none.

    Raises:
      UserError: there are no separate parameters for the two kinds of layers, or the parameters are not supported.
    """
    parameters, kinds = json.get("rope_parameters") or {}, ("full_attention", "sliding_attention")
    if unknown := set(parameters) - set(kinds):
        raise UserError(f"config.json has rope_parameters {sorted(unknown)}; supported: {', '.join(kinds)}")
    full, local = (parameters.get(kind) or {} for kind in kinds)
    full = {**full, **(json.get("rope_scaling") or {})}
    if not full.get("truncate", True):  # transformers looks for this key in `rope_parameters`
        raise UserError("config.json has truncate false for full_attention, which transformers ignores: remove the key")
    if "rope_type" not in full and full.get("type", "default") != "default":
        raise UserError(f"config.json has type {full['type']!r} for full_attention, which must be named 'rope_type'")
    position = config.position
    position.theta, position.local_theta = full.get("rope_theta", theta), local.get("rope_theta", local_theta)
    if "local" not in config.layer_pattern:
        position.local_theta = None
    position.scaling = scaling_of(full, position.max_length)
    if scaling_of(local, position.max_length) is not None:
        raise UserError(f"config.json scales the positions of sliding_attention, {local}; only full_attention may be")
    for fraction in (json.get(_FRACTION), full.get(_FRACTION), local.get(_FRACTION)):
        if fraction not in (None, 1.0):
            raise UserError(f"config.json has {_FRACTION} {fraction!r}; supported: only 1.0")


def scaling_of(
    parameters: ConfigJson, max_length: int, top_level: Mapping = MappingProxyType({}), is_latent: bool = False
) -> RotaryScaling | None:
    """Builds the rotary scaling that `parameters` describes; returns None for the type "default".

    Args:
      parameters: the value of `rope_scaling` or `rope_parameters`.
      max_length: the original context length, for `parameters` that do not contain it.
      top_level: keys that have priority over `parameters`.
      is_latent: whether the model has DeepSeek's latent attention, which `mscale_all_dim` scales.

    Raises:
      UserError: the scaling is not supported.
    """
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UserError(f"config.json has rotary positions for each of {sorted(parameters)}; all layers must share one")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise UserError(f"config.json has rotary positions of rope_type {kind!r}; {nearest(str(kind), _SCALINGS)}")
    cls, names = _SCALINGS[kind]
    values = {_LENGTH: max_length, **parameters, **top_level}
    if kind == "yarn":
        values |= {"truncate": values.get("truncate", True), **_mscales(parameters, is_latent)}
        values |= {"beta_fast": values.get("beta_fast") or 32.0, "beta_slow": values.get("beta_slow") or 1.0}
    elif is_latent and parameters.get("mscale_all_dim"):
        raise UserError(f"config.json has mscale_all_dim {parameters['mscale_all_dim']}; only rope_type 'yarn' has it")
    if kind == "longrope":
        if parameters.get("attention_factor") is not None:
            raise UserError(
                f"config.json has attention_factor {parameters['attention_factor']!r}; only the paper's is supported"
            )
        values |= {name: tuple(map(float, parameters[name])) for name in _FACTORS if parameters.get(name)}
        values.setdefault("factor", None)
    if missing := set(names) - set(values):
        raise UserError(f"config.json has rotary positions of rope_type {kind!r} without {sorted(missing)}")
    if values["factor"] is None and kind in ("yarn", "longrope"):
        values["factor"] = max_length / values[_LENGTH]
    return cls(**{ours: values[theirs] for theirs, ours in names.items()})


def _mscales(parameters: ConfigJson, is_latent: bool) -> ConfigJson:
    """Returns YaRN's mscale and mscale_all_dim: 1 and 0, as in the paper, unless `parameters` has both DeepSeek keys.

    Raises:
      UserError: `YarnScaling` cannot express the scale of the rotated dimensions or of the logits.
    """
    factor, mscale, all_dim = (parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if factor is not None and not math.isclose(factor, 0.1 * math.log(parameters["factor"]) + 1.0, rel_tol=1e-6):
        raise UserError(
            f"config.json has attention_factor {factor!r}; only the paper's value, or mscale and mscale_all_dim, are "
            "supported"
        )
    if is_latent and all_dim:
        if factor is not None or not mscale:
            raise UserError(f"config.json has mscale_all_dim {all_dim}, which requires mscale and no attention_factor")
        return {"mscale": mscale, "mscale_all_dim": all_dim}
    if mscale and all_dim and factor is None:
        raise UserError(f"config.json has mscale_all_dim {all_dim} and mscale, which only DeepSeek models support")
    return {"mscale": 1.0, "mscale_all_dim": 0.0}  # transformers ignores one mscale without the other


# --- writing ---------------------------------------------------------------------------------------------------------


def write(config: ModelConfig) -> ConfigJson:
    """Returns the config.json keys for rotary positions, in the format of transformers 4.

    Later versions of transformers read this format too.
    """
    position = config.position
    return {"rope_theta": position.theta, "rope_scaling": None} | _write_scaling(position.scaling)


def _write_scaling(scaling: Optional[RotaryScaling]) -> ConfigJson:
    kind = next((kind for kind, (cls, _) in _SCALINGS.items() if type(scaling) is cls), None)
    if kind is None or scaling is None:
        return {}
    keys = {theirs: getattr(scaling, ours) for theirs, ours in _SCALINGS[kind][1].items()}
    if isinstance(scaling, YarnScaling) and not scaling.mscale_all_dim:
        keys = {name: x for name, x in keys.items() if not name.startswith("mscale")}
    if not isinstance(scaling, LongRopeScaling):
        return {"rope_scaling": {"rope_type": kind, **keys}}
    keys |= {name: list(keys[name]) for name in _FACTORS}
    return {"rope_scaling": {"rope_type": kind, **keys}, _LENGTH: scaling.original_length}  # Phi-3 reads the second


def write_partial(config: ModelConfig) -> ConfigJson:
    """Returns the config.json keys for rotary positions, including the rotated fraction of the head dimensions."""
    fraction = config.position.fraction
    return write(config) | {_FRACTION: 1.0 if fraction is None else fraction}
