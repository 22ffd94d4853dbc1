"""Tests tasks with one or two text fields: reading, examples, metrics, and invalid records."""

import json

import numpy as np
import pytest
import sklearn.metrics

from pretrainax.config import Classify, UserError
from pretrainax.config.validation import validate
from pretrainax.data.objectives import ObjectiveInput
from pretrainax.data.sources import JsonLines, TextFiles
from pretrainax.data.sources.base import Record
from pretrainax.tasks import Classification, ExtractiveQA, Instructions, Regression, TokenClassification
from pretrainax.tasks.baselines import metrics_or_nan
from pretrainax.tasks.glue import TASKS
from pretrainax.tokenization import WordPiece
from tests.support import tiny

TOKENIZER = WordPiece(vocab_size=40).build(iter(["a fine film and a dull one", "no film at all is fine"] * 20))
VOCABULARY = TOKENIZER.vocabulary


def adapted(task, variant="bert", length=16):
    experiment = tiny.get_config(variant)
    experiment.data.sequence_length, experiment.objective = length, task
    return task.adapted(experiment).bind(TOKENIZER)


def example_of(task, record):
    (encoded,) = task.encode(task.read(record), TOKENIZER)
    ends = np.cumsum([len(ids) for ids in encoded.parts])
    tokens = np.concatenate(encoded.parts)
    return task.example(ObjectiveInput(tokens, np.ones_like(tokens), ends, note=encoded.note), None, VOCABULARY)


def test_a_pair_becomes_a_row_with_its_types_and_its_label():
    task = adapted(Classification(text_field="one", pair_field="two", labels=("no", "yes")))
    found = example_of(task, {"one": "a fine film", "two": "no film", "label": "yes", "other": 3})
    a, b = (TOKENIZER.encode(text).tolist() for text in ("a fine film", "no film"))
    assert found["tokens"].tolist() == [VOCABULARY.cls, *a, VOCABULARY.sep, *b, VOCABULARY.sep]
    assert found["token_types"].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    assert found["labels"] == 1 and found["labels"].dtype == np.int32


@pytest.mark.parametrize("variant", ["bert", "gpt", "t5"])
def test_a_text_that_is_too_long_is_cut_to_the_row(variant):
    task = adapted(Classification(labels=("0", "1")), variant, length=8)
    found = example_of(task, {"text": "a fine film " * 20, "label": 0})
    assert len(found["tokens"]) == 8
    if variant == "t5":  # The decoder reads the same tokens, shifted by one.
        assert found["tokens"].tolist() == [VOCABULARY.pad, *found["encoder_tokens"][:-1].tolist()]


def test_an_empty_text_of_a_pair_is_an_empty_part():
    task = adapted(Classification(text_field="a", pair_field="b", labels=("0", "1")))
    found = example_of(task, {"a": "a fine film", "b": "", "label": 0})
    assert found["tokens"].tolist()[-2:] == [VOCABULARY.sep] * 2


def test_any_number_of_labels_are_values_of_one_and_nought():
    task = adapted(Classification(labels=("a", "b", "c"), multi_label=True))
    assert example_of(task, {"text": "fine", "label": ["c", 0]})["label_values"].tolist() == [1, 0, 1]
    assert example_of(task, {"text": "fine", "label": []})["label_values"].tolist() == [0, 0, 0]


def test_a_number_is_the_value_of_a_regression():
    assert example_of(adapted(Regression()), {"text": "fine", "label": "2.5"})["label_values"].tolist() == [2.5]


