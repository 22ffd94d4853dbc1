"""Every number and choice of every config and preset has a source, and every line of a ledger belongs to a value."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from pretrainax import zoo
from pretrainax.config import Choice, Experiment, ledger, quotes
from pretrainax.scaling.small import SIZES
from tests.support.runs import ROOT, run
from tests.test_configs import NAMES, load

SMALLER = (
    *("bert_base", "bigbird", "electra_small", "elmo", "eurobert", "gpt2", "llama", "longformer", "modernbert_base"),
    *("neobert", "phi", "smollm", "t5_base"),
)
SMALL = [(name, size) for name in SMALLER for size in SIZES]

NO_FIELDS = (*ledger.STATUSES, "theirs", "variants", "see", "named", "quote", "expression")


@functools.cache
def compared() -> dict[str, ledger.Comparison]:
    """Compares each config and preset with its ledger."""
    with mock.patch.object(ledger, "read", functools.cache(ledger.read)):
        of_configs = {
            f"{name}:{variant}": ledger.compare(load(name, variant), str(ROOT / "configs" / f"{name}.toml"), variant)
            for name, variant in [*NAMES, *SMALL]
        }
        return of_configs | {
            name: ledger.compare(zoo.preset(name), zoo.sources_path(name), name, "model") for name in zoo.PRESETS
        }


def test_every_number_and_choice_is_that_of_its_ledger():
    wrong = [
        (name, row.path, row.value, row.fact and (row.fact.value, row.fact.line))
        for name, comparison in compared().items()
        for row in comparison.rows
        if not row.agrees
    ]
    assert wrong == []


# --- changes of a config or a ledger ----------------------------------------------------------------------------------


def part_of(whole: object, names: list[str]) -> object:
    """Returns the value at a path in a config or in a block of a ledger: ["objectives[0]", "mode"]."""
    for name in names:
        name, _, i = name.rstrip("]").partition("[")
        whole = whole[name] if isinstance(whole, dict) else getattr(whole, name)
        whole = whole[int(i)] if i else whole
    return whole


def with_other(config: Experiment, path: str, value: object) -> Experiment:
    """Returns the config with another value of a field, or with another class that has the same numbers."""
    *owner, name = path.split(".")
    part = part_of(config, owner)
    if name != "type":
        setattr(part, name, value)
        return config
    cls = Choice.named(str(value))
    other = cls(**{f.name: getattr(part, f.name) for f in dataclasses.fields(cls) if hasattr(part, f.name)})
    name, _, i = owner[-1].rstrip("]").partition("[")
    several = part_of(config, [*owner[:-1], name])
    setattr(part_of(config, owner[:-1]), name, (*several[: int(i)], other, *several[int(i) + 1 :]) if i else other)
    return config


def other_than(row: ledger.LedgerRow) -> object:
    """Returns another value of the same type as a row's value, or another class of the same kind."""
    if row.path.endswith(".type"):
        cls = Choice.named(str(row.value))
        kind = cls.__mro__[cls.__mro__.index(Choice) - 1]
        return next(name for name in kind.names() if name != row.value)
    if isinstance(row.value, bool):
        return not row.value
    if isinstance(row.value, (int, float)):
        return 1.25 * row.value or 0.5
    return (*row.value, row.value[0]) if isinstance(row.value, tuple) else "other"


def places() -> Iterator[tuple[str, str, ledger.LedgerRow]]:
    """Yields config, variant and row of each value in configs that together have all kinds of values."""
    configs = "albert_base:base gpt3:13b llama:3_8b modernbert_base:large t5_base:nano transformer:big ul2_base:base"
    for name in configs.split():
        for row in compared()[name].rows:
            if row.fact is not None and row.fact.value != "any":
                yield *name.split(":"), row


def noticed(name: str, variant: str, config: Experiment, path: str) -> bool:
    rows = ledger.compare(config, str(ROOT / "configs" / f"{name}.toml"), variant).rows
    return any(row.path == path and not row.agrees for row in rows)


