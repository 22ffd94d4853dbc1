"""Tests that SQuAD's released files give one record per question, and that errors locate broken records."""

import collections
import gzip
import json

import pytest

from pretrainax.config import UserError
from pretrainax.data.sources import SquadFiles
from pretrainax.tasks import ExtractiveQA

ANSWER = {"text": "cold", "answer_start": 7}


def file_of(*answers: list, version: str = "v2.0") -> str:
    asked = [{"id": f"q{i}", "question": f"Why {i}?", "answers": found} for i, found in enumerate(answers)]
    paragraphs = [{"context": "It was cold.", "qas": asked[:1]}, {"context": "Or cold.", "qas": asked[1:]}]
    return json.dumps({"version": version, "data": [{"title": "T", "paragraphs": paragraphs}]})


def read(path, task):
    source = SquadFiles(path=str(path), valid_path=str(path)).reading(task)
    return [record for shard in source.shards("train") for record in source.read(shard, collections.Counter())]


@pytest.mark.parametrize("opened", [open, gzip.open])
def test_each_question_is_a_record(opened, tmp_path):
    path = tmp_path / ("dev.json" if opened is open else "dev.json.gz")
    with opened(path, "wt") as f:
        f.write(file_of([ANSWER], [], [{"text": "Or", "answer_start": 0}]))
    found = read(path, ExtractiveQA(no_answer=True))
    assert [record.texts for record in found] == [
        *(("Why 0?", "It was cold."), ("Why 1?", "Or cold."), ("Why 2?", "Or cold."))
    ]
    assert [record.note["answers"] for record in found] == [["cold"], [], ["Or"]]


def test_a_folder_is_one_line(tmp_path):
    (tmp_path / "a.json").write_text(file_of([ANSWER]))
    with pytest.raises(UserError, match=r"\.path is the folder '.*', it must be a file or a glob"):
        read(tmp_path, ExtractiveQA())


def test_a_broken_question_is_named(tmp_path):
    (tmp_path / "a.json").write_text(file_of([ANSWER], [ANSWER]))
    with pytest.raises(UserError, match=r"a.json, question 'q1': the answer 'cold' is not at character 7 .* at 3"):
        read(tmp_path / "a.json", ExtractiveQA())


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"data": [{}]}', '{"data": 3}', '{"data": [{"paragraphs": [3]}]}']
)
def test_another_file_is_one_line(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match="a.json: not a SQuAD file.*use JsonLines"):
        read(tmp_path / "a.json", ExtractiveQA())