@pytest.mark.parametrize(
    "task, record, said",
    [
        (Classification(labels=("good", "bad")), {"text": "a", "label": "godo"}, "'godo', did you mean 'good'"),
        (Classification(labels=("good", "bad")), {"text": "a", "label": 2}, "label 2, allowed: bad, good"),
        (Classification(labels=("good", "bad")), {"text": "a", "label": -1}, "the label -1"),
        (Classification(labels=("good", "bad")), {"text": "a", "label": True}, "the label True"),
        (Classification(labels=("good", "bad")), {"text": "a", "label": None}, "the label None"),
        (Classification(labels=("a", "b")), {"text": "a"}, "no field 'label'.*config.objective.label_field"),
        (Classification(labels=("a", "b")), {"txt": "a", "label": "a"}, "no field 'text', did you mean 'txt'"),
        (Classification(labels=("a", "b"), pair_field="other"), {"text": "a", "label": "a"}, "no field 'other'"),
        (Classification(labels=("a", "b")), {"text": 1.5, "label": "a"}, "field 'text' holds float"),
        (Classification(labels=("a", "b"), multi_label=True), {"text": "a", "label": "a"}, "it must be a list"),
        (Classification(labels=("a", "b"), multi_label=True), {"text": "a", "label": ["x"]}, "the label 'x'"),
        (Regression(low=0.0, high=5.0), {"text": "a", "label": 5.5}, "holds 5.5.* 0.0 and 5.0"),
        (Regression(), {"text": "a", "label": "much"}, "'much', it must be a number"),
        (Regression(), {"text": "a", "label": float("nan")}, "it must be a number"),
        (Regression(), {"text": "a", "label": 10**400}, "it must be a number"),
    ],
)
def test_a_broken_record_says_what_is_wrong_with_it(task, record, said):
    with pytest.raises(ValueError, match=said):
        task.read(record)


@pytest.mark.parametrize("value, label", [(0, 1), ("1", 0), ("bad", 0), ("2", None), (2, None)])
def test_numbers_of_records_may_mean_labels_in_another_order(value, label):
    task = Classification(labels=("bad", "good"), numbered=("good", "bad"))
    if label is None:
        with pytest.raises(ValueError, match="allowed: bad, good"):
            task.read({"text": "a", "label": value})
    else:
        assert task.read({"text": "a", "label": value}).note == {"label": label}
    assert Classification(labels=("1", "0")).read({"text": "a", "label": "1"}).note == {"label": 0}  # a name


# --- without a label --------------------------------------------------------------------------------------------------

TASKS_OF_TEXTS = [
    Classification(labels=("a", "b")),
    Classification(labels=("a", "b"), multi_label=True, pair_field="other"),
    Regression(low=0.0),
]


@pytest.mark.parametrize("task", TASKS_OF_TEXTS, ids=lambda task: task.kind)
def test_a_record_without_a_label_is_the_same_row_without_one(task):
    record = {"text": "a fine film", "other": "no film"}
    answer = [] if task.kind == "multi" else 1
    task = adapted(task)
    whole = example_of(task, record | {"label": answer})
    for fields in (record, record | {"label": "nonsense"}):  # The label is ignored.
        asked = task.read_unlabeled(fields)
        (encoded,) = task.encode(asked, TOKENIZER)
        tokens, ends = np.concatenate(encoded.parts), np.cumsum([len(ids) for ids in encoded.parts])
        example = task.example(ObjectiveInput(tokens, np.ones_like(tokens), ends, note=encoded.note), None, VOCABULARY)
        assert whole.keys() - example.keys() in ({"labels"}, {"label_values"})
        assert all((example[name] == whole[name]).all() for name in example)
    with pytest.raises(ValueError, match="no field 'text'"):
        task.read_unlabeled({"label": answer, "other": "x"})


def test_what_is_said_of_a_record():
    one, several, number = (task.prediction for task in TASKS_OF_TEXTS)
    assert one(np.array([[0.0, np.log(3)]]), [{}]) == {"prediction": "b", "probabilities": {"a": 0.25, "b": 0.75}}
    said = several(np.array([[np.log(3), 0.0]]), [{}])
    assert said == {"prediction": ["a"], "probabilities": {"a": 0.75, "b": 0.5}}
    assert number(np.array([[2.5]], np.float32), [{}]) == {"prediction": 2.5}


def test_a_text_that_loses_its_end_is_told():
    task = adapted(Classification(labels=("a", "b")), length=8)
    for text, is_cut in (("a film", False), ("a film " * 9, True)):
        (encoded,) = task.encode(task.read_unlabeled({"text": text}), TOKENIZER)
        assert task.is_cut(encoded) is is_cut


def test_the_source_adds_file_and_line_or_counts(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "a", "label": "good"}\n{"text": "b", "label": "goood"}\n')
    source = JsonLines(path=str(path), valid_path=str(path))
    task = Classification(labels=("good", "bad"))
    with pytest.raises(UserError, match=r"records.jsonl:2: .*'goood', did you mean 'good'.*on_error='skip'"):
        list(read(source.reading(task)))
    skipped = {}
    source.on_error = "skip"
    assert list(read(source.reading(task), skipped)) == [Record(("a",), {"label": 0})]
    assert skipped == {"broken lines": 1}


