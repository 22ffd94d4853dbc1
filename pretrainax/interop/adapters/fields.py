"""Checks the fields of adapter_config.json: a field that the import does not read must have no effect on outputs."""

import math
import re
from collections.abc import Collection, Sequence
from typing import cast

from pretrainax.adapt.patterns import match_patterns
from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MERGE = "merge it in peft with merge_and_unload() and save_pretrained(), and import the result"
_CONVERT = (
    "save the adapter again in the process that trained it, with save_pretrained(…, "
    "path_initial_model_for_weight_conversion=…)"
)
# Values of init_lora_weights whose initialization leaves the weights of the base model unchanged.
_UNCHANGED_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
_COMMON = (
    "auto_mapping base_model_name_or_path inference_mode modules_to_save peft_type peft_version revision task_type"
)
_PROMPT = "num_attention_heads num_layers num_transformer_submodules num_virtual_tokens token_dim"
# peft_type -> the fields that the import reads, or that have no effect on the outputs of the saved adapter.
_KNOWN = {
    "LORA": (
        "alpha_pattern bias corda_config ensure_weight_tying eva_config exclude_modules fan_in_fan_out "
        "init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha lora_dropout lora_ga_config "
        "megatron_core qalora_group_size r rank_pattern target_modules use_dora use_rslora"
    ),
    "IA3": "exclude_modules fan_in_fan_out feedforward_modules init_ia3_weights target_modules",
    "PREFIX_TUNING": f"{_PROMPT} encoder_hidden_size init_weights prefix_projection",
    "PROMPT_TUNING": f"{_PROMPT} prompt_tuning_init prompt_tuning_init_text tokenizer_kwargs tokenizer_name_or_path",
}


def check_fields(directory: str, described: JsonObject) -> str:
    """Returns the peft_type of an adapter_config.json.

    Raises:
      UserError: the peft_type is not supported, or an unknown field is set.
    """
    kind = described.get("peft_type")
    if not is_known(kind, _KNOWN):
        *others, last = map(repr, _KNOWN)
        raise UserError(
            f"{directory}: {CONFIG} has peft_type {kind!r}, it must be {', '.join(others)} or {last}: {_MERGE}"
        )
    known = {*_COMMON.split(), *_KNOWN[cast(str, kind)].split()}
    for name, value in described.items():
        if name not in known and value not in (None, False, "", [], {}):
            raise UserError(f"{directory}: {CONFIG} has {name} {value!r}, which is not supported: {_MERGE}")
    if kind == "LORA":
        _check_lora(directory, described)
    return cast(str, kind)


def _check_lora(directory: str, described: JsonObject) -> None:
    """Raises UserError if the initialization changed the base model in a way that cannot be reproduced."""
    initialization = described.get("init_lora_weights", True)
    prefix = f"{directory}: {CONFIG} has init_lora_weights {initialization!r}, which"
    if isinstance(initialization, str) and re.fullmatch(r"pissa_niter_\d+", initialization):
        raise UserError(f"{prefix} changes the base model at random: {_CONVERT}")
    if not is_known(initialization, (*_UNCHANGED_BASE, "pissa", "olora")):
        raise UserError(f"{prefix} is not supported: {_CONVERT}, or {_MERGE}")
    if (bias := described.get("bias", "none")) not in ("none", "all", "lora_only"):
        raise UserError(f"{directory}: {CONFIG} has bias {bias!r}, it must be 'none', 'all' or 'lora_only'")
    for name in ("use_dora", "use_rslora"):
        if not is_known(value := described.get(name), (True, False, None)):
            raise UserError(f"{directory}: {CONFIG} has {name} {value!r}, it must be true or false")
    if not 0 <= number(described, "lora_dropout", 0.0) < 1:
        raise UserError(f"{directory}: {CONFIG} has lora_dropout {described['lora_dropout']}, it must be in [0, 1)")


