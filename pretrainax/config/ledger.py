"""Compares a config with its ledger, the file that contains the source of each value and the deviations from it.

The ledger of `bert_base.py` is the file `bert_base.toml` in the same folder. It contains blocks of values, and each
block has one source. If several blocks contain a field, the first of them applies. `configs/defaults.toml` has the
values of fields that no block contains. docs/how-to/recipe-sources.md shows an example.
"""

import fnmatch
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

from pretrainax.config.config_file import CONFIGS
from pretrainax.config.values import PATH_FIELDS, LeafField, leaf_fields
from pretrainax.files.errors import UserError
from pretrainax.files.json_files import JsonObject as Table  # also the type of TOML tables

STATUSES = ("paper", "code", "chosen")
_ORIGINS = (*STATUSES, "see")
_KEYWORDS = {*_ORIGINS, "theirs", "variants", "named", "default", "scaled_down"}  # keys that are not config fields
_DEFAULTS = "configs/defaults.toml"


class Fact(NamedTuple):
    """The value of a config field in a ledger, with its source."""

    # a list represents a tuple; "none" represents None; "any" matches every value of the config
    value: object
    status: str  # origin of the value, one of STATUSES: the paper, released code, or a choice of PretrainAX
    source: str  # a section of the paper, a file of the code, or the reason for the choice
    in_tokens: bool = False  # the value is in tokens, while the field is in steps or examples
    # location: (file, number of the block, key), such as "train.steps" or "train.steps.base large" (with the variants)
    line: tuple[str, int, str] = ("", 0, "")


class LedgerRow(NamedTuple):
    """A config field with its ledger entry."""

    path: str  # "train.steps"
    value: object
    fact: Optional[Fact]  # None: the ledger has no entry for a number or a non-default value
    agrees: bool  # True if the value matches the fact


class Deviation(NamedTuple):
    """A feature of the source that PretrainAX does not implement."""

    theirs: str  # the feature of the source
    ours: str  # the replacement in PretrainAX, and the reason


class Comparison(NamedTuple):
    """A config compared with its ledger."""

    rows: list[LedgerRow]  # all numbers, all non-default values, and all fields in the ledger
    deviations: list[Deviation]

    def summary(self) -> str:
        """Returns one line with the deviations and the fields whose values differ from the source; "" without any."""
        deviations = "; ".join(deviation.theirs for deviation in self.deviations)
        differing = [row.path for row in self.rows if not row.agrees and not row.path.startswith("data.source.")]
        summary = [f"the source has {deviations}"] if deviations else []
        return ". ".join(summary + [f"Other values here: {', '.join(differing)}"] * bool(differing))


def ledger_path(config_file: str) -> str:
    """Returns the ledger path of a config file; the file may not exist."""
    return config_file.removesuffix(".py") + ".toml"


def read(file: str) -> Table:
    """Reads a ledger, and returns its content as nested dicts and lists.

    Raises:
      UserError: the file is not a valid ledger.
    """
    try:
        with open(file, "rb") as f:
            contents = tomllib.load(f)
    except (OSError, ValueError) as e:
        raise UserError(f"{file} is not a ledger: {e}") from e
    blocks = contents.get("facts")
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise UserError(f"{file} is not a ledger: it must have blocks that begin with [[facts]]")
    for name, table in [(file, contents), *((f"{file}, block {i}", block) for i, block in enumerate(blocks, 1))]:
        for key in _KEYWORDS & table.keys():
            if not isinstance(table[key], str):
                raise UserError(f"{name}: {key} is {table[key]!r}, it must be a string in quotes")
    for i, block in enumerate(blocks, 1):
        if len(block.keys() & {*_ORIGINS}) != 1:
            raise UserError(f"{file}, block {i}: it must name its source with exactly one of {', '.join(_ORIGINS)}")
        if not isinstance(block.get("tokens", {}), dict) or block.get("tokens", {}).keys() - {"train", "schedule"}:
            raise UserError(f"{file}, block {i}: only fields of train and schedule can be in tokens")
    return contents


def compare(config: object, file: str, variant: str, path: str = "") -> Comparison:
    """Compares each field of a config with its value in a ledger.

    Args:
      config: an `Experiment`, or a section of an `Experiment`.
      file: path of the ledger.
      variant: variant of the config; "": the default variant.
      path: path of the section in the `Experiment`, such as "model"; "": `config` is an `Experiment`.

    Raises:
      UserError: the file is not a valid ledger.
    """
    fields = list(leaf_fields(config, path))
    values = {field.path: field.value for field in fields}
    facts: dict[str, Fact] = {}
    deviations = []
    for block, block_facts in (
        *_blocks(file, _names(file, variant), values),
        *_blocks(_package(_DEFAULTS), [], values),
    ):
        new_facts = {field_path: fact for field_path, fact in block_facts.items() if field_path not in facts}
        facts |= new_facts
        if "theirs" in block and (new_facts or not _has_values(block)):
            deviations.append(Deviation(block["theirs"], _origin(block)[1]))
    rows = []
    for field in fields:
        if (fact := facts.get(field.path)) is not None:
            rows.append(LedgerRow(field.path, field.value, fact, _agrees(fact, field.path, values)))
        elif _needs_source(field):
            rows.append(LedgerRow(field.path, field.value, None, False))
    return Comparison(rows, deviations)


