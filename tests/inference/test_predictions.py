"""A model with a task head predicts records in their order, independently of other records, a few at a time."""

import dataclasses
import types

import jax
import numpy as np
import pytest

import pretrainax
from pretrainax.adapt import LoRA, PrefixTuning, PromptTuning
from pretrainax.config import Classify, Diverged, Extract, MeshConfig, Tag, UserError
from pretrainax.inference import predictions
from pretrainax.inference.predictions import predict, task_of, task_outputs
from pretrainax.sharding.mesh import make_mesh
from pretrainax.tasks import Chunks, Classification
from tests.support.classifiers import with_head
from tests.support.huggingface_weights import write_directory

TEXTS = ["a cat", "the dog sat, the cat ran.", "x", "a" * 60, "the end of it all"] * 3


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return pretrainax.load(write_directory(tmp_path_factory.mktemp("answers") / "bert", with_head("bert")))


def said(loaded, **options):
    return list(predict(loaded, task_of(loaded), ({"text": text} for text in TEXTS), **options))


@pytest.mark.slow
def test_records_are_answered_in_order_whatever_is_beside_them(loaded):
    together = said(loaded)
    alone = [loaded.predict([text])[0] for text in TEXTS[:4]]
    few = said(loaded, batch_size=2)
    assert len(together) == len(few) == len(TEXTS)
    for a, b in [*zip(together, few, strict=True), *zip(together, alone, strict=False)]:
        assert a["prediction"] == b["prediction"]
        assert a["probabilities"] == pytest.approx(b["probabilities"], abs=1e-5)
        assert sum(a["probabilities"].values()) == pytest.approx(1.0, abs=1e-5)
    assert len({said["probabilities"]["LABEL_0"] for said in together}) == 5


def test_it_is_what_the_head_says_of_a_batch(loaded):
    texts = ["a cat", "x", "the end of it all"]
    outputs = loaded(loaded.encode(texts))
    logits = np.asarray(outputs.heads["classify"].logits)
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for said, row in zip(loaded.predict(texts), expected, strict=True):
        np.testing.assert_allclose(list(said["probabilities"].values()), row, atol=1e-5)


def test_windows_line_ends_change_no_answer(loaded):
    """Training replaces these line ends; the tokenizer would encode a carriage return as an unknown character."""
    windows, unix = loaded.predict(["a cat\r\nthe dog", "a cat\nthe dog"])
    assert windows["probabilities"] == pytest.approx(unix["probabilities"], abs=1e-6)


def test_rows_are_as_many_as_the_devices_divide_and_few_numbers_of_them(loaded):
    """Each number of rows needs a compilation. Repeated rows serve as padding, and their predictions are dropped."""
    asked, (one, eight) = [], (make_mesh(MeshConfig(data=n), jax.devices()[:n]) for n in (1, 8))

    def compute(function, batch):
        asked.append(len(batch["tokens"]))
        return {"rows": np.arange(asked[-1])}

    for mesh, sizes in ((one, {1, 2, 4, 8, 16}), (eight, {8, 16})):
        faked = types.SimpleNamespace(mesh=mesh, tokenizer=loaded.tokenizer, compute=compute)
        for count in range(1, 17):
            example = {"tokens": np.ones(3, np.int32), "segment_ids": np.ones(3, np.int32)}
            example["positions"] = np.arange(3, dtype=np.int32)
            assert predictions._run_head(faked, [example] * count, 16, 8)["rows"].tolist() == list(range(count))
        assert set(asked) == sizes
        asked.clear()


def test_records_are_taken_as_they_are_needed(loaded):
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield {"text": TEXTS[taken % 3]}

    answers = predict(loaded, task_of(loaded), endless(), batch_size=2)
    for _ in range(40):
        next(answers)
    assert taken <= 64


def test_a_long_record_is_one_answer_joined_of_its_windows(loaded):
    experiment = dataclasses.replace(loaded.experiment)
    experiment.data = dataclasses.replace(experiment.data, sequence_length=16)
    labels = loaded.experiment.objective.labels
    experiment.objective = Classification(labels=labels)
    cut = list(
        task_outputs(
            loaded, task_of(loaded, experiment), map(task_of(loaded).read_unlabeled, ({"text": t} for t in TEXTS))
        )
    )
    assert [each.is_cut for each in cut] == [len(text) > 14 for text in TEXTS]
    experiment.objective = Classification(labels=labels, chunks=Chunks(stride=7))
    task = task_of(loaded, experiment)
    whole = list(task_outputs(loaded, task, map(task.read_unlabeled, ({"text": t} for t in TEXTS)), batch_size=3))
    assert not any(each.is_cut for each in whole)
    assert [len(each.notes) for each in whole[:4]] == [1, 3, 1, 8]
    by_hand = loaded.predict([TEXTS[3][:14]])[0]["probabilities"]  # all windows are equal except for the last one
    assert task.prediction(whole[3].predictions, whole[3].notes)["probabilities"] == pytest.approx(by_hand, abs=1e-4)


