"""Tests PythonDocs, this machine's documentation as a source, and the behavior that all sources share."""

import collections
import dataclasses
import json
import pickle
import subprocess
import sys

import pytest

from pretrainax.config import Choice, from_json, to_json
from pretrainax.data import sources
from pretrainax.data.sources import (
    TFDS,
    ArrayRecord,
    ConllFiles,
    Csv,
    HuggingFace,
    JsonLines,
    Parquet,
    PythonDocs,
    SourceMixture,
    SquadFiles,
    TextFiles,
    Tsv,
)
from tests.support.reading import write_lines

# --- PythonDocs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def docs():
    """Returns the modules of both splits by name."""
    modules = {m.name: m for split in ("train", "valid") for shard in PythonDocs().shards(split) for m in shard}
    return modules


@pytest.mark.slow
def test_python_docs_covers_the_library_and_the_packages(docs):
    assert {"json.decoder", "pydoc_data.topics", "numpy.linalg", "scipy.stats", "jax", "flax.core", "optax"} <= set(
        docs
    )


def test_python_docs_leaves_tests_out(docs):
    parts = {part for name in docs for part in name.split(".")}
    assert not parts & {"test", "tests", "conftest", "idle_test", "site-packages"}


def test_python_docs_gives_names_and_docstrings(docs):
    (text,) = PythonDocs().read([docs["json.decoder"]], collections.Counter())
    assert "json.decoder.JSONDecoder.raw_decode\n\nDecode a JSON document from" in text


def test_python_docs_gives_each_topic_of_the_language_reference(docs):
    topics = list(PythonDocs().read([docs["pydoc_data.topics"]], collections.Counter()))
    assert len(topics) > 50 and any(topic.startswith('The "while" statement') for topic in topics)


def test_python_docs_validation_is_about_three_percent_of_the_modules(docs):
    valid = [m for shard in PythonDocs().shards("valid") for m in shard]
    assert 0.015 < len(valid) / len(docs) < 0.045  # 0.03 of 2,000 modules has a standard deviation of 0.004.


def test_python_docs_splits_share_no_module():
    train, valid = ({m.name for shard in PythonDocs().shards(s) for m in shard} for s in ("train", "valid"))
    assert not train & valid


def test_python_docs_order_is_fixed():
    assert PythonDocs().shards("train") == PythonDocs().shards("train")


def test_python_docs_counts_a_module_that_does_not_parse(tmp_path):
    broken, good = tmp_path / "a.py", tmp_path / "b.py"
    broken.write_text("print 'no'")
    good.write_text('"""Good."""')
    skipped = collections.Counter()
    shard = [sources.Module("a", str(broken)), sources.Module("b", str(good))]
    assert list(PythonDocs().read(shard, skipped)) == ["b\n\nGood."]
    assert skipped == {"modules that do not parse": 1}


def test_python_docs_runs_nothing_of_what_it_reads(tmp_path):
    module = tmp_path / "a.py"
    module.write_text('"""Doc."""\nraise SystemExit(3)')
    assert list(PythonDocs().read([sources.Module("a", str(module))], collections.Counter())) == ["a\n\nDoc."]


def test_python_docs_survives_a_lone_surrogate(tmp_path):
    module = tmp_path / "a.py"
    module.write_text('"""Doc \\ud800."""')
    assert list(PythonDocs().read([sources.Module("a", str(module))], collections.Counter())) == ["a\n\nDoc ?."]


# --- all -----------------------------------------------------------------------------------------------------------


EVERY = [
    TFDS("wmt14_translate/de-en", text_field="en", target_field="de"),
    ArrayRecord("a", text_field="text"),
    ConllFiles("a", tag_column=3),
    Csv("a", columns=("text", "label"), delimiter=";"),
    HuggingFace("json", data_files=("a.jsonl",), streaming=True),
    JsonLines("a", prefix="summarize: ", target_field="summary"),
    Parquet("a", on_error="skip"),
    PythonDocs(),
    SourceMixture((PythonDocs(), Parquet("a")), weights=(1.0, 2.0)),
    SquadFiles("a.json", valid_path="b.json"),
    TextFiles("a"),
    Tsv("a", quoting=True),
]


@pytest.mark.parametrize("source", EVERY, ids=lambda source: type(source).__name__)
def test_source_goes_through_json_and_a_flag(source):
    assert from_json(Choice, json.loads(json.dumps(to_json(source)))) == source
    assert Choice.parse(repr(source)) == source


def test_every_source_is_there():
    assert {type(source) for source in EVERY} == {getattr(sources, name) for name in sources.__all__} - {
        sources.Source,
        sources.Module,
        sources.NoSource,
    }


RECORDS = [
    source
    for source in EVERY
    if isinstance(source, (TFDS, HuggingFace, ArrayRecord, ConllFiles, JsonLines, Parquet, SquadFiles, Tsv))
]


@pytest.mark.parametrize("source", RECORDS, ids=lambda source: type(source).__name__)
def test_fields_of_records_are_checked(source):
    broken = dataclasses.replace(source, on_error="skipp", valid_fraction=1.0)
    problems = list(broken.problems(None))
    assert "config.data.source.on_error is 'skipp', did you mean 'skip'?" in problems
    assert "config.data.source.valid_fraction is 1.0, it must be between 0 and 1" in problems


def test_shards_pickle(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    (tmp_path / "a.txt").write_text("x" * 100)
    for source in (PythonDocs(), JsonLines(path), TextFiles(str(tmp_path))):
        shards = source.shards("train")
        assert pickle.loads(pickle.dumps(shards)) == shards


def test_sources_import_nothing_heavy():
    heavy = ("jax", "flax", "optax", "tensorflow_datasets", "datasets", "pyarrow", "array_record", "zstandard", "torch")
    code = f"import sys, pretrainax.prepare; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
