"""Tests token classification: the words of a record in an example, span schemes, and metrics."""

import dataclasses
import types

import numpy as np
import pytest

from pretrainax import cli
from pretrainax.config import Classify, Tag, UserError
from pretrainax.config.validation import validate
from pretrainax.data.objectives import ObjectiveInput
from pretrainax.data.sources import JsonLines
from pretrainax.tasks import TokenClassification
from pretrainax.tokenization import ByteBPE, Characters, Unigram, WordPiece
from tests.support import tiny

LABELS = ("O", "B-A", "I-A", "B-B", "I-B")
LINES = ["a fine film and a dull one", "no film at all is fine"] * 20
TOKENIZER = WordPiece(vocab_size=40).build(iter(LINES))


def adapted(task, variant="bert", length=16, tokenizer=TOKENIZER):
    experiment = tiny.get_config(variant)
    experiment.data.sequence_length, experiment.objective = length, task
    return task.adapted(experiment).bind(tokenizer)


def task(**fields):
    return TokenClassification(labels=LABELS, **fields)


def encoded(task, words, tags, tokenizer=TOKENIZER):
    (found,) = task.encode(task.read({"tokens": words, "tags": tags}), tokenizer)
    return found.parts, {**found.note, "parts": np.cumsum([len(ids) for ids in found.parts]).tolist()}


def example_of(task, words, tags, tokenizer=TOKENIZER):
    parts, note = encoded(task, words, tags, tokenizer)
    tokens = np.concatenate(parts)
    text = ObjectiveInput(tokens, np.ones_like(tokens), np.array(note["parts"]), note=note)
    return task.example(text, None, tokenizer.vocabulary)


FILM = ["a", "filmdull", "fine"]  # The second word has several tokens.


@pytest.mark.parametrize("subword", ("first", "last", "mean"))
@pytest.mark.parametrize("variant", ("bert", "gpt", "t5"))
def test_a_word_is_told_by_the_tokens_of_its_pieces(subword, variant):
    pieces = [len(ids) for ids in TOKENIZER.encode_batch(FILM)]
    assert pieces[1] > 2 and pieces[0] == pieces[2] == 1
    found = example_of(adapted(task(subword=subword), variant), FILM, ["B-A", "I-A", "O"])
    inner = {"first": [2] + [0] * (pieces[1] - 1), "last": [0] * (pieces[1] - 1) + [2], "mean": [2] * pieces[1]}
    assert found["words"].tolist() == [0] * (variant != "gpt") + [1, *inner[subword], 3, 0]
    assert found["word_labels"].tolist() == [1, 2, 0] and found["words"].shape == found["tokens"].shape
    if variant == "t5":  # The decoder's state at a word's encoder position predicts its tag.
        assert len(found["encoder_tokens"]) == len(found["words"])


@pytest.mark.parametrize("subword, words", [("first", 2), ("last", 1), ("mean", 1)])
def test_a_word_without_its_pieces_is_not_read(subword, words):
    """The row has room for only the first two tokens of "filmdull"."""
    found = example_of(adapted(task(subword=subword), length=5), FILM, ["B-A", "I-A", "O"])
    assert found["words"].max() == words == len(found["word_labels"])


def test_a_word_of_no_piece_is_not_read():
    found = example_of(adapted(task()), ["a", "\u200b \u200b", "one"], ["B-A", "O", "B-B"])
    assert found["word_labels"].tolist() == [1, 3] and found["words"].max() == 2


CHOICES = [WordPiece(vocab_size=40), ByteBPE(vocab_size=270), Unigram(vocab_size=278), Characters()]


@pytest.mark.parametrize("choice", CHOICES)
def test_the_ids_of_words_are_those_of_their_text(choice):
    tokenizer = choice.build(iter(LINES))
    words = "no dull film is a film".split()
    parts, _ = encoded(task(), words, ["O"] * 6, tokenizer)
    assert np.concatenate(parts).tolist() == tokenizer.encode(" ".join(words)).tolist() and len(parts) == 6


# --- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tags", [["B-A", "I-A", "O"], [1, 2, 0], [b"B-A", b"I-A", b"O"], np.array([1, 2, 0])])
def test_tags_are_names_or_numbers(tags):
    found = task().read({"tokens": [b"a", "b", "c"], "tags": tags})
    assert found.texts == ("a b c",) and found.note == {"words": ["a", "b", "c"], "tags": [1, 2, 0]}


WORDS = ["x", "y", "z"]