def check_targets(described: JsonObject, modules: Sequence[str]) -> None:
    """Raises UserError if an adapter has updates of modules that its fields exclude, which PEFT therefore ignores.

    Args:
      modules: names of the modules with updates.
    """
    targets = described.get("target_modules")
    found = dict(zip(modules, _matches("target_modules", targets, modules), strict=True))
    if targets in (None, [], "all-linear"):
        found = dict.fromkeys(modules, True)
    excluded = _matches("exclude_modules", described.get("exclude_modules"), modules)
    layers, patterns = described.get("layers_to_transform"), described.get("layers_pattern") or ["[^.]*"]
    layers = [layers] if isinstance(layers, int) else layers or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise UserError(f"{CONFIG} has layers_to_transform {layers!r}, it must be a list of layer numbers")
    if layers:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        numbers = "|".join(map(str, layers))
        regexes = [rf"^(.*?\.)?({pattern})\.({numbers})\." for pattern in cast(list, patterns)]
        in_layers = _search("layers_pattern", regexes, modules)
        named = targets if isinstance(targets, list) else []  # layers_to_transform does not apply to full names
        found = {name: found[name] and (x or name in named) for name, x in zip(modules, in_layers, strict=True)}
    if ignored := [name for name, is_excluded in zip(modules, excluded, strict=True) if is_excluded or not found[name]]:
        raise UserError(
            f"{WEIGHTS} holds updates of {', '.join(ignored)}, which target_modules, exclude_modules or "
            f"layers_to_transform in {CONFIG} excludes, so PEFT ignores them: correct the field"
        )


def _matches(field: str, names: object, modules: Sequence[str]) -> list[bool]:
    """Returns True for each module that matches a regular expression, or that ends with one of a list of names."""
    if isinstance(names, str):
        return _search(field, [f"^({names})$"], modules)
    if not isinstance(names, list | None) or not all(isinstance(name, str) for name in names or ()):
        raise UserError(f"{CONFIG} has {field} {names!r}, it must be a regular expression or a list of names")
    return [any(f".{module}".endswith(f".{name}") for name in names or ()) for module in modules]


def _search(field: str, patterns: Sequence[str], modules: Sequence[str]) -> list[bool]:
    """Returns True for each module that matches one of the regular expressions in a field."""
    try:
        return [any(matches) for matches in zip(*match_patterns(tuple(patterns), tuple(modules)), strict=True)]
    except (UserError, ValueError, TypeError) as e:
        raise UserError(f"{CONFIG} has {field} which {e}") from e


def is_known(value: object, values: Collection[object]) -> bool:
    """Returns True if a JSON value is one of `values`; 1 and True are different."""
    return any(type(value) is type(other) and value == other for other in values)


def number(described: JsonObject, field: str, default: float | None = None) -> float:
    """Returns a field of adapter_config.json that must be a finite number; null means `default`."""
    value = described.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{CONFIG} has {field} {value!r}, it must be a number")
    return value


def numbers_by_module(
    described: JsonObject, field: str, pattern_field: str, modules: Sequence[str]
) -> dict[str, float]:
    """Returns the rank or alpha of each module.

    The value comes from the first entry of the pattern field that matches the end of the module's name, as in PEFT. If
    no entry matches, the value comes from `field`.

    Args:
      field: "r" or "lora_alpha".
      pattern_field: "rank_pattern" or "alpha_pattern".
      modules: names of the modules.
    """
    patterns = described.get(pattern_field) or {}
    if not isinstance(patterns, dict):
        raise UserError(f"{CONFIG} has {pattern_field} {patterns!r}, it must map patterns to numbers")
    values = [number(patterns, pattern) for pattern in patterns]
    regexes = tuple(rf"^(.*\.)?({pattern})$" for pattern in patterns)
    try:
        matches = match_patterns(regexes, tuple(modules)) if patterns else []
    except (UserError, ValueError) as e:
        raise UserError(f"{CONFIG} has an {pattern_field} which {e}") from e
    found = [
        next((value for value, is_match in zip(values, matches, strict=True) if is_match[i]), None)
        for i in range(len(modules))
    ]
    default = number(described, field) if None in found else 1.0
    if (smallest := min((default, *values))) <= 0:
        raise UserError(f"{CONFIG} has {smallest:g} in {field} or {pattern_field}, it must be above 0")
    return {module: default if x is None else x for module, x in zip(modules, found, strict=True)}
