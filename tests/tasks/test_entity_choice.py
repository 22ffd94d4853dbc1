"""Tests entity choice: one example per entity, and metrics of the likeliest entity of a record."""

import dataclasses

import numpy as np
import pytest

from pretrainax.tasks import EntityChoice
from pretrainax.tasks.entity_choice import plain
from pretrainax.tokenization import WordPiece

RECORD = {
    "passage": "ann met bo .",
    "query": "later @placeholder left .",
    "entities": ["ann", "bo", "ann"],
    "answers": ["bo", "cid"],
}


@pytest.fixture(scope="module")
def tokenizer():
    return WordPiece(vocab_size=36).build(iter(["ann met bo . later ann left . later bo left ."] * 20))


def test_a_record_becomes_an_example_for_each_entity(tokenizer):
    task = EntityChoice()
    found = list(task.encode(task.read(RECORD), tokenizer))
    assert [tokenizer.decode(one.parts[1]) for one in found] == ["later ann left.", "later bo left."]
    assert all(tokenizer.decode(one.parts[0]) == "ann met bo." for one in found)
    shared = {"answers": ["bo", "cid"]}
    assert [one.note for one in found] == [
        {"window": 0, "entity": "ann", "label": 0, **shared},
        {"window": 1, "entity": "bo", "label": 1, **shared},
    ]


def test_a_record_without_answers_is_asked(tokenizer):
    task = EntityChoice()
    asked = task.read_unlabeled({name: value for name, value in RECORD.items() if name != "answers"})
    assert [one.note for one in task.encode(asked, tokenizer)] == [
        {"window": 0, "entity": "ann"},
        {"window": 1, "entity": "bo"},
    ]


def test_figures_are_of_the_likeliest_entity_of_a_record():
    notes = [  # a record of three entities and a record of two
        *({"window": i, "entity": e, "answers": ["The Ann"]} for i, e in enumerate(["bo", "Ann", "cid"])),
        *({"window": i, "entity": e, "answers": ["old bo", "cid"]} for i, e in enumerate(["bo", "dan"])),
    ]
    # The scores of the first record are -1, 2, 1, so it predicts "Ann", which is right except for an article. The
    # scores of the second record are 0.5 and -3, so it predicts "bo", with F1 2/3.
    said = np.array([[1.0, 0], [5, 7], [0, 1], [-0.5, 0], [3, 0]])
    found = EntityChoice().metrics(said, notes)
    assert found == pytest.approx({"exact_match": 0.5, "answer_f1": (1 + 2 / 3) / 2})
    assert tuple(found) == EntityChoice().metric_names


def test_a_prediction_names_the_likeliest_and_how_likely_each_is_to_be_right():
    notes = [{"window": i, "entity": e} for i, e in enumerate(["ann", "bo"])]
    said = EntityChoice().prediction(np.log([[0.75, 0.25], [0.5, 0.5]]), notes)
    assert said == {"prediction": "bo", "probabilities": {"ann": 0.25, "bo": 0.5}}


@pytest.mark.parametrize(
    "change, line",
    [
        ({"query": "later"}, "field 'query' holds 'later', without '@placeholder' \\(config.objective.gap\\)"),
        ({"answers": ["cid"]}, "field 'answers' holds \\['cid'\\], none of which is in field 'entities'"),
        ({"entities": []}, "field 'entities' is empty"),
        ({"entities": "ann"}, "field 'entities' holds 'ann', it must be a list of texts"),
        ({"entities": ["ann", 0.5]}, "field 'entities' holds float"),
    ],
)
def test_a_record_that_is_wrong_is_one_line(change, line):
    with pytest.raises(ValueError, match=line):
        EntityChoice().read(RECORD | change)


def test_a_field_that_is_missing_is_named():
    for name in RECORD:
        with pytest.raises(ValueError, match=f"no field '{name}'.*config.objective.{name}_field"):
            EntityChoice().read({key: value for key, value in RECORD.items() if key != name})


def test_lines_of_a_summary_are_sentences():
    assert plain("It rained\n@highlight\nAnn left.\n@highlight\nBo stayed") == "It rained. Ann left. Bo stayed"


def test_a_gap_has_a_name():
    (line,) = dataclasses.replace(EntityChoice(), gap="").field_problems()
    assert "config.objective.gap is ''" in line