@pytest.mark.parametrize(
    "record, said",
    [
        ({"tokens": WORDS, "tags": ["O", "B-a", "O"]}, "word 2, 'y': field 'tags' .*'B-a', did you mean .*'B-A'"),
        ({"tokens": WORDS, "tags": [0, 5, 0]}, "word 2, 'y': .*the label 5"),
        ({"tokens": WORDS, "tags": ["O", "O"]}, "'tokens' holds 3 words and 'tags' 2 tags"),
        ({"tokens": WORDS}, "no field 'tags'.*config.objective.tags_field"),
        ({"token": WORDS, "tags": []}, "no field 'tokens', did you mean 'token'"),
        ({"tokens": "x y z", "tags": "O O O"}, "field 'tokens' holds str, it must be a list"),
        ({"tokens": ["x", 1.5, "z"], "tags": ["O"] * 3}, "word 2 is 1.5, it must be a string"),
        (
            {"tokens": WORDS, "tags": ["O", "I-A", "O"]},
            "word 2, 'y', has the tag 'I-A' after 'O', where IOB2 has 'B-A'",
        ),
        ({"tokens": WORDS, "tags": ["I-A", "O", "O"]}, "word 1, 'x', has the tag 'I-A' at the begin.*repair=True"),
        ({"tokens": WORDS, "tags": ["B-A", "I-B", "O"]}, "word 2, 'y', has the tag 'I-B' after 'B-A'"),
    ],
)
def test_a_broken_record_says_what_is_wrong_with_it(record, said):
    with pytest.raises(ValueError, match=said):
        task().read(record)


@pytest.mark.parametrize(
    "scheme, tags, repaired",
    [
        ("iob2", "I-A I-A I-B I-B O I-B", "B-A I-A B-B I-B O B-B"),
        ("iob2", "B-A B-A I-A B-B I-B O", None),
        ("iob1", "I-A B-A I-A B-B O B-B", "I-A B-A I-A I-B O I-B"),
        ("iob1", "I-A I-A I-B B-B I-B O", None),
        ("none", "I-A I-B B-A O I-A I-B", None),
    ],
)
def test_spans_begin_as_their_scheme_says_or_are_repaired(scheme, tags, repaired):
    record = {"tokens": list("uvwxyz"), "tags": tags.split()}
    found = task(scheme=scheme, repair=True).read(record)
    assert " ".join(LABELS[i] for i in found.note["tags"]) == (repaired or tags)
    assert list(found.mended.values()) == ([2 if scheme == "iob1" else 3] if repaired else [])
    if repaired is None:
        assert task(scheme=scheme).read(record) == found
    else:
        with pytest.raises(ValueError, match=f"where {scheme.upper()} has"):
            task(scheme=scheme).read(record)


# --- metrics ----------------------------------------------------------------------------------------------------------


def answers(*rows):
    return {"tags": np.array([row + [-1] * (8 - len(row)) for row in rows])}


@pytest.mark.slow
def test_the_figures_of_spans():
    notes = [{"tags": [1, 2, 0, 3], "parts": [1, 2, 3, 4]}, {"tags": [0, 1], "parts": [1, 2]}]
    found = task().metrics(answers([1, 2, 3, 3], [0, 2]), notes)  # A right, B too many, B right; I-A alone is an A.
    assert found == pytest.approx(
        {"accuracy": 4 / 6, "precision": 3 / 4, "recall": 1.0, "f1": 6 / 7, "strict_f1": 2 * 2 / (3 + 3), "unread": 0.0}
    )
    assert tuple(found) == task().metric_names and task().select_by == "f1"


def test_what_is_not_read_is_wrong_and_of_no_span():
    notes = [{"tags": [1, 0, 3, 0], "parts": [1, 1, 3, 4]}]  # The second word has no tokens, the last is truncated.
    found = task().metrics(answers([1, 3]), notes)
    assert found["accuracy"] == 0.5 and found["unread"] == 0.5 and found["f1"] == 1.0
    notes[0]["tags"] = [1, 3, 3, 3]
    assert task().metrics(answers([1, 3]), notes)["recall"] == 0.5


def test_tags_that_tell_of_no_spans_have_an_accuracy_alone():
    speech = TokenClassification(labels=("NOUN", "VERB"))
    found = speech.metrics(answers([0, 1]), [{"tags": [0, 0], "parts": [1, 2]}])
    assert (
        found == {"accuracy": 0.5, "unread": 0.0}
        and speech.select_by == "accuracy"
        and tuple(found) == speech.metric_names
    )


def test_a_tag_without_an_example_is_named():
    (warning,) = task().warnings([{"tags": [0, 1, 2]}, {"tags": [3]}])
    assert "NO EXAMPLE OF 'I-B'" in warning


def test_tags_of_another_scheme_are_reported():
    labels = ("O", "B-A", "I-A", "E-A", "S-A")
    notes = [{"tags": list(range(len(labels)))}]
    (warning,) = TokenClassification(labels=labels).warnings(notes)
    assert "NO F1 OF SPANS: config.objective.labels has 'E-A'" in warning
    assert not list(TokenClassification(labels=labels, scheme="none").warnings(notes))
    assert not list(TokenClassification(labels=("NOUN", "VERB")).warnings([{"tags": [0, 1]}]))


# --- the config -------------------------------------------------------------------------------------------------------