def read_otherwise(row: ledger.LedgerRow, read: Callable[[str], dict], path: str) -> dict:
    """Returns the contents of a ledger with another value in the line of a row."""
    file, i, line = row.fact.line
    contents = read(path)
    if path.endswith(file):
        *owner, last = line.split(".")
        block = contents["facts"][i]
        part_of(block["tokens"] if row.fact.in_tokens else block, owner)[last] = other_than(row)
    return contents


@pytest.mark.slow
def test_any_other_number_word_or_class_in_a_config_is_noticed():
    lived = [
        (name, variant, row.path)
        for name, variant, row in places()
        if not noticed(name, variant, with_other(load(name, variant), row.path, other_than(row)), row.path)
    ]
    assert len(list(places())) > 200 and lived == []


@pytest.mark.slow
def test_any_other_number_word_or_class_in_a_ledger_is_noticed():
    lived = []
    for name, variant, row in places():
        with mock.patch.object(ledger, "read", functools.partial(read_otherwise, row, ledger.read)):
            if not noticed(name, variant, load(name, variant), row.path):
                lived.append((name, variant, row.path))
    assert lived == []


@pytest.mark.parametrize(
    "name, variant, path, other",
    [
        ("gpt2", "124m", "optimizer.type", "Lamb"),
        ("bert_base", "base", "schedule.type", "WarmupCosine"),
        ("roberta_base", "base", "objective.type", "ReplacedTokenDetection"),
        ("llama", "3_8b", "objective.type", "PrefixLM"),
        ("llama", "3_8b", "model.activation", "gelu"),
        ("bert_base", "base", "model.activation", "silu"),
        ("gemma", "2_2b", "model.norm", "rms"),
        ("gpt2", "124m", "model.position.type", "SinusoidalPositions"),
        ("mistral", "7b", "tokenizer.type", "Unigram"),
        # The ledger has no entries for these fields, because they have their default values.
        ("qwen", "3_8b", "objective.mask_documents", True),
        ("gpt2", "124m", "optimizer.scale_by_parameter_rms", True),
        ("gpt2", "124m", "model.gated", True),
        ("bert_base", "base", "objective.masking.mask_unit.type", "WholeWords"),
    ],
)
def test_another_class_with_the_same_numbers_is_noticed(name, variant, path, other):
    assert noticed(name, variant, with_other(load(name, variant), path, other), path)


# --- every line is used -----------------------------------------------------------------------------------------------


def lines(value: object, path: str = "") -> Iterator[str]:
    """Yields the keys of a block: "train.steps", or "train.steps.base" in a table by variant."""
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
        if line.split(".")[0] not in NO_FIELDS
    }
    used = {row.fact.line for comparison in compared().values() for row in comparison.rows if row.fact}
    assert len(used) > 500 and sorted(written - used) == []


def facts() -> Iterator[tuple[str, str, ledger.Fact]]:
    """Yields config, path and fact of each value in a ledger of a config, once."""
    yield from {
        (row.path, row.fact.line): (name, row.path, row.fact)
        for name, comparison in compared().items()
        for row in comparison.rows
        if row.fact and row.fact.line[0].startswith("configs/") and row.fact.value != "any"
    }.values()


def test_each_value_from_code_names_a_file_at_a_commit_and_each_one_from_code_or_a_paper_has_its_quote():
    without = [
        (name, path, fact.source)
        for name, path, fact in facts()
        if fact.status in ("code", "paper")
        and not (fact.quote and (fact.status == "paper" or quotes.released_file(fact.source)))
    ]
    assert without == []


def test_each_quote_gives_the_value():
    quoted = [(name, path, fact) for name, path, fact in facts() if fact.quote]
    differing = [
        (name, path, fact.value, fact.quote, problem)
        for name, path, fact in quoted
        if (problem := quotes.mismatch(fact.value, fact.quote, fact.expression))
    ]
    assert len(quoted) > 500 and differing == []


def shown(*words: str) -> str:
    done = run([sys.executable, "-m", "pretrainax.recipe", *words])
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.slow
def test_it_shows_each_number_with_its_source_and_what_a_flag_has_changed():
    said = shown("--config=llama:2_7b", "--config.optimizer.b1=0.8")
    assert "train.steps 476,837 paper Touvron et al. 2023, arXiv 2307.09288, section 2.2: 2 T tokens" in said
    assert "optimizer.b1 0.8 here instead of 0.9 (paper: " in said and said.endswith(", 1 other (here or ?)")
    assert "Deviations: features of the source" not in said


