"""Tests that labels are inferred from the training records, in a stable order, for every type of label."""

import itertools
import random
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from pretrainax.config import UserError, dump, load
from pretrainax.config import config_file as config_files
from pretrainax.config.validation import complete, validate
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import ConllFiles, Csv, JsonLines, Parquet, Tsv
from pretrainax.tasks import Chunks, Classification, TextGeneration, TokenClassification
from pretrainax.tasks.labels import label_name, label_number, sorted_labels
from pretrainax.tokenization import Characters
from tests.support import tiny
from tests.support.reading import write_lines


def lines(folder, labels, name="train", field="label"):
    """Writes a JSON Lines file with one record for each label."""
    return write_lines(folder / f"{name}.jsonl", [{"text": f"text {i}", field: x} for i, x in enumerate(labels)])


def experiment_of(source, task=None, cache=None):
    experiment = tiny.get_config("bert")
    experiment.model.masked_lm_head, experiment.tokenizer = False, Characters()
    experiment.objective, experiment.data.source = task or Classification(), source
    experiment.model.head = config_files.read_config_file("finetune:classification").model.head
    if isinstance(experiment.objective, TokenClassification):
        experiment.model.head = None
    experiment.data.cache_dir = str(cache)
    return experiment


def inferred(source, task=None):
    """Returns the labels of a completed and validated config; checks that the head has as many outputs."""
    experiment = experiment_of(source, task)
    complete(experiment)
    validate(experiment)
    assert experiment.model.head.num_labels == len(experiment.objective.labels)
    return experiment.objective.labels


@pytest.mark.parametrize(
    "labels, wanted",
    [
        (["b", "a", "c", "a"], ("a", "b", "c")),
        ([True, False, True], ("false", "true")),
        ([1, 0, 1], ("0", "1")),
        ([1.0, 0.0], ("0", "1")),
        (["1", "0"], ("0", "1")),
        ([1, 0.0, "1", 0], ("0", "1")),
        ([10, 9, 2, 1, 0], ("0", "1", "2", "9", "10")),
        (["10", "9", "-1", "0.5"], ("-1", "0.5", "9", "10")),
        (["10", "9", "x"], ("10", "9", "x")),
        (["5 stars", "10 stars"], ("10 stars", "5 stars")),
        (["nan", "1"], ("1", "nan")),
        (["é", "z", "Ä"], ("z", "Ä", "é")),
        ([-1, 1], ("-1", "1")),
    ],
)
def test_labels_are_those_of_the_records_in_a_stable_order(labels, wanted, tmp_path):
    path = lines(tmp_path, labels)
    assert inferred(JsonLines(path, valid_path=path)) == wanted
    task = Classification(labels=wanted)
    names = [label_name(label, "label") for label in labels]
    assert [task.labels[task.read({"text": "", "label": x}).note["label"]] for x in labels] == names


def test_the_order_does_not_depend_on_that_of_the_records(tmp_path):
    for labels in itertools.permutations(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]):
        assert sorted_labels(labels) == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    for _ in range(300):
        names = [str(random.randint(-20, 20)) for _ in range(10)]
        assert sorted_labels(names) == sorted_labels(names[::-1]) and len(sorted_labels(names)) == 10


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_tables_give_their_labels(kind, tmp_path):
    path = str(tmp_path / f"a.{kind}")
    if kind == "parquet":
        table = pyarrow.table({"text": ["a", "b", "c"], "label": [True, False, True]})
        pyarrow.parquet.write_table(table, path)
        assert inferred(Parquet(path, valid_path=path)) == ("false", "true")
        return
    (tmp_path / f"a.{kind}").write_text("text,label\na,True\nb,False\n".replace(",", "," if kind == "csv" else "\t"))
    assert inferred((Csv if kind == "csv" else Tsv)(path, valid_path=path)) == ("False", "True")


def test_lists_of_labels_are_inferred(tmp_path):
    path = lines(tmp_path, [["x", "y"], [], ["z"]])
    assert inferred(JsonLines(path, valid_path=path), Classification(multi_label=True)) == ("x", "y", "z")


def test_tags_of_words_are_inferred(tmp_path):
    (tmp_path / "a.conll").write_text("in O\nNew B-LOC\nYork I-LOC\n\nann B-PER\n")
    source = ConllFiles(str(tmp_path / "a.conll"), valid_path=str(tmp_path / "a.conll"))
    assert inferred(source, TokenClassification()) == ("O", "B-LOC", "I-LOC", "B-PER")


def test_labels_of_held_out_records_count_too(tmp_path):
    path = lines(tmp_path, [*["a", "b"] * 50, "rare"])
    for fraction in (0.001, 0.5, 0.999):  # "rare" may be in either split.
        assert inferred(JsonLines(path, valid_fraction=fraction)) == ("a", "b", "rare")


def test_a_label_in_validation_that_training_lacks_is_one_line(tmp_path):
    train, valid = lines(tmp_path, ["a", "b"]), lines(tmp_path, ["a", "c"], "valid")
    experiment = experiment_of(JsonLines(train, valid_path=valid), cache=tmp_path / "cache")
    complete(experiment)
    assert experiment.objective.labels == ("a", "b")
    said = r"valid\.jsonl:2: field 'label' holds the label 'c', allowed: a, b \(config.objective.labels\)"
    with pytest.raises(UserError, match=said) as e:
        prepare(experiment, report=lambda message: None)
    assert "\n" not in str(e.value)


