"""Tests text generation tasks: inputs and targets of records, truncation, metrics of answers, invalid records."""

import numpy as np
import pytest

from pretrainax.config import Classify, UserError
from pretrainax.config.validation import validate
from pretrainax.data.objectives import ObjectiveInput
from pretrainax.data.sources import JsonLines
from pretrainax.tasks import TextGeneration
from pretrainax.tasks.text_datasets import TASKS
from pretrainax.tasks.text_metrics import label_accuracy
from pretrainax.tokenization import ByteBPE, Unigram
from tests.support import tiny

WORDS = ["summarize: it rains and it rains", "a short one\nTL;DR: it rains"] * 20
TOKENIZERS = {"t5": Unigram(vocab_size=282).build(iter(WORDS)), "gpt": ByteBPE(vocab_size=280).build(iter(WORDS))}
RECORD = {"document": "it rains and it rains", "summary": "it rains", "other": 1}


def adapted(variant, length=40, **fields):
    experiment = tiny.get_config(variant)
    experiment.data.sequence_length = length
    given = {"input": "summarize: {document}", "target_field": "summary"} | fields
    return TextGeneration(**given).adapted(experiment).bind(TOKENIZERS[variant])


def text_of(task, record, variant):
    (encoded,) = task.encode(task.read(record), TOKENIZERS[variant])
    ends = np.cumsum([len(ids) for ids in encoded.parts])
    tokens = np.concatenate(encoded.parts)
    return ObjectiveInput(tokens, np.ones_like(tokens), ends, note={**encoded.note, "parts": ends.tolist()})


def example_of(task, record, variant):
    return task.example(text_of(task, record, variant), None, TOKENIZERS[variant].vocabulary)


def ids(text, variant):
    return TOKENIZERS[variant].encode(text).tolist()


def test_an_encoder_reads_the_input_and_the_decoder_writes_the_target():
    found, vocabulary = example_of(adapted("t5"), RECORD, "t5"), TOKENIZERS["t5"].vocabulary
    source, target = ids("summarize: it rains and it rains", "t5"), ids("it rains", "t5")
    assert found["encoder_tokens"].tolist() == [*source, vocabulary.eos]
    assert found["targets"].tolist() == [*target, vocabulary.eos]
    assert found["tokens"].tolist() == [vocabulary.pad, *target] and found["loss_weights"].all()


def test_a_decoder_learns_from_the_target_alone():
    found, end = example_of(adapted("gpt"), RECORD, "gpt"), TOKENIZERS["gpt"].vocabulary.eos
    source, target = ids("summarize: it rains and it rains", "gpt"), ids("it rains", "gpt")
    assert found["tokens"].tolist() == [*source, *target]
    assert found["targets"].tolist() == [*source[1:], *target, end]
    assert found["loss_weights"].tolist() == [0] * (len(source) - 1) + [1] * (len(target) + 1)


@pytest.mark.parametrize("variant", ["t5", "gpt"])
def test_what_is_read_before_an_answer_is_that_of_training(variant):
    task, vocabulary = adapted(variant), TOKENIZERS[variant].vocabulary
    text = text_of(task, RECORD, variant)
    asked, example = task.prompt_example(text, vocabulary), task.example(text, None, vocabulary)
    name = "encoder_tokens" if variant == "t5" else "tokens"
    assert asked[name].tolist() == example[name][: len(asked[name])].tolist()
    assert not {"targets", "loss_weights"} & asked.keys()


