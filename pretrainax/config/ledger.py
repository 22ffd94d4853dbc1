"""Compares a config with its ledger, a file that lists the source of each value and the deviations from it.

The ledger of `bert_base.py` is the file `bert_base.toml` in the same folder. It consists of blocks of values, each of
which names one source. If several blocks contain a field, the first one applies. `configs/defaults.toml` has the values
of fields that no block contains. docs/how-to/recipe-sources.md shows an example.
"""

import collections
import fnmatch
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

from pretrainax.config.config_file import CONFIGS
from pretrainax.config.values import PATH_FIELDS, LeafField, leaf_fields
from pretrainax.files.errors import UserError
from pretrainax.files.json_files import JsonObject as Table  # also the type of TOML tables

STATUSES = ("paper", "code", "recalled", "chosen")
_ORIGINS = (*STATUSES, "see")
_KEYWORDS = {*_ORIGINS, "theirs", "variants", "named", "default", "scaled_down"}  # keys that are not config fields
_TABLES = ("tokens", "quote", "expression")  # keys of tables whose keys are config fields
_DEFAULTS = "configs/defaults.toml"


class Fact(NamedTuple):
    """A ledger's value for a config field, with its source."""

    # A list represents a tuple; "none" represents None; "any" matches every value of the config.
    value: object
    # Origin of the value, one of STATUSES: the paper, released code, memory (nobody has checked the source), or a
    # choice of PretrainAX.
    status: str
    source: str  # a file of the code, a section of the paper, or the reason for the choice
    in_tokens: bool = False  # the value is in tokens, while the field is in steps or examples
    quote: str = ""  # the characters of the source's file that give the value; "": none
    expression: str = ""  # the value as a function of the numbers in the quote; see config/quotes.py
    # Location: (file, block from 0, key). The key is "train.steps", or with variants "train.steps.base large".
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
    """The result of comparing a config with its ledger."""

    rows: list[LedgerRow]  # all numbers, all non-default values, and all fields in the ledger
    deviations: list[Deviation]

    def summary(self) -> str:
        """Lists in one line the deviations and the fields whose values differ from the source; returns "" if none."""
        deviations = "; ".join(deviation.theirs for deviation in self.deviations)
        differing = [row.path for row in self.rows if not row.agrees and not row.path.startswith("data.source.")]
        summary = [f"the source has {deviations}"] if deviations else []
        return ". ".join(summary + [f"Other values here: {', '.join(differing)}"] * bool(differing))

    def counts(self) -> str:
        """Counts the values outside the model by origin: "14 values from released code, 3 from the paper, 9 recalled".

        The sources of the model's fields are in the ledger of its architecture, which `recipe` shows.
        """
        facts = [row.fact for row in self.rows if row.fact and row.agrees and row.fact.value != "any"]
        counts = collections.Counter(fact.status for fact in facts if not fact.line[2].startswith("model."))
        return (
            f"{counts['code']} values from released code, {counts['paper']} from the paper, {counts['recalled']} "
            f"recalled (source not checked), {counts['chosen']} chosen by PretrainAX"
        )


def ledger_path(config_file: str) -> str:
    """Returns the path of a config file's ledger, which may not exist."""
    return config_file.removesuffix(".py") + ".toml"


def read(file: str) -> Table:
    """Reads and validates a ledger; returns its content as nested dicts and lists.

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
        for key in _TABLES:
            if not isinstance(block.get(key, {}), dict):
                raise UserError(
                    f"{file}, block {i}: {key} is {block[key]!r}, it must be a table, as in {key}.train.steps"
                )
        if block.get("tokens", {}).keys() - {"train", "schedule"}:
            raise UserError(f"{file}, block {i}: only fields of train and schedule can be in tokens")
    return contents


def compare(config: object, file: str, variant: str, path: str = "") -> Comparison:
    """Compares each config field with its value in a ledger.

    Args:
      config: an `Experiment`, or a section of one.
      file: path of the ledger.
      variant: variant of the config, or "" for the default variant.
      path: path of the section in the `Experiment`, for example "model", or "" if `config` is an `Experiment`.

    Raises:
      UserError: the file is not a valid ledger.
    """
    fields = list(leaf_fields(config, path))
    values = {field.path: field.value for field in fields}
    facts: dict[str, Fact] = {}
    deviations = []
    for block, block_facts in (
        *_blocks(file, _variants_to_use(file, variant), values),
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


def _variants_to_use(file: str, variant: str) -> list[str]:
    """Lists the variants whose ledger values apply to `variant`, in order of precedence.

    A scaled-down variant also uses the values of the default variant.
    """
    ledger = read(file)
    default = ledger.get("default", "")
    return [variant, default] if _matches_any(variant, ledger.get("scaled_down", "")) else [variant or default]


def is_number(value: object) -> bool:
    """Returns True for a number (but not a bool) or a non-empty tuple of numbers."""
    if isinstance(value, tuple):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _needs_source(field: LeafField) -> bool:
    """Returns True if the ledger must list a field, because it is a number or has a non-default value.

    Returns False for fields that do not affect the run's numerical results, and for non-numeric fields that users set:
    paths and the fields of the dataset.
    """
    if is_number(field.value) or field.value is None and is_number(field.default):
        return not field.is_free
    is_user_data = field.path.startswith("data.source.") or field.path.rpartition(".")[2] in PATH_FIELDS
    return field.value != field.default and not field.is_free and not is_user_data


def _package(path: str) -> str:
    return os.path.join(os.path.dirname(CONFIGS), path)


def _short(file: str) -> str:
    """Returns a file's name with its parent folder, for example "zoo/bert.toml"."""
    return "/".join(os.path.abspath(file).split(os.sep)[-2:])


