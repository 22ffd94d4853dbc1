"""Reads the generation settings of a Hugging Face directory, which transformers' generate() uses as defaults."""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.storage.store import print_message

ORIGINAL = "huggingface"  # folder in an imported workdir with the original configs, which exports reuse
GENERATION = "generation_config.json"  # file with the settings of transformers' generate()
ALL = "all"  # in a list of fields to ignore

# Field -> the option of `inference.request.Sampling` with the same meaning.
_OPTIONS = {
    name: name
    for name in (
        *("max_new_tokens", "max_length", "min_new_tokens", "min_length"),
        *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "no_repeat_ngram_size"),
        *("num_beams", "length_penalty", "early_stopping", "renormalize_logits"),
        *("forced_bos_token_id", "forced_eos_token_id"),
    )
} | {
    "num_return_sequences": "num_return",
    "stop_strings": "stop",
    "suppress_tokens": "banned_tokens",
    "begin_suppress_tokens": "banned_first_tokens",
    "bad_words_ids": "banned_sequences",
}
# Values without effect.
_NEUTRAL = {
    **dict.fromkeys(("min_new_tokens", "min_length", "top_k", "min_p", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0, 1)),
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "length_penalty", "num_beams"), (1,)),
    **dict.fromkeys(("early_stopping", "renormalize_logits"), (False,)),
    **dict.fromkeys(("stop_strings", "suppress_tokens", "begin_suppress_tokens"), ([],)),
    "num_return_sequences": (1,),
}
# Unsupported fields that change the text -> values without effect. A null value never has an effect.
_UNSUPPORTED = {
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "guidance_scale": (1,),
    "diversity_penalty": (0,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "top_h": (),
    "watermarking_config": (),
    "token_healing": (False,),
    "constraints": (),
    "force_words_ids": (),
    "dola_layers": (),
    "max_time": (),
}
# The fields that do not change the text: tokens that other functions read, speed, and the format of transformers'
# result.
_WITHOUT_EFFECT = (
    *("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "remove_invalid_values"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_lookbehind", "assistant_ensemble_weight", "target_lookbehind"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp"),
    *("compile_config", "disable_compile", "continuous_batching_config"),
    *("transformers_version", "_from_model_config", "_commit_hash"),
)
_FORCE_BOS = "force_bos_token_to_be_generated"  # in config.json: old form of forced_bos_token_id
SETTINGS = ("do_sample", *_OPTIONS, *_UNSUPPORTED)  # fields that change the text
FIELDS = (*SETTINGS, *_WITHOUT_EFFECT)
_TOP_K = 50  # top_k of transformers' generate() if do_sample is true and the file has no top_k


class GenerationFile(NamedTuple):
    """The generation settings of a Hugging Face directory, as they are in its file, without null values."""

    path: str
    fields: JsonObject


class InheritedOptions(NamedTuple):
    """The generation options that a model's file sets."""

    options: JsonObject  # options of `inference.request.Sampling`
    fields: dict[str, str]  # option -> name of its field
    unknown: tuple[str, ...]  # fields that neither transformers' generate() nor this package uses


def read_generation_file(directory: str) -> Optional[GenerationFile]:
    """Reads the generation settings of a Hugging Face directory, or of a workdir with an imported directory.

    The settings come from config.json only if there is no generation_config.json, as in transformers. Settings in a
    nested config of the decoder apply if the main config lacks them.
    """
    for folder in (os.path.join(directory, ORIGINAL), directory):
        path, config_path = os.path.join(folder, GENERATION), os.path.join(folder, "config.json")
        if os.path.exists(path):
            fields = read_object(path)
            return GenerationFile(path, {k: v for k, v in fields.items() if v is not None})
        if os.path.exists(config_path):
            config = read_object(config_path)
            forced = {"forced_bos_token_id": config.get("bos_token_id")} if config.get(_FORCE_BOS) else {}
            nested_configs = (config.get(name) for name in ("decoder", "generator", "text_config"))
            nested = next((x for x in nested_configs if x and isinstance(x, dict)), config)
            fields = nested | {name: value for name, value in (config | forced).items() if value is not None}
            return GenerationFile(config_path, {k: fields[k] for k in FIELDS if fields.get(k) is not None})
    return None


def inherited_options(
    file: GenerationFile, ignore: Sequence[str], given: Mapping[str, object], ids: int, ends: Sequence[int]
) -> InheritedOptions:
    """Converts the fields of a file to generation options.

    Args:
      ignore: fields to ignore; "all" for all fields.
      given: options that the user sets, which take precedence over the file.
      ids: number of token ids of the vocabulary. A ban of other ids has no effect.
      ends: ids that end a text, which `bad_words_ids` does not ban.

    Raises:
      UserError: the file has an unsupported field with an effect.
    """
    fields = {} if ALL in ignore else {k: v for k, v in file.fields.items() if k not in ignore}
    _check_supported(file.path, fields, given)
    defaults = {}
    if fields.get("do_sample"):
        defaults = {"temperature": 1.0} | ({} if "top_k" in ignore else {"top_k": _TOP_K})
    settings = defaults | {k: v for k, v in fields.items() if defaults or k != "temperature"}
    options = {name: settings[name] for name in _OPTIONS if name in settings}
    options = {name: x for name, x in options.items() if not any(x == neutral for neutral in _NEUTRAL.get(name, ()))}
    converted = {name: _converted(name, value, ids, ends) for name, value in options.items()}
    converted = {name: value for name, value in converted.items() if value != ()}
    unknown = tuple(name for name in fields if name not in (*FIELDS, _FORCE_BOS))
    known = {_OPTIONS[name]: value for name, value in converted.items()}
    return InheritedOptions(known, {_OPTIONS[name]: name for name in converted}, unknown)


def _check_supported(path: str, fields: JsonObject, given: Mapping[str, object]) -> None:
    """Raises UserError if a field is set that changes the text and that generation does not support."""
    if type(fields.get("do_sample", False)) is not bool:
        raise UserError(f"{path}: do_sample is {fields['do_sample']!r}, it must be true or false")
    for name, neutral in _UNSUPPORTED.items():
        if name in fields and not any(fields[name] == value for value in neutral):
            raise UserError(
                f"{path}: {name} is {fields[name]!r}, which generation does not support: ignore it with "
                f"--ignore={name}, in Python ignore=({name!r},)"
            )
    beams = fields.get("num_beams", 1)
    if fields.get("do_sample") and beams != 1 and not {"num_beams", "temperature"} & given.keys():
        raise UserError(
            f"{path}: do_sample is true and num_beams {beams!r}, but beam search does not sample: choose one with "
            "--ignore=do_sample or --ignore=num_beams"
        )


def _converted(name: str, value: object, ids: int, ends: Sequence[int]) -> object:
    """Converts the value of a field to the value of the option."""
    if name in ("stop_strings", "forced_eos_token_id") and not isinstance(value, list):
        return (value,)
    if not isinstance(value, list):
        return value
    if name == "bad_words_ids":
        words = [tuple(word) if isinstance(word, list) else word for word in value if word not in [[i] for i in ends]]
        return tuple(word for word in words if not _is_outside(word, ids))
    if name in ("suppress_tokens", "begin_suppress_tokens"):
        return tuple(i for i in value if not _is_outside((i,), ids))
    return tuple(value)


def _is_outside(word: object, ids: int) -> bool:
    return isinstance(word, tuple) and any(isinstance(i, int) and i >= ids for i in word)


def end_tokens(directory: str, rows: int) -> Optional[tuple[int, ...]]:
    """Reads the ids of the tokens that end a generated text, as transformers' generate() does.

    generation_config.json takes precedence over config.json. Both may list several ids, as chat models do:
    `"eos_token_id": [2, 11]`.

    Args:
      directory: a Hugging Face directory, or a workdir with an imported directory.
      rows: number of token ids of the model.

    Returns:
      The ids, without ids that the model lacks; None if no such id remains, or no file has `eos_token_id`.

    Raises:
      UserError: `eos_token_id` is neither an id nor a list of ids.
    """
    for folder in (os.path.join(directory, ORIGINAL), directory):
        for name in (GENERATION, "config.json"):
            path = os.path.join(folder, name)
            value = read_object(path).get("eos_token_id") if os.path.exists(path) else None
            if value is not None:
                ids = value if isinstance(value, list) else [value]
                if invalid := [i for i in ids if type(i) is not int or i < 0]:
                    raise UserError(f"{path}: eos_token_id has {invalid[0]!r}, it must be an id or a list of ids")
                if outside := [i for i in ids if i >= rows]:
                    print_message(f"{path}: eos_token_id {outside[0]} is ignored: the model has ids 0 to {rows - 1:,}")
                return tuple(dict.fromkeys(i for i in ids if i < rows)) or None
    return None