@pytest.mark.parametrize("variant", ["t5", "gpt"])
def test_of_what_is_too_long_the_last_field_loses_its_end_and_it_is_counted(variant):
    task = adapted(variant, 40, input="{document}\nTL;DR:", target_length=12)
    tail = ids("x\nTL;DR:", variant)[-5:]
    long = {"document": "it rains and " * 30, "summary": "it rains and it rains and it rains and it rains"}
    texts = [text_of(task, record, variant) for record in (RECORD, long, {**RECORD, "summary": long["summary"]})]
    found = task.example(texts[1], None, TOKENIZERS[variant].vocabulary)
    if variant == "t5":
        assert len(found["encoder_tokens"]) == 40 and found["encoder_tokens"][-6:-1].tolist() == tail
        assert len(found["targets"]) == 12 and found["targets"][-1] == TOKENIZERS["t5"].vocabulary.eos
    else:
        assert len(found["tokens"]) == 40 and found["loss_weights"].sum() == 12
        assert found["tokens"][40 - 11 - 5 : 40 - 11].tolist() == tail
    (said,) = task.warnings([text.note for text in texts])
    assert "1 input and 2 targets of 3 records" in said and said.endswith(" or config.objective.target_length")
    (said,) = task.warnings([text_of(task, {**long, "summary": "it rains"}, variant).note])
    assert "1 input and 0 targets of 1 record lose" in said and said.endswith("; raise config.data.sequence_length")
    assert not list(task.warnings([texts[0].note]))


@pytest.mark.parametrize("variant", ("t5", "gpt"))
def test_a_label_that_no_target_is_is_said(variant):
    task = adapted(variant, 40, target_field="label", labels=("bad", "good", "fine"))
    notes = [text_of(task, {**RECORD, "label": label}, variant).note for label in ("bad", 2, "bad")]
    (said,) = task.warnings(iter(notes))
    assert said.startswith("NO EXAMPLE OF 'good' in training")
    notes.append(text_of(task, {**RECORD, "label": 1}, variant).note)
    assert not list(task.warnings(iter(notes)))


@pytest.mark.parametrize(
    "score, answers", [("rouge", ("дождь", "и это", "it")), ("bleu", ("今日は雨", "今日は it", "it"))]
)
def test_a_score_that_finds_no_words_in_most_answers_is_a_warning(score, answers):
    task = adapted("gpt", 60, scores=("exact_match", score))
    notes = [text_of(task, {**RECORD, "summary": answer}, "gpt").note for answer in answers]
    (said,) = task.warnings(iter(notes))
    assert said.startswith(f"{score.upper()} FINDS NO WORDS in 2 of 3 answers") and "('chrf',)" in said
    assert not list(task.warnings(iter([*notes, notes[-1]])))  # half of the answers
    if score == "rouge":
        assert not any(task.metrics(answers[:1], notes[:1])[name] for name in ("rouge1", "rouge2", "rougeL"))


def test_the_word_of_a_label_is_its_target():
    task = adapted("t5", target_field="label", labels=("bad", "good"))
    assert task.read({**RECORD, "label": 1}).texts[2] == task.read({**RECORD, "label": "good"}).texts[2] == "good"
    with pytest.raises(ValueError, match="'goood', did you mean 'good'"):
        task.read({**RECORD, "label": "goood"})
    task.answers, notes = None, [{"answer": "good"}, {"answer": "bad"}, {"answer": "good"}, {"answer": "bad"}]
    found = task.metrics([" good", "good", "so good", "bad\n"], notes)
    assert found == {"label_accuracy": 0.5, "no_label": 1.0, "exact_match": 0.5} and tuple(found) == task.metric_names


def test_a_label_may_begin_with_a_space():
    found = label_accuracy([" bad", "good\n", "so"], [" bad", " good", " bad"], (" bad", " good"))
    assert found == {"label_accuracy": 2 / 3, "no_label": 1.0}


def test_windows_line_ends_of_an_answer_do_not_make_it_wrong():
    task, record = adapted("gpt", scores=("exact_match",)), RECORD | {"summary": "\ufeffit\r\nrains"}
    note = text_of(task, record, "gpt").note
    assert task.metrics(["it\nrains"], [note]) == {"exact_match": 1.0}  # The targets have these line ends.


