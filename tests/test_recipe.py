"""Every number of every config and preset has its source, and every line of a ledger is of a number."""

import functools
from collections.abc import Iterator

from pretrainax import zoo
from pretrainax.config import ledger
from pretrainax.scaling.small import SIZES
from tests.support.runs import ROOT
from tests.test_configs import NAMES, load

SMALL = [(name, size) for name in ("bert_base", "gpt2", "llama", "modernbert_base", "t5_base") for size in SIZES]

NO_FIELDS = (*ledger.STATUSES, "theirs", "variants", "see", "named")


@functools.cache
def compared() -> dict[str, ledger.Comparison]:
    """Each config and preset beside its ledger."""
    of_configs = {
        f"{name}:{variant}": ledger.compare(load(name, variant), str(ROOT / "configs" / f"{name}.toml"), variant)
        for name, variant in [*NAMES, *SMALL]
    }
    of_presets = {name: ledger.compare(zoo.preset(name), zoo.ledger_of(name), name, "model") for name in zoo.PRESETS}
    return of_configs | of_presets


def test_every_number_is_that_of_its_ledger():
    wrong = [
        (name, row.path, row.value, row.fact and (row.fact.value, row.fact.line))
        for name, comparison in compared().items()
        for row in comparison.rows
        if not row.agrees
    ]
    assert wrong == []


def lines(value: object, path: str = "") -> Iterator[str]:
    """The keys of a block: "train.steps", or "train.steps.base" of a table by variant."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from lines(part, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and isinstance(value[0], dict):
        for i, part in enumerate(value):
            yield from lines(part, f"{path}[{i}]")
    else:
        yield path


def test_every_line_of_a_ledger_is_of_some_number():
    written = {
        (f"{file.parent.name}/{file.name}", i, line.removeprefix("tokens."))
        for folder in ("configs", "pretrainax/zoo")
        for file in (ROOT / folder).glob("*.toml")
        for i, block in enumerate(ledger.read(str(file))["facts"])
        for line in lines(block)
        if line not in NO_FIELDS
    }
    used = {row.fact.line for comparison in compared().values() for row in comparison.rows if row.fact}
    assert len(used) > 500 and sorted(written - used) == []