def config(task=None, **head):
    experiment = tiny.get_config("bert")
    experiment.model.masked_lm_head = False
    experiment.model.head = Tag(**head)
    experiment.objective = task or TokenClassification(labels=LABELS)
    experiment.data.source = JsonLines(path=__file__)
    experiment.objective.complete(experiment)
    return experiment


def test_the_head_has_the_labels_of_the_task_and_may_follow_its_scheme():
    experiment = config(kind="crf", follows="auto")
    validate(experiment)
    assert experiment.model.head == Tag(num_labels=5, kind="crf", follows=((), (), (1, 2), (), (3, 4)))
    assert config(task(scheme="iob1"), kind="crf", follows="auto").model.head.follows == ((), (1, 2), (), (3, 4), ())
    experiment = config()
    experiment.model.head = None
    experiment.objective.complete(experiment)
    assert experiment.model.head == Tag(num_labels=5)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model.head.num_labels": 2}, r"TokenClassification of 5 labels needs Tag\(num_labels=5"),
        ({"model.head.follows": ((), (7,), (), (), ())}, "follows requires a CRF"),
        (
            {"model.head.kind": "crf", "model.head.follows": ((), (7,))},
            "follows is .* it must have an entry for each of the 5",
        ),
        ({"model.head.dropout_rate": 1.5}, r"dropout_rate is 1.5, it must be in \[0, 1\)"),
        ({"objective.labels": ("O",)}, "it must name all tags"),
        ({"objective.scheme": "none", "objective.repair": True}, "repair is True, but the tags define no spans"),
        ({"objective.labels": ("O", "I-A", "B-B")}, "has no 'B-A', .* begin: add it, or set .*scheme to 'iob1' or"),
        (
            {"objective.scheme": "iob1", "objective.labels": ("O", "B-A", "I-B")},
            "no 'I-A', with .* begin: .*scheme to 'iob2'",
        ),
        ({"objective.scheme": "iob2", "objective.labels": ("O", "S-A")}, "has 'S-A': labels must be O, B-X and I-X"),
        ({"evaluate.select_by": "f2"}, "select_by is 'f2', allowed: accuracy, f1"),
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


@pytest.mark.parametrize("kind", ("softmax", "crf"))
@pytest.mark.parametrize("scheme, labels, lacking", (("auto", ("O", "I-A"), "B-A"), ("iob1", ("O", "B-A"), "I-A")))
def test_a_span_without_its_beginning_is_one_line_for_a_command_too(scheme, labels, lacking, kind, monkeypatch):
    """A command makes the head for the labels before it validates them."""
    experiment = config()
    experiment.objective = TokenClassification(labels=labels, scheme=scheme)
    experiment.model.head = Tag(kind=kind, follows="auto")
    monkeypatch.setattr(cli, "CONFIG", types.SimpleNamespace(value=experiment))
    with pytest.raises(UserError, match=f"config.objective.labels has no '{lacking}', with which spans of"):
        cli.experiment(files=False)


def test_words_without_tags_are_the_same_row_and_are_said_a_tag_each():
    bound, words = adapted(task()), ["a", "filmdull", "", "fine"]
    whole = example_of(bound, words, ["B-A", "I-A", "O", "O"])
    for value in (words, np.array(words)):
        asked = bound.read_unlabeled({"tokens": value, "tags": "nonsense"})
        (found,) = bound.encode(asked, TOKENIZER)
        tokens, ends = np.concatenate(found.parts), np.cumsum([len(ids) for ids in found.parts])
        example = bound.example(
            ObjectiveInput(tokens, np.ones_like(tokens), ends, note=found.note), None, TOKENIZER.vocabulary
        )
        assert whole.keys() - example.keys() == {"word_labels"}
        assert all((example[name] == whole[name]).all() for name in example) and not bound.is_cut(found)
    assert bound.read_unlabeled({"tokens": " a  fine film"}).note == {"words": ["a", "fine", "film"]}
    with pytest.raises(ValueError, match="field 'tokens' holds no words"):
        bound.read_unlabeled({"tokens": []})
    answers = {"tags": np.array([[1, 2, 0, -1]]), "probabilities": np.array([[0.5, 0.25, 0.75, 0.0]], np.float32)}
    assert bound.prediction(answers, [{"parts": ends.tolist()}]) == {
        "prediction": ["B-A", "I-A", None, "O"],
        "probabilities": [0.5, 0.25, None, 0.75],
    }
    (long,) = bound.encode(bound.read_unlabeled({"tokens": ["film"] * 30}), TOKENIZER)
    assert bound.is_cut(long)


def test_another_head_is_refused():
    experiment = config()
    experiment.model.head = dataclasses.replace(Classify(), num_labels=5, kind="single")
    with pytest.raises(UserError, match=r"config.model.head is Classify.*needs Tag\(num_labels=5\)"):
        validate(experiment)