def test_the_figures_of_answers():
    task = adapted("t5", scores=("exact_match", "rouge", "bleu", "chrf"), answers=None)
    truth = ["the cat sat on the mat", "it rains today in the town"]
    same = task.metrics(truth, [{"answer": text} for text in truth])
    assert tuple(same) == task.metric_names
    assert same == pytest.approx({**dict.fromkeys(task.metric_names, 1), "bleu": 100, "chrf": 100})
    found = task.metrics(["the cat", "no"], [{"answer": text} for text in truth])
    assert found["rouge1"] == pytest.approx(2 * (1 * 2 / 6) / (1 + 2 / 6) / 2) and found["exact_match"] == 0
    assert found["rouge2"] == pytest.approx(2 * (1 * 1 / 5) / (1 + 1 / 5) / 2)
    assert 0 < found["chrf"] < 100 and found["bleu"] < 50


@pytest.mark.parametrize(
    "record, said",
    [
        ({"document": "a"}, "no field 'summary'.*config.objective.target_field"),
        ({"documnt": "a", "summary": "b"}, "no field 'document', did you mean 'documnt'.*config.objective.input"),
        ({"document": "a", "summary": " \n"}, "field 'summary' is empty"),
        ({"document": None, "summary": "a"}, "field 'document' holds NoneType"),
        ({"document": "a", "summary": ["a"]}, "field 'summary' holds list"),
    ],
)
def test_a_broken_record_says_what_is_wrong_with_it(record, said):
    with pytest.raises(ValueError, match=said):
        adapted("t5").read(record)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"input": "summarize:"}, "it must name fields in braces"),
        ({"input": "{}"}, "it must name fields in braces"),
        ({"input": "{text!r}"}, "it must name fields in braces"),
        ({"input": "{text"}, "which is no template"),
        ({"scores": ("rogue",)}, "has 'rogue', did you mean 'rouge'"),
        ({"labels": ("a", "a")}, "each word must occur only once"),
        ({"target_length": 1}, "target_length is 1"),
        ({"answers": -1}, "config.objective.answers is -1"),
        ({"num_beams": 0}, "config.objective.num_beams is 0"),
    ],
)
def test_a_wrong_field_is_one_line(fields, said):
    experiment = tiny.get_config("t5")
    experiment.data.source, experiment.objective = JsonLines(path=__file__), TextGeneration(**fields)
    with pytest.raises(UserError, match=said):
        validate(experiment)


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda e: setattr(e.evaluate, "select_by", "exact_match"),
            "which needs generated answers: set config.objective",
        ),
        (lambda e: setattr(e.evaluate, "select_by", "exact"), "config.evaluate.select_by is 'exact'"),
        (lambda e: setattr(e.model, "head", Classify(2, "single")), "generates with the vocabulary head"),
        (lambda e: setattr(e.model, "family", "encoder"), "trains config.model.family encoder_decoder or decoder"),
    ],
)
def test_what_does_not_fit_together_is_one_line(change, said):
    experiment = tiny.get_config("t5")
    experiment.data.source, experiment.objective = JsonLines(path=__file__), TextGeneration()
    change(experiment)
    with pytest.raises(UserError, match=said):
        validate(experiment)
    experiment = tiny.get_config("t5")
    experiment.data.source, experiment.objective = JsonLines(path=__file__), TextGeneration(answers=5)
    experiment.evaluate.select_by, experiment.train.label_smoothing = "exact_match", 0.1
    validate(experiment)


def test_corpora_do_not_follow_from_what_is_scored():
    few, many = (TextGeneration(answers=n, num_beams=n, scores=("bleu",) * (n - 1)) for n in (1, 2))
    assert few.corpus_settings() == many.corpus_settings() != TextGeneration(input="a {text}").corpus_settings()


@pytest.mark.parametrize("name", TASKS)
def test_each_named_set_has_the_fields_of_its_task(name):
    named = TASKS[name]
    assert named.task.fields and not list(named.task.field_problems())
