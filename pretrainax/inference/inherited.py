"""Combines a user's generation options with the model's: its generation_config.json, or the ends of its answers."""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pretrainax.config import UserError, nearest
from pretrainax.files.errors import shortened
from pretrainax.files.json_files import JsonObject
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.request import BEAMS_ONLY, DEFAULTS, SAMPLING_ONLY, Sampling, invalid_values, plain_value
from pretrainax.interop.generation import ALL, FIELDS, GenerationFile, InheritedOptions, inherited_options
from pretrainax.tasks.writing import WritingTask

_LENGTHS = ("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")  # the first takes precedence


class Request(NamedTuple):
    """Complete generation options, with lines that state which options a model's file has set."""

    sampling: Sampling
    notes: list[str]


def request_of(loaded: LoadedModel, given: JsonObject, ignore: Sequence[str] = ()) -> Request:
    """Combines options with the settings of the model's generation_config.json, as transformers' generate() does.

    Only imported models that were not trained further have these settings. A model that learned to write answers stops
    at the text that ends an answer in its training, as in validations. An option that the user sets takes precedence:
    a setting does not apply if it contradicts this option or has no effect together with it.

    Args:
      given: fields of `Sampling` that the user sets; lists and NumPy scalars are converted by `plain_value`.
      ignore: names of fields in generation_config.json to ignore; "all" for all fields.

    Raises:
      UserError: a field of the file is invalid or not supported, or the options contradict each other.
    """
    file, ignore = loaded.generation, (ignore,) if isinstance(ignore, str) else ignore
    if unknown := sorted({*ignore} - {ALL, *FIELDS, *(file.fields if file else ())}):
        raise UserError(f"ignore has {unknown[0]!r}, {nearest(unknown[0], (ALL, *FIELDS))}")
    given = {name: plain_value(value) for name, value in given.items()}
    if problems := list(invalid_values(given)):
        raise UserError("; ".join(problems))
    inherited = InheritedOptions({}, {}, ())
    if file is not None:
        inherited = inherited_options(file, ignore, given, loaded.tokenizer.vocabulary.size, loaded.end_tokens)
        _check_values(file, inherited)
    used = _applicable(inherited.options, given)
    ends = ends_of_answers(loaded)
    options: JsonObject = {**({"stop": ends} if ends else {}), **used, **given}
    if "max_length" in options and "max_new_tokens" not in options:
        options["max_new_tokens"] = options["max_length"]
    if "min_new_tokens" in used:
        most = options.get("max_new_tokens", DEFAULTS["max_new_tokens"])
        options["min_new_tokens"] = min(used["min_new_tokens"], most)
    sampling = Sampling(**options)
    sampling.check()
    notes = _notes(file, inherited, used, given) if file else []
    if ends and sampling.stop == ends:
        notes.append(f"from config.objective: stop {', '.join(map(repr, ends))}")
    return Request(sampling, notes)


def ends_of_answers(loaded: LoadedModel) -> tuple[str, ...]:
    """Returns the strings that end an answer in the training of a model that learned to write answers, or ()."""
    task = loaded.experiment.objective.bind(loaded.tokenizer)
    return task.stop if isinstance(task, WritingTask) else ()


def _check_values(file: GenerationFile, inherited: InheritedOptions) -> None:
    """Raises UserError if an option of the file is out of range."""
    for option, value in inherited.options.items():
        for problem in invalid_values({option: value}):
            field = inherited.fields[option]
            raise UserError(
                f"{file.path}: {problem.replace(option, field, 1)}; ignore it with --ignore={field}, in Python "
                f"ignore=({field!r},)"
            )


def _applicable(inherited: JsonObject, given: JsonObject) -> JsonObject:
    """Returns the inherited options that have an effect together with the given options."""
    options = {name: value for name, value in inherited.items() if name not in given}
    for pair in _LENGTHS:
        if given.keys() & {*pair}:
            _remove(options, pair)
        elif options.keys() >= {*pair}:
            del options[pair[1]]
    if given.get("temperature"):
        _remove(options, ("num_beams",))
    elif given.get("num_beams", 1) != 1:
        _remove(options, ("temperature",))
    combined = {"temperature": 0.0, "num_beams": 1, **options, **given}
    if not combined["temperature"]:
        _remove(options, SAMPLING_ONLY)
    if combined["num_beams"] == 1:
        _remove(options, BEAMS_ONLY)
    if options.get("num_return", 1) > (combined["num_beams"] if not combined["temperature"] else 1 << 30):
        _remove(options, ("num_return",))
    return options


def _remove(options: JsonObject, names: Iterable[str]) -> None:
    for name in names:
        options.pop(name, None)


def _notes(file: GenerationFile, inherited: InheritedOptions, used: JsonObject, given: JsonObject) -> list[str]:
    """Returns lines that state which fields of the file apply, and which have no effect."""

    def listed(options: JsonObject) -> str:
        """Formats options by the names of their fields: "temperature 0.6, top_k 50 (default of transformers)"."""
        names = {inherited.fields[option]: value for option, value in options.items()}
        values = {
            name: shortened(str(file.fields.get(name, f"{x} (default of transformers)"))) for name, x in names.items()
        }
        return ", ".join(f"{name} {value}" for name, value in values.items())

    name = os.path.basename(file.path)
    unused = {option: x for option, x in inherited.options.items() if option not in (*used, *given)}
    lines = {
        f"from {name}: ": listed(used),
        f"without effect in {name}: ": listed(unused),
        f"unknown in {name}, without effect: ": ", ".join(inherited.unknown),
    }
    return [label + text for label, text in lines.items() if text]
