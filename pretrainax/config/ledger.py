"""Holds a config against its ledger: where each number and choice comes from, and what its source has that is not here.

The ledger of `bert_base.py` is `bert_base.toml` beside it: blocks of values with one source, of which the first that
has a value for a field counts. docs/recipes.md shows one. What no block has is asked of `configs/defaults.toml`.
"""

import fnmatch
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

from pretrainax.config.config_file import CONFIGS
from pretrainax.config.values import PATHS, Stated, stated
from pretrainax.files.errors import UserError
from pretrainax.files.json_files import JsonObject as Table  # what TOML holds, too

STATUSES = ("paper", "code", "chosen")
_ORIGINS = (*STATUSES, "see")
_WORDS = {*_ORIGINS, "theirs", "variants", "named", "default", "scaled_down"}  # keys that are no fields of a config
_DEFAULTS = "configs/defaults.toml"


class Fact(NamedTuple):
    """A value of a ledger, and where it comes from."""

    value: object  # lists for tuples, "none" for None, "any": each agrees; where `in_tokens`, a number of tokens
    status: str  # one of STATUSES
    source: str  # a section of the paper, a file of the code, or the reason
    in_tokens: bool = False
    line: tuple[str, int, str] = ("", 0, "")  # where it stands: file, block, "train.steps" or "train.steps.base large"


class Row(NamedTuple):
    """A field of a config beside what its ledger says of it."""

    path: str  # "train.steps"
    value: object
    fact: Optional[Fact]  # None: it says nothing of a number, or of what is not the default
    agrees: bool  # with it


class Deviation(NamedTuple):
    """Something that the source has and this house has not."""

    theirs: str
    ours: str  # what is here in its place, and why


class Comparison(NamedTuple):
    """A config beside its ledger."""

    rows: list[Row]  # each number, what else is not as by default, and what the ledger speaks of
    deviations: list[Deviation]

    def one_line(self) -> str:
        """Says in what a run is not that of its source, by its ledger and by its own fields; "": in nothing."""
        theirs = "; ".join(deviation.theirs for deviation in self.deviations)
        others = [row.path for row in self.rows if not row.agrees and not row.path.startswith("data.source.")]
        said = [f"the source has {theirs}"] if theirs else []
        return ". ".join(said + [f"Other values here: {', '.join(others)}"] * bool(others))


def beside(config_file: str) -> str:
    """Returns the path of the ledger of a config file, whether it is there or not."""
    return config_file.removesuffix(".py") + ".toml"


def read(file: str) -> Table:
    """Returns the contents of a ledger; UserError where it is none."""
    try:
        with open(file, "rb") as f:
            contents = tomllib.load(f)
    except (OSError, ValueError) as e:
        raise UserError(f"{file} is no ledger: {e}") from e
    blocks = contents.get("facts")
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise UserError(f"{file} is no ledger: it needs blocks that begin with [[facts]]")
    for name, table in [(file, contents), *((f"{file}, block {i}", block) for i, block in enumerate(blocks, 1))]:
        for key in _WORDS & table.keys():
            if not isinstance(table[key], str):
                raise UserError(f"{name}: {key} is {table[key]!r}, it must be text in quotes")
    for i, block in enumerate(blocks, 1):
        if len(block.keys() & {*_ORIGINS}) != 1:
            raise UserError(
                f"{file}, block {i}: it must say where its values are from, by one of {', '.join(_ORIGINS)}"
            )
        if not isinstance(block.get("tokens", {}), dict) or block.get("tokens", {}).keys() - {"train", "schedule"}:
            raise UserError(f"{file}, block {i}: only fields of train and of schedule can be given in tokens")
    return contents


def compare(config: object, file: str, variant: str, path: str = "") -> Comparison:
    """Holds a config against a ledger.

    Args:
      config: an `Experiment`, or a part of one.
      file: of the ledger.
      variant: of the config; "": the default one.
      path: of a part, as "model".

    Raises:
      UserError: the file is no ledger.
    """
    fields = list(stated(config, path))
    values = {field.path: field.value for field in fields}
    facts: dict[str, Fact] = {}
    deviations = []
    for block, fact_of in (*_blocks(file, _names(file, variant), values), *_blocks(_package(_DEFAULTS), [], values)):
        first = {where: fact for where, fact in fact_of.items() if where not in facts}
        facts |= first
        if "theirs" in block and (first or not _has_values(block)):
            deviations.append(Deviation(block["theirs"], _origin(block)[1]))
    rows = []
    for field in fields:
        if (fact := facts.get(field.path)) is not None:
            rows.append(Row(field.path, field.value, fact, _agrees(fact, field.path, values)))
        elif _needs_source(field):
            rows.append(Row(field.path, field.value, None, False))
    return Comparison(rows, deviations)


