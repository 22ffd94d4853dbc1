"""Tests that the report of a prepared corpus has a table, a JSON file and a plot."""

import json
import types

import pytest

from pretrainax.config import Experiment
from pretrainax.data.inspection.corpus_report import write_report
from pretrainax.data.preparation.prepare import Prepared, prepare
from pretrainax.data.sources import JsonLines
from pretrainax.tokenization import Characters
from tests.support import tiny


def prepared(tmp_path) -> Prepared:
    for name, texts in (("train", ["ab", "ab", "abc" * 40, " "]), ("valid", ["ab", "c"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made: Experiment = tiny.get_config("gpt")
    made.tokenizer, made.data.cache_dir = Characters(), str(tmp_path / "cache")
    made.data.source = JsonLines(str(tmp_path / "train.jsonl"), valid_path=str(tmp_path / "valid.jsonl"))
    return prepare(made, report=lambda line: None)


@pytest.mark.slow
def test_report_of_a_prepared_corpus(tmp_path):
    table = write_report(prepared(tmp_path), str(tmp_path / "report"))
    assert (tmp_path / "report" / "corpus.md").read_text() == table
    figures = json.loads((tmp_path / "report" / "corpus.json").read_text())
    train, valid = figures["train"], figures["valid"]
    assert (train["documents"], train["tokens"], train["bytes"]) == (3, 3 + 3 + 121, 124)
    assert train["duplicates"] == 1 and train["skipped"] == {"empty documents": 1}
    assert (train["pieces"], train["pieces_used"]) == (4, 3)  # The space is only in the skipped document.
    assert valid["in_earlier_splits"] == {"train": 1}
    assert (tmp_path / "report" / "corpus.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_components_of_a_mixture_are_numbered(tmp_path):
    one = prepared(tmp_path)
    both = types.SimpleNamespace(tokenizer=one.tokenizer, train=one.train * 2, valid=one.valid)
    write_report(both, str(tmp_path / "report"))
    figures = json.loads((tmp_path / "report" / "corpus.json").read_text())
    assert list(figures) == ["train 1", "train 2", "valid"]
    assert figures["train 2"]["in_earlier_splits"] == {"train 1": 3}