def test_records_that_share_a_passage_are_in_one_split_and_those_that_share_a_system_message_are_not(tmp_path):
    passages = [f"passage {i} of Rome" for i in range(20)]
    answer = {"text": ["Rome"], "answer_start": [len("passage 10 of ")]}
    questions = [
        {"question": f"{n} {i}?", "context": passage, "answers": answer}
        for i, passage in enumerate(passages[10:])
        for n in range(20)
    ]
    system, answer = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "yes"}
    talks = [{"messages": [system, {"role": "user", "content": f"{n}?"}, answer]} for n in range(200)]
    found = {}
    for task, records in ((ExtractiveQA(), questions), (Instructions(), talks)):
        (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
        source = JsonLines(path=str(tmp_path / "records.jsonl"), valid_fraction=0.3).reading(task)
        splits = [[*read(source, split=split)] for split in ("train", "valid")]
        found[type(task)] = [{task.group(record) for record in split} for split in splits]
        assert sum(map(len, splits)) == 200 and all(splits)
    assert found[ExtractiveQA][0] | found[ExtractiveQA][1] == {*passages[10:]}
    assert not found[ExtractiveQA][0] & found[ExtractiveQA][1]
    assert len(found[Instructions][0] | found[Instructions][1]) == 200


def read(source, counts=None, split="train"):
    import collections

    skipped = collections.Counter()
    for shard in source.shards(split):
        yield from source.read(shard, skipped)
    (counts if counts is not None else {}).update(skipped)


def test_a_source_of_texts_has_no_records():
    with pytest.raises(UserError, match="config.data.source is TextFiles, which has no records.*JsonLines"):
        TextFiles(path="x").reading(Classification(labels=("a", "b")))


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_a_validation_with_a_single_class_has_no_warning(recwarn):
    task = Classification(labels=("no", "yes"))
    found = task.metrics(np.array([[0.0, 2.0], [0.0, 1.0]]), [{"label": 1}, {"label": 1}])
    assert found["accuracy"] == 1.0 and found["matthews"] == 0.0 and not recwarn.list


def test_macro_f1_omits_absent_classes_as_scikit_learn_does():
    task, rng = Classification(labels=tuple("abcde")), np.random.default_rng(0)
    # Only labels have class 3; neither labels nor predictions have class 1 or 4.
    truth, said = rng.choice([0, 2, 3], 50), rng.choice([0, 2], 50)
    found = task.metrics(np.eye(5)[said], [{"label": label} for label in truth.tolist()])
    expected = sklearn.metrics.f1_score(truth, said, average="macro", zero_division=0.0)
    assert found["macro_f1"] == found["f1"] == pytest.approx(expected, rel=1e-12)


def test_the_figures_of_classes():
    task = Classification(labels=("no", "yes"))
    answers = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0], [3.0, 0.0]])
    found = task.metrics(answers, [{"label": i} for i in (0, 1, 0, 0)])
    assert found["accuracy"] == 0.75 and found["f1"] == pytest.approx(2 / 3)
    assert found["matthews"] == pytest.approx((1 * 2 - 1 * 0) / np.sqrt(2 * 1 * 3 * 2))
    assert found["accuracy_f1"] == pytest.approx((0.75 + 2 / 3) / 2)
    assert tuple(found) == task.metric_names


def test_the_figures_of_labels_and_of_numbers():
    task = Classification(labels=("a", "b"), multi_label=True)
    found = task.metrics(np.array([[1.0, -1.0], [1.0, 1.0]]), [{"labels": [0]}, {"labels": [1]}])
    assert found == pytest.approx({"accuracy": 0.5, "f1": (2 / 3 + 1) / 2, "f1_micro": 0.8})
    alone = Classification(labels=("a",), multi_label=True)  # predicted for the second of three, true for the first two
    found = alone.metrics(np.array([[-1.0], [1.0], [-1.0]]), [{"labels": [0]}, {"labels": [0]}, {"labels": []}])
    assert found == pytest.approx({"accuracy": 2 / 3, "f1": 2 / 3, "f1_micro": 2 / 3})
    numbers = Regression()
    found = numbers.metrics(np.array([[0.0], [1.0], [4.0]]), [{"score": x} for x in (0.0, 1.0, 2.0)])
    assert found["spearman"] == pytest.approx(1.0) and found["squared_error"] == pytest.approx(4 / 3)
    assert found["pearson_spearman"] == pytest.approx((found["pearson"] + 1) / 2)
    assert set(found) == set(numbers.metric_names)
    assert numbers.metrics(np.ones((3, 1)), [{"score": x} for x in (0.0, 1.0, 2.0)])["pearson"] == 0.0