def _names(file: str, variant: str) -> list[str]:
    """Returns the variants whose values count, the first before the second: one that is scaled down is of two."""
    ledger = read(file)
    default = ledger.get("default", "")
    return [variant, default] if _is_one(variant, ledger.get("scaled_down", "")) else [variant or default]


def is_number(value: object) -> bool:
    """Says if a value is a number, or a tuple of some."""
    if isinstance(value, tuple):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _needs_source(field: Stated) -> bool:
    """Tells each number, and each other choice than the default; files and the text are the user's."""
    if is_number(field.value) or field.value is None and is_number(field.default):
        return not field.is_free
    is_files = field.path.startswith("data.source.") or field.path.rpartition(".")[2] in PATHS
    return field.value != field.default and not field.is_free and not is_files


def _package(path: str) -> str:
    return os.path.join(os.path.dirname(CONFIGS), path)


def _short(file: str) -> str:
    """Returns the file and its folder: "zoo/bert.toml"."""
    return "/".join(os.path.abspath(file).split(os.sep)[-2:])


def _blocks(file: str, names: Sequence[str], values: Mapping[str, object]) -> Iterator[tuple[Table, dict[str, Fact]]]:
    """Yields each block of a file that is of one of these variants, with its facts by the path of their field."""
    for i, block in enumerate(read(file)["facts"]):
        if "variants" in block and not any(_is_one(name, block["variants"]) for name in names):
            continue
        if "see" in block:
            others = [block.get("named", "{}").replace("{}", name) for name in names]
            yield from _blocks(_package(block["see"]), others, values)
            continue
        facts = {}
        for in_tokens, table in ((False, _fields(block)), (True, block.get("tokens", {}))):
            for where, value in _flat(table, values):
                key, value = _of_variant(value, names) if where in values else ("", None)
                if value is not None:
                    line = (_short(file), i, f"{where}.{key}".rstrip("."))
                    facts[where] = Fact(value, *_origin(block), in_tokens, line)
        yield block, facts


def _origin(block: Table) -> tuple[str, str]:
    """Returns the status of a block's values, and the source or the reason."""
    (status,) = block.keys() & set(STATUSES)
    return status, block[status]


def _fields(block: Table) -> Table:
    return {key: value for key, value in block.items() if key not in _WORDS and key != "tokens"}


def _has_values(block: Table) -> bool:
    return bool(_fields(block)) or "tokens" in block


def _flat(table: Table, values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """Yields path and value of each field of a table; a table in the place of a field has its values by variant."""
    for name, value in table.items():
        where = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict) and where not in values:
            yield from _flat(value, values, where)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for i, part in enumerate(value):
                yield from _flat(part, values, f"{where}[{i}]")
        else:
            yield where, value


def _of_variant(value: object, names: Sequence[str]) -> tuple[str, object]:
    """Returns the key and the value of the first name that a value has one for; ("", value) of all variants."""
    if not isinstance(value, dict):
        return "", value
    found = ((key, one) for name in names for key, one in value.items() if _is_one(name, key))
    return next(found, ("", None))


def _is_one(name: str, variants: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in variants.split())


def _agrees(fact: Fact, path: str, values: Table) -> bool:
    value = values[path]
    if fact.value == "any":
        return True
    if not fact.in_tokens:
        theirs = tuple(fact.value) if isinstance(fact.value, list) else fact.value
        same = value == theirs and isinstance(value, bool) == isinstance(theirs, bool)
        return same or value is None and theirs == "none"
    one = values["data.sequence_length"]  # tokens of a row
    if path != "train.global_batch_size":
        one *= values["train.global_batch_size"]  # of a step
    numbers = isinstance(value, (int, float)) and isinstance(fact.value, (int, float))
    return numbers and abs(value * one - fact.value) <= one / 2  # the nearest whole number
