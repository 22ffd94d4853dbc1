"""Tests that datatrove's rules and signatures drop the right documents, and that a counter has each drop."""

import collections
import random

import pytest

from pretrainax.data.preparation import filters, shards
from pretrainax.data.preparation.filters import NearDuplicates, QualityFilter

GOOD = (
    "The ship of the old captain went out of the harbour in the morning and came back with the fish that the people "
    "of the town had been waiting for. She was small, but she had a crew of good men who knew the sea and its ways. "
    "When the wind came from the north they would sing, and you could hear them from the hills above the bay."
)


@pytest.fixture(autouse=True)
def datatrove():
    for name in ("datatrove", "spacy"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'pretrainax[filters]'")


def judge(rules, documents):
    skipped = collections.Counter()
    return list(rules.filter(iter(documents), skipped)), skipped


@pytest.mark.slow
def test_text_is_kept_and_what_is_none_is_counted_by_its_rule():
    documents = [GOOD, "too short", "a line of the text\n" * 60, bytearray(GOOD.encode()), "# " * 200 + GOOD]
    kept, skipped = judge(QualityFilter(), documents)
    assert kept == [GOOD, bytearray(GOOD.encode())]
    assert skipped == {"documents by top_2_gram": 2, "documents by dup_line_frac": 1}


@pytest.mark.parametrize(
    ("rule", "text", "reason"),
    [
        ("c4", "lorem ipsum " + GOOD, "lorem_ipsum"),
        ("fineweb", "word\n" * 20, "char_dup_ratio|short_line_ratio|line_punct_ratio"),
        ("gopher_quality", GOOD.replace("e", "#"), "gopher"),
        ("gopher_repetition", "the same line\n" * 20, "dup_line_frac|duplicated_line|dup"),
    ],
)
def test_each_rule_can_be_had_alone(rule, text, reason):
    none = dict.fromkeys(("gopher_repetition", "gopher_quality", "c4", "fineweb"), False)
    _, skipped = judge(QualityFilter(**none | {rule: True}), [text])
    (name,) = skipped
    assert any(part in name for part in reason.split("|")), name


def test_very_long_document_is_judged_by_its_beginning(monkeypatch):
    monkeypatch.setattr(shards, "BATCH", len(GOOD) + 10)
    assert judge(QualityFilter(), [GOOD + " ###" * 1000])[1] == {}


def sign_and_find(directory, rules, lists):
    for i, documents in enumerate(lists):
        rules.sign(iter(documents), str(directory), i)
    return [numbers.tolist() for numbers in rules.find(str(directory), len(lists))]


def text_of(seed, words=300):
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(words))


def test_nearly_equal_documents_are_found_across_shards_and_the_first_stays(tmp_path):
    changed = text_of(1).split()
    # 5 of 300 n-grams differ: similarity 0.97, detected with probability 1 - (1 - 0.97^8)^14 > 1 - 1e-9.
    changed[150] = "another"
    lists = [[text_of(0), text_of(1)], ["short", text_of(2)], [" ".join(changed), text_of(3), text_of(0)]]
    assert sign_and_find(tmp_path, NearDuplicates(), lists) == [[], [], [0, 2]]


def test_different_documents_are_no_near_duplicates(tmp_path):
    assert sign_and_find(tmp_path, NearDuplicates(), [[text_of(i) for i in range(20)], []]) == [[], []]


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(filters, "_REQUIRED_PACKAGES", ("no_such_package",))
    (problem,) = QualityFilter().problems(None)
    assert problem == "config.data.quality needs the package no-such-package: pip install 'pretrainax[filters]'"


def test_fields_out_of_range_are_named():
    (problem,) = NearDuplicates(ngram=0).problems(None)
    assert problem == "config.data.near_duplicates.ngram is 0, it must be at least 1"
    (problem,) = QualityFilter(language="xx").problems(None)
    assert problem.startswith("config.data.quality.language is 'xx': datatrove has no word tokenizer for it")
    (problem,) = QualityFilter(gopher_repetition=False, gopher_quality=False).problems(None)
    assert problem.startswith("config.data.quality enables no rules")
