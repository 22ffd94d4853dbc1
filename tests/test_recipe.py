"""Every number of every config and preset has its source, and every line of a ledger is of a number."""

import functools
import sys
from collections.abc import Iterator
from unittest import mock

from pretrainax import zoo
from pretrainax.config import ledger
from pretrainax.scaling.small import SIZES
from tests.support.runs import ROOT, run
from tests.test_configs import NAMES, load

SMALL = [(name, size) for name in ("bert_base", "gpt2", "llama", "modernbert_base", "t5_base") for size in SIZES]

NO_FIELDS = (*ledger.STATUSES, "theirs", "variants", "see", "named")


@functools.cache
def compared() -> dict[str, ledger.Comparison]:
    """Each config and preset beside its ledger."""
    with mock.patch.object(ledger, "read", functools.cache(ledger.read)):
        of_configs = {
            f"{name}:{variant}": ledger.compare(load(name, variant), str(ROOT / "configs" / f"{name}.toml"), variant)
            for name, variant in [*NAMES, *SMALL]
        }
        return of_configs | {
            name: ledger.compare(zoo.preset(name), zoo.ledger_of(name), name, "model") for name in zoo.PRESETS
        }


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


def shown(*words: str) -> str:
    done = run([sys.executable, "-m", "pretrainax.recipe", *words])
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_it_shows_each_number_with_its_source_and_what_a_flag_has_changed():
    said = shown("--config=llama:2_7b", "--config.optimizer.b1=0.8")
    assert (
        "train.steps 476,837 paper Touvron et al. 2023, arXiv 2307.09288, section 2.2 and table 1: 2 T tokens" in said
    )
    assert "optimizer.b1 0.8 here in the place of 0.9 (paper: " in said and said.endswith(", 1 otherwise")
    assert "What the source has" not in said


def test_it_shows_what_the_source_has_and_one_part_alone():
    said = shown("--preset=macbert_base")
    assert "model.vocab_size 21,128 paper Cui et al. 2020" in said
    assert "model.attention_dropout_rate 0.1 code google-research/bert, modeling.py" in said
    assert shown("--config=bert_base", "--only=optimizer.b").endswith(
        "3 fields: 2 paper, 1 code, 0 chosen, 0 otherwise"
    )