def test_the_run_stores_the_labels_and_keeps_them_when_the_file_changes(tmp_path):
    path = lines(tmp_path, ["b", "a"])
    experiment = experiment_of(JsonLines(path, valid_path=path))
    complete(experiment)
    (tmp_path / "config.json").write_text(dump(experiment))
    assert "labels=('a', 'b')" in str(experiment.objective)  # the header row "objective"
    lines(tmp_path, ["b", "a", "c"])
    saved = load(str(tmp_path / "config.json"))
    complete(saved)
    assert saved.objective.labels == ("a", "b")


@pytest.mark.parametrize(
    "labels, said",
    [
        (["a", None], r"train\.jsonl:2: field 'label' holds the label None, it must be text, a whole number, true or"),
        (["a", 0.5], r"train\.jsonl:2: field 'label' holds the label 0.5, it must be text, a whole number"),
        (["a", ["b"]], r"holds the label \['b'\], it must be text"),
        (["a", {}], r"holds the label \{\}, it must be text"),
        (["a", ""], r"train\.jsonl:2: field 'label' holds an empty label"),
        (["a", float("nan")], r"holds the label nan"),
        (["a", 1e400], r"holds the label inf"),
        (["a", "a"], r"config.objective.labels is \('a',\), it must name all classes"),
        (list(range(1001)), r"field 'label' holds more than 1,000 labels in the first 1,001 records: set config.obj"),
    ],
)
def test_what_is_no_label_is_one_line(labels, said, tmp_path):
    path = lines(tmp_path, labels)
    with pytest.raises(UserError, match=said) as e:
        inferred(JsonLines(path, valid_path=path))
    assert "\n" not in str(e.value)


def test_a_field_that_records_lack_is_one_line(tmp_path):
    path = lines(tmp_path, ["a", "b"], field="lable")
    with pytest.raises(UserError, match=r"no field 'label', did you mean 'lable'.*config.objective.label_field"):
        inferred(JsonLines(path, valid_path=path))
    path = lines(tmp_path, [[], []])
    with pytest.raises(
        UserError, match="field 'label' holds no label in the records of JsonLines.*set config.objective"
    ):
        inferred(JsonLines(path, valid_path=path), Classification(multi_label=True))


def test_files_that_are_missing_are_named_and_a_plan_needs_none(tmp_path):
    experiment = experiment_of(JsonLines(str(tmp_path / "none.jsonl")))
    complete(experiment)
    with pytest.raises(UserError, match=r"config.data.source.path is '.*none.jsonl', which does not exist"):
        validate(experiment)
    validate(experiment, files=False)
    assert experiment.model.head.num_labels == 2 and experiment.objective.labels == ()


def test_broken_records_are_shown_by_the_preparation_alone(tmp_path, capsys):
    path = write_lines(tmp_path / "a.jsonl", ["{\n", {"text": "a", "label": 0}, {"text": "b", "label": 1}])
    assert inferred(JsonLines(path, valid_path=path, on_error="skip")) == ("0", "1")
    assert capsys.readouterr().err == ""


# --- given labels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels, values",
    [
        (("false", "true"), [False, "false", np.bool_(False)]),
        (("False", "True"), [False, "False"]),
        (("0", "1"), [False, 0, 0.0, "0", np.int64(0), np.float32(0), b"0"]),
        (("bad", "good"), [0, 0.0, "0", "bad", np.int8(0)]),
    ],
)
def test_each_type_of_a_label_finds_its_name(labels, values):
    assert {label_number(value, "label", labels) for value in values} == {0}


@pytest.mark.parametrize("labels", [("1.0", "2.0", "3.0"), ("-2", "-1"), ("4.5", "5.5"), ("v1", "2.1")])
def test_a_number_that_is_no_name_is_no_index_if_names_are_numbers(labels):
    for value in (0, "1"):
        with pytest.raises(ValueError, match=f"field 'label' holds the label {value!r}"):
            label_number(value, "label", labels)


@pytest.mark.parametrize("value", [True, 2, 2.0, -1, -1.0, 0.5, None, float("inf"), [], "b", ""])
def test_other_values_are_no_label(value):
    with pytest.raises(ValueError, match="field 'label' holds the label"):
        label_number(value, "label", ("bad", "good"))


def test_targets_of_generation_may_be_truth_values():
    task = TextGeneration(input="{text}", target_field="label", labels=("false", "true"))
    assert task.read({"text": "a", "label": True}).texts[-1] == "true"


@pytest.mark.parametrize("chunks", [None, Chunks(max_windows=2, stride=4)])
def test_each_half_of_a_validation_has_the_metrics_of_its_records(chunks):
    """Seven records in batches of two have halves of four and three records. Windows of one record stay together."""
    answers, notes = np.eye(2)[[0, 1, 1, 0, 1, 1, 1]], [{"label": label} for label in (0, 1, 0, 0, 1, 0, 1)]
    experiment = tiny.get_config("bert")
    experiment.evaluate.halves, experiment.train.global_batch_size = True, 2
    task = Classification(labels=("0", "1"), chunks=chunks)
    task.combine_windows = lambda answers, notes: (answers, notes)
    validation = types.SimpleNamespace(predict=lambda params: ({}, answers, notes))
    found = task.validate(types.SimpleNamespace(experiment=experiment, validation=validation), None)
    assert found["accuracy"] == 5 / 7 and task.has_halves("accuracy") is (chunks is None)
    halves = {name: value for name, value in found.items() if name.startswith("accuracy/")}
    assert halves == ({} if chunks else {"accuracy/half=1": 3 / 4, "accuracy/half=2": 2 / 3})