@pytest.mark.slow
def test_it_shows_the_released_code_of_each_rule_of_a_transfer():
    said = shown("--config=gpt2:124m", "--config.transfer=Transfer(base_width=192)", "--only=transfer")
    assert "transfer.hidden updates × 1 / m code microsoft/mup@" in said and said.endswith(" 0 other (here or ?)")


@pytest.mark.slow
def test_it_shows_what_the_source_has_and_one_part_alone():
    said = shown("--preset=macbert_base")
    assert "model.vocab_size 21,128 recalled Cui et al. 2020" in said
    assert "model.attention_dropout_rate 0.1 code google-research/bert, modeling.py" in said
    assert shown("--config=bert_base", "--only=optimizer.b").endswith(
        "3 fields: 0 paper, 3 code, 0 recalled, 0 chosen, 0 other (here or ?)"
    )


# --- the check of quotes ----------------------------------------------------------------------------------------------

CHECKED = """
default = "gpt"

[[facts]]
code = "some/code@{commit}:train.py"
optimizer.b1 = 0.9
optimizer.b2 = {b2}
optimizer.type = "AdamW"
quote.optimizer.b1 = "betas=(0.9, 0.999)"
quote.optimizer.b2 = "betas=(0.9, 0.999)"
quote.optimizer.type = "AdamW("
expression.optimizer.b1 = "a"
expression.optimizer.b2 = "b"

[[facts]]
recalled = "from a talk"
optimizer.weight_decay = 0.01
"""


@pytest.fixture
def checked(tmp_path):
    """Returns a function that checks a config's optimizer against a released file with the given text.

    The function returns the exit code and the output.
    """
    (tmp_path / "mine.py").write_text("from tests.support.tiny import get_config")
    copy = tmp_path / "copies" / "some" / "code" / ("a" * 40) / "train.py"
    copy.parent.mkdir(parents=True)

    def checked(text: str, b2: float = 0.999, *words: str) -> tuple[int, str]:
        copy.write_text(text)
        (tmp_path / "mine.toml").write_text(CHECKED.format(commit="a" * 40, b2=b2))
        flags = [f"--config={tmp_path}/mine.py:gpt", "--only=optimizer", "--check", f"--copies={tmp_path}/copies"]
        done = run([sys.executable, "-m", "pretrainax.recipe", *flags, *words])
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return checked


@pytest.mark.slow
def test_a_check_finds_the_quotes_and_compares_their_numbers(checked):
    code, said = checked("opt = AdamW(lr,\n            betas=(0.9,   0.999))\n")
    assert code == 0
    assert "optimizer.b1 0.9 agrees 'betas=(0.9, 0.999)', a, some/code@aaaaaaa:train.py" in said
    assert "optimizer.type AdamW found 'AdamW('" in said  # a word has no number
    assert "optimizer.weight_decay 0.01 not checkable recalled: from a talk" in said
    assert " 2 agrees, 1 found, " in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, b2, words, said",
    [
        ("opt = AdamW(lr, betas=(0.9, 0.95))", 0.999, (), "optimizer.b2 0.999 not found"),
        (
            "opt = AdamW(lr, betas=(0.9, 0.999))",
            0.95,
            ("--config.optimizer.b2=0.95",),
            "0.95 differs 0.999 in the quote",
        ),
        (
            "opt = AdamW(lr, betas=(0.9, 0.999))",
            0.999,
            ("--config.optimizer.b2=0.95",),
            "0.95 differs the ledger has 0.999",
        ),
    ],
)
def test_a_check_fails_at_a_missing_quote_or_another_number(checked, text, b2, words, said):
    code, out = checked(text, b2, *words)
    assert code == 1 and said in out


@pytest.mark.slow
def test_a_file_that_cannot_be_read_fails_the_check(checked, tmp_path):
    (tmp_path / "others").mkdir()
    code, said = checked("", 0.999, f"--copies={tmp_path}/others")
    assert code == 1 and "optimizer.b1 0.9 unavailable there is no " in said