@pytest.mark.parametrize("task", [Regression(), Classification(labels=("a",)), Classification(labels=("a", "b"))])
def test_metrics_of_outputs_that_are_not_numbers_are_not_numbers(task):
    notes = [{"score": x, "label": 0} for x in (0.0, 1.0, 2.0)]
    outputs = np.array([[0.0, 1.0], [np.nan, 1.0], [4.0, 1.0]])[:, : len(getattr(task, "labels", "1"))]
    found = metrics_or_nan(task, outputs, notes)
    assert tuple(found) == task.metric_names and np.isnan(list(found.values())).all()
    with_tags = {"tags": np.zeros((1, 2), int), "probabilities": np.array([[np.nan, 1.0]])}
    assert np.isnan(metrics_or_nan(TokenClassification(labels=("O", "B-X")), with_tags, notes)["unread"])


def test_a_class_without_an_example_is_named():
    task = Classification(labels=("a", "b", "c"))
    (warning,) = task.warnings([{"label": 0}, {"label": 2}])
    assert "NO EXAMPLE OF 'b'" in warning
    assert not list(task.warnings([{"label": i} for i in range(3)]))


@pytest.mark.parametrize("name", TASKS)
def test_each_task_of_glue_selects_by_one_of_its_figures(name):
    named = TASKS[name]
    assert named.select_by in named.task.metric_names and named.tfds == f"glue/{name}"


# --- the config -------------------------------------------------------------------------------------------------------


def config(task=None, **head):
    experiment = tiny.get_config("bert")
    experiment.model.masked_lm_head = False
    experiment.model.head = Classify(**head)
    experiment.objective = task or Classification(labels=("a", "b", "c"))
    experiment.data.source = JsonLines(path=__file__)
    experiment.objective.complete(experiment)
    return experiment


def test_a_head_without_a_hidden_layer_has_no_fields_of_it():
    for field, value, default in (("hidden_bias", False, True), ("hidden_norm", True, False)):
        with pytest.raises(UserError) as raised:
            validate(config(hidden="none", **{field: value}))
        assert str(raised.value) == (
            f"config.model.head.{field} is {value}, which requires a hidden layer, and config.model.head.hidden is "
            f"'none': set it to {default}"
        )


def test_the_head_has_as_many_labels_as_the_task():
    experiment = config(pooling="mean")
    validate(experiment)
    assert experiment.model.head == Classify(num_labels=3, kind="single", pooling="mean")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model.head.num_labels": 2}, "of 3 labels needs Classify\\(num_labels=3"),
        ({"model.masked_lm_head": True}, "config.model.head is Classify, which excludes others"),
        ({"objective.labels": ("a",)}, "config.objective.labels is \\('a',\\)"),
        ({"objective.labels": ("a", "a", "b")}, "which has a name twice"),
        ({"evaluate.select_by": "mathews"}, "did you mean 'matthews'"),
        ({"objective.numbered": ("a", "d", "b")}, "config.objective.numbered has 'd', allowed: a, b, c"),
        (
            {"objective.labels": ("0", "1", "2"), "objective.numbered": ("2", "1", "0")},
            "numbered is \\('2', '1', '0'\\), but a number in a record is the name of a label",
        ),
        ({"train.label_smoothing": 0.1}, "label_smoothing"),
    ],
)
def test_what_does_not_fit_together_is_one_line(change, said):
    experiment = config()
    for path, value in change.items():
        *owner, name = path.split(".")
        part = experiment
        for word in owner:
            part = getattr(part, word)
        setattr(part, name, value)
    with pytest.raises(UserError, match=said):
        validate(experiment)


def test_a_head_without_a_task_is_refused():
    experiment = config()
    experiment.objective = tiny.get_config("bert").objective
    with pytest.raises(UserError, match="config.model.head is .*MaskedLM trains a language model"):
        validate(experiment)