def _blocks(file: str, names: Sequence[str], values: Mapping[str, object]) -> Iterator[tuple[Table, dict[str, Fact]]]:
    """Yields (block, facts by field path) for each ledger block that applies to at least one of several variants.

    A block with the key "see" is replaced by the blocks of the ledger that it refers to.

    Args:
      file: path of the ledger.
      names: names of the variants, in order of precedence.
      values: values of all config fields, by path.
    """
    for i, block in enumerate(read(file)["facts"]):
        if "variants" in block and not any(_matches_any(name, block["variants"]) for name in names):
            continue
        if "see" in block:
            named = [block.get("named", "{}").replace("{}", name) for name in names]
            yield from _blocks(_package(block["see"]), named, values)
            continue
        facts = {}
        quotes, expressions = (
            {path: str(_select_variant(value, names)[1] or "") for path, value in _flatten(block.get(key, {}), values)}
            for key in ("quote", "expression")
        )
        for in_tokens, table in ((False, _fields(block)), (True, block.get("tokens", {}))):
            for field_path, value in _flatten(table, values):
                key, value = _select_variant(value, names) if field_path in values else ("", None)
                if value is not None:
                    line = (_short(file), i, f"{field_path}.{key}".rstrip("."))
                    texts = quotes.get(field_path, ""), expressions.get(field_path, "")
                    facts[field_path] = Fact(value, *_origin(block), in_tokens, *texts, line)
        yield block, facts


def _origin(block: Table) -> tuple[str, str]:
    """Returns the (status, source) that apply to a block's values; see `Fact`."""
    (status,) = block.keys() & set(STATUSES)
    return status, block[status]


def _fields(block: Table) -> Table:
    return {key: value for key, value in block.items() if key not in _KEYWORDS and key not in _TABLES}


def _has_values(block: Table) -> bool:
    return bool(_fields(block)) or "tokens" in block


def _flatten(table: Table, values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """Yields (field path, value) for each config field in a TOML table.

    If a value is itself a table, it depends on the variant, and its keys are patterns of variant names.

    Args:
      table: the TOML table.
      values: values of all config fields, by path.
      path: path of the table in the config, or "" for the whole config.
    """
    for name, value in table.items():
        field_path = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict) and field_path not in values:
            yield from _flatten(value, values, field_path)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for i, item in enumerate(value):
                yield from _flatten(item, values, f"{field_path}[{i}]")
        else:
            yield field_path, value


def _select_variant(value: object, names: Sequence[str]) -> tuple[str, object]:
    """Selects a field's value for a variant; returns (key, value) for the first name that matches a key.

    Returns ("", value) if the value is the same for all variants, and ("", None) if no name matches.

    Args:
      value: the value in the ledger, possibly a dict from patterns of variant names to values.
      names: names of variants, in order of precedence.
    """
    if not isinstance(value, dict):
        return "", value
    matches = (
        (key, variant_value) for name in names for key, variant_value in value.items() if _matches_any(name, key)
    )
    return next(matches, ("", None))


def _matches_any(name: str, variants: str) -> bool:
    """Returns True if a name matches one of several patterns, separated by spaces."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in variants.split())


def _agrees(fact: Fact, path: str, values: Table) -> bool:
    """Returns True if the config value at `path` equals the ledger's value, after conversion to tokens if needed."""
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