def test_an_imported_encoder_decoder_answers_too(tmp_path):
    loaded = pretrainax.load(
        write_directory(tmp_path / "bart", with_head("bart", Classify(num_labels=1, kind="regression")))
    )
    together, alone = loaded.predict(TEXTS[:3]), loaded.predict(TEXTS[1:2])
    assert together[1]["prediction"] == pytest.approx(alone[0]["prediction"], abs=1e-5)
    assert together[0]["prediction"] != together[1]["prediction"]


ASKED = {
    "tags": (
        Tag(num_labels=3),
        {},
        [{"tokens": ["a", "cat", "ran"]}, {"tokens": "a dog sat"}],  # a text; spaces separate its words
        lambda said, record: len(said["prediction"]) == len(said["probabilities"]) == 3,
    ),
    "choice": (
        Classify(num_labels=2, kind="choice"),
        {},
        [{"context": "it rained", "question": "so", "choices": ["wet", "dry"]}] * 2,
        lambda said, record: said["prediction"] in "AB" and len(said["probabilities"]) == 2,
    ),
    "answers": (
        Extract(),
        {"max_question_length": 4, "stride": 4},
        [{"question": "who", "context": "the cat"}, {"question": "ran", "context": "no dog and no cat ran. " * 3}],
        lambda said, record: said["prediction"] in record["context"],
    ),
}


@pytest.mark.first(2)
@pytest.mark.parametrize("name", ASKED)
def test_other_heads_answer_records_too(name, tmp_path):
    head, fields, records, is_good = ASKED[name]
    loaded = pretrainax.load(write_directory(tmp_path / name, with_head("bert", head)))
    vars(loaded.experiment.objective).update(fields)
    said = loaded.predict(records)
    assert all(map(is_good, said, records)), said


@pytest.mark.parametrize("tuning", (PromptTuning(4), PrefixTuning(4)))
def test_longer_rows_leave_room_for_what_a_tuning_puts_before_the_text(loaded, tuning):
    """The model would read a position after the last one as the last one."""
    most, data = loaded.experiment.model.position.max_length, loaded.experiment.data
    for before, room in ((tuning, most - 4), (LoRA(), most), (None, most)):
        experiment = dataclasses.replace(loaded.experiment, tuning=before)
        experiment.data = dataclasses.replace(data, sequence_length=room)
        assert task_of(loaded, experiment).longest == room
        experiment.data = dataclasses.replace(data, sequence_length=room + 1)
        with pytest.raises(UserError, match=f"sequence_length {room + 1} .*max_length (has room for|is) {room}"):
            task_of(loaded, experiment)


def test_what_cannot_be_asked_is_one_line(loaded, tmp_path):
    with pytest.raises(UserError, match="a record is invalid: no field 'text', did you mean 'txt'"):
        loaded.predict([{"txt": "a"}])
    for record in ("a text", {"text": "a"}):  # not one record for each character or field
        with pytest.raises(UserError, match=r"records is one record, it must be a list of records: write \[record\]"):
            loaded.predict(record)
    for size in (0, 2.0):
        with pytest.raises(UserError, match=f"batch_size is {size}, it must be a whole number from 1"):
            loaded.predict(["a"], batch_size=size)
    with pytest.raises(UserError, match=r"a record is \('a', 'b'\), it must be a string or a dict of fields"):
        loaded.predict([("a", "b")])
    language_model = pretrainax.load(write_directory(tmp_path / "bert", "bert"))
    with pytest.raises(UserError, match="has no head of a task.*--config=finetune:TASK"):
        language_model.predict(["a"])
    for ask in (loaded.generate, loaded.score):  # also in an encoder, whose masks and likelihoods need another head
        with pytest.raises(UserError, match="no language-model head: .*; it supports predict and evaluate"):
            ask(["a"])
    diverged = dataclasses.replace(loaded, params=jax.tree.map(lambda x: np.full_like(x, np.nan), loaded.params))
    with pytest.raises(Diverged, match=r"outputs of its task head are not numbers \(NaN\); did the run diverge"):
        diverged.predict(["a"])
    experiment = dataclasses.replace(loaded.experiment, objective=Classification(labels=("a", "b")))
    with pytest.raises(UserError, match="Classification of 2 labels needs Classify"):
        task_of(loaded, experiment)