def _names(file: str, variant: str) -> list[str]:
    """Returns the names of the variants whose values in a ledger apply to a variant, in order of precedence.

    A scaled-down variant also uses the values of the default variant.
    """
    ledger = read(file)
    default = ledger.get("default", "")
    return [variant, default] if _is_one(variant, ledger.get("scaled_down", "")) else [variant or default]


def is_number(value: object) -> bool:
    """Returns True for a number or a non-empty tuple of numbers."""
    if isinstance(value, tuple):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _needs_source(field: LeafField) -> bool:
    """Returns True if the ledger must contain a field: a number, or a value that is not the default.

    False for fields that do not change the mathematics, and for non-numeric paths and fields of the dataset, which
    users set.
    """
    if is_number(field.value) or field.value is None and is_number(field.default):
        return not field.is_free
    is_user_data = field.path.startswith("data.source.") or field.path.rpartition(".")[2] in PATH_FIELDS
    return field.value != field.default and not field.is_free and not is_user_data


def _package(path: str) -> str:
    return os.path.join(os.path.dirname(CONFIGS), path)


def _short(file: str) -> str:
    """Returns the name of a file with its parent folder: "zoo/bert.toml"."""
    return "/".join(os.path.abspath(file).split(os.sep)[-2:])


def _blocks(file: str, names: Sequence[str], values: Mapping[str, object]) -> Iterator[tuple[Table, dict[str, Fact]]]:
    """Yields (block, facts by field path) for each block of a ledger that applies to one of several variants.

    A block with the key "see" is replaced by the blocks of another ledger.

    Args:
      file: path of the ledger.
      names: names of the variants, in order of precedence.
      values: values of all config fields, by path.
    """
    for i, block in enumerate(read(file)["facts"]):
        if "variants" in block and not any(_is_one(name, block["variants"]) for name in names):
            continue
        if "see" in block:
            named = [block.get("named", "{}").replace("{}", name) for name in names]
            yield from _blocks(_package(block["see"]), named, values)
            continue
        facts = {}
        for in_tokens, table in ((False, _fields(block)), (True, block.get("tokens", {}))):
            for field_path, value in _flat(table, values):
                key, value = _of_variant(value, names) if field_path in values else ("", None)
                if value is not None:
                    line = (_short(file), i, f"{field_path}.{key}".rstrip("."))
                    facts[field_path] = Fact(value, *_origin(block), in_tokens, line)
        yield block, facts


def _origin(block: Table) -> tuple[str, str]:
    """Returns (status, source) of the values in a block; see `Fact`."""
    (status,) = block.keys() & set(STATUSES)
    return status, block[status]


def _fields(block: Table) -> Table:
    return {key: value for key, value in block.items() if key not in _KEYWORDS and key != "tokens"}


def _has_values(block: Table) -> bool:
    return bool(_fields(block)) or "tokens" in block


def _flat(table: Table, values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """Yields (path, value) for each config field in a TOML table.

    If the value itself is a table, its keys are patterns of variant names.
    """
    for name, value in table.items():
        field_path = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict) and field_path not in values:
            yield from _flat(value, values, field_path)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for i, part in enumerate(value):
                yield from _flat(part, values, f"{field_path}[{i}]")
        else:
            yield field_path, value


def _of_variant(value: object, names: Sequence[str]) -> tuple[str, object]:
    """Selects the value of a field for a variant: (key, value) of the first name that matches a key of `value`.

    Returns ("", value) if the value is the same for all variants, and ("", None) if no name matches.
    """
    if not isinstance(value, dict):
        return "", value
    matches = ((key, variant_value) for name in names for key, variant_value in value.items() if _is_one(name, key))
    return next(matches, ("", None))


def _is_one(name: str, variants: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in variants.split())


def _agrees(fact: Fact, path: str, values: Table) -> bool:
    value = values[path]
    if fact.value == "any":
        return True
    if not fact.in_tokens:
        expected = tuple(fact.value) if isinstance(fact.value, list) else fact.value
        is_equal = value == expected and isinstance(value, bool) == isinstance(expected, bool)
        return is_equal or value is None and expected == "none"
    unit = values["data.sequence_length"]  # tokens per row
    if path != "train.global_batch_size":
        unit *= values["train.global_batch_size"]  # tokens per step
    are_numbers = isinstance(value, (int, float)) and isinstance(fact.value, (int, float))
    return are_numbers and abs(value * unit - fact.value) <= unit / 2  # the value is the nearest whole number of units
