"""The figures of a task on a source are those of the records that it reads: what it leaves out is counted."""

import dataclasses
import json

import pytest

import pretrainax
from pretrainax.config import Extract, UserError
from pretrainax.data.sources import JsonLines
from pretrainax.scoring.record_scores import score_records
from pretrainax.tasks import ExtractiveQA
from pretrainax.tasks.extractive_qa import LEFT_OUT, WRONG
from tests.support.classifiers import with_head
from tests.support.huggingface_weights import write_directory


def asked(*answers):
    spans = {"text": [text for text, _ in answers], "answer_start": [start for _, start in answers]}
    return {"question": "who", "context": "the cat ran", "answers": spans}


RIGHT, MENDED, WRONGLY = asked(("cat", 4)), asked(("cat", 4), ("cat", 5)), asked(("cat", 5))


def source(folder, name, *records):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return JsonLines(path=str(path), valid_path=str(path))


@pytest.mark.slow
def test_answers_that_are_not_where_they_should_be_are_left_out_and_counted(tmp_path):
    loaded = pretrainax.load(write_directory(tmp_path / "bert", with_head("bert", Extract())))
    task = ExtractiveQA(wrong_answers="skip", max_question_length=4, stride=4)
    experiment = dataclasses.replace(loaded.experiment, objective=task)
    found = score_records(loaded, experiment, source(tmp_path, "some", RIGHT, WRONGLY, MENDED))
    good = score_records(loaded, experiment, source(tmp_path, "good", RIGHT, RIGHT))
    assert [(of.measure, of.value) for of in found] == [(of.measure, of.value) for of in good] and len(found) == 2
    assert found[0].counts == {"records": 2, f"{WRONG} skipped": 2, f"{LEFT_OUT} skipped": 1}
    with pytest.raises(UserError, match=f"holds no record .*1 {LEFT_OUT}"):
        score_records(loaded, experiment, source(tmp_path, "none", WRONGLY))
    experiment.objective = dataclasses.replace(task, wrong_answers="refuse")
    with pytest.raises(UserError, match="the answer 'cat' is not at character 5"):
        score_records(loaded, experiment, source(tmp_path, "some", RIGHT, WRONGLY, MENDED))
