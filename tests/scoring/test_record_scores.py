"""Tests the scores of a task on a source: they include the records that the task reads, and it counts skipped ones."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

import pretrainax
from pretrainax.config import Extract, UserError
from pretrainax.data.sources import JsonLines
from pretrainax.data.sources.base import Record
from pretrainax.evaluation import own_validation
from pretrainax.scoring.record_scores import record_estimates, score_records
from pretrainax.scoring.results import ratio
from pretrainax.tasks import Chunks, Classification, ExtractiveQA
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


def logits_and_labels(records):
    rng = np.random.default_rng(0)
    return rng.normal(size=(records, 2)), [{"label": int(label)} for label in rng.integers(0, 2, records)]


def test_records_of_a_group_are_not_independent():
    """40 records in 10 groups of equal records have the same standard error as one record of each group."""
    task, (logits, notes) = Classification(labels=("a", "b")), logits_and_labels(10)
    once = record_estimates(task, list(logits[:, None]), [[note] for note in notes], np.arange(10))
    rows = np.tile(np.arange(10), 4)
    assert record_estimates(task, list(logits[rows, None]), [[notes[i]] for i in rows], rows) == once
    assert once["accuracy"].standard_error > 0


@pytest.mark.parametrize("grouped", [False, True], ids=["source changed", "passages"])
def test_the_error_of_the_loss_counts_records_or_their_groups_and_not_windows(grouped, monkeypatch):
    task, (logits, notes) = Classification(labels=("a", "b"), chunks=Chunks()), logits_and_labels(12)
    notes = [note | {"window": window} for note in notes for window in range(5)]
    passages = [f"passage {i // 3}" for i in range(12)]

    def records_of_rows(*_):
        if not grouped:
            raise UserError("config.data.source lacks the validation records")
        return [Record((passage, "question"), {}) for passage in passages]

    monkeypatch.setattr(own_validation, "records_of_rows", records_of_rows)
    run = SimpleNamespace(
        experiment=SimpleNamespace(validation_objective=task),
        validation=SimpleNamespace(valid_batches=SimpleNamespace(streams=[SimpleNamespace(objective=task)])),
    )
    found = own_validation._Estimates(run).of(run, None, ({}, np.repeat(logits, 5, axis=0), notes))
    losses = task.document_losses(np.repeat(logits, 5, axis=0), notes)
    clusters = np.repeat(np.arange(12) // 3 if grouped else np.arange(12), 5)
    assert found["loss"] == ratio(losses, np.ones(60), clusters, "records")
    assert found["loss"].standard_error > 1.5 * ratio(losses, np.ones(60)).standard_error
