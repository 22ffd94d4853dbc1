"""Tests extractive question answering: windows, answer positions, answers from logits, and invalid records."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from pretrainax.adapt import PromptTuning
from pretrainax.config import Classify, Extract, SlidingWindows, UserError
from pretrainax.config.validation import validate
from pretrainax.data.batch import check_batch
from pretrainax.data.collate import collate
from pretrainax.data.line_ends import normalize_line_ends
from pretrainax.data.objectives import ObjectiveInput
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import JsonLines
from pretrainax.planning.shapes import batch_shapes
from pretrainax.tasks import ExtractiveQA, label_metrics
from pretrainax.tokenization import ByteBPE, Characters, Unigram, WordPiece
from tests.support import tiny

CONTEXT = "Der Zürcher  Café-Wirt 東京 saw\r\nthe old fox. Then an old fox ran home to Zürich"
TEXTS = [CONTEXT, "Who saw the old fox?", "wer ran home 東京"] * 20
TOKENIZERS = {
    "wordpiece": WordPiece(vocab_size=80),
    "bytes": ByteBPE(vocab_size=280),
    "unigram": Unigram(vocab_size=296, num_sentinels=0),
    "characters": Characters(),
}
BUILT = {name: config.build(iter(TEXTS)) for name, config in TOKENIZERS.items()}
TOKENIZER = BUILT["wordpiece"]


def adapted(task, variant="bert", length=32, tokenizer=TOKENIZER, **model):
    experiment = tiny.get_config(variant)
    experiment.model = dataclasses.replace(experiment.model, **model)
    experiment.data.sequence_length, experiment.objective = length, task
    return task.adapted(experiment).bind(tokenizer)


def record(*answers: str, context=CONTEXT, question="Who saw the old fox?"):
    pairs = {"text": list(answers), "answer_start": [context.index(answer) for answer in answers]}
    return {"question": question, "context": context, "answers": pairs}


def read_by(source, record):
    """Returns a record as its source reads it, with normalized line ends."""
    import collections

    return source._task_record(ExtractiveQA(), record, collections.Counter())[0]


def windows_of(task, given, tokenizer=TOKENIZER):
    """Returns the windows of a record as rows, and their notes."""
    read = read_by(JsonLines(path="x"), task.read(given))
    rows, notes = [], []
    for encoded in task.encode(read, tokenizer):
        tokens, ends = np.concatenate(encoded.parts), np.cumsum([len(ids) for ids in encoded.parts])
        note = json.loads(json.dumps({**encoded.note, "parts": ends.tolist()}))
        text = ObjectiveInput(tokens, np.ones_like(tokens), ends, note=note)
        rows.append(task.example(text, None, tokenizer.vocabulary))
        notes.append(note)
    return rows, notes


def right_answers(rows, notes, length):
    """Returns the logits of a model that is certain of each span."""
    logits = np.full((len(rows), length, 2), -5.0, np.float32)
    for row, example in zip(logits, rows, strict=True):
        row[example["span"][0], 0] = row[example["span"][1], 1] = 5.0
    return logits


def test_a_question_and_a_passage_are_a_row_with_the_place_of_the_answer():
    task = adapted(ExtractiveQA(), length=64)
    (row,), (note,) = windows_of(task, record("old fox"))
    v, ids = TOKENIZER.vocabulary, TOKENIZER.encode
    question = ids("Who saw the old fox?").tolist()
    passage = ids(CONTEXT).tolist()
    assert row["tokens"].tolist() == [v.cls, *question, v.sep, *passage, v.sep]
    assert row["token_types"].tolist() == [0] * (len(question) + 2) + [1] * (len(passage) + 1)
    first, last = row["span"]
    assert row["span"].dtype == np.int32 and row["tokens"][first : last + 1].tolist() == ids("old fox").tolist()
    assert note["answers"] == ["old fox"] and first >= note["first"] == len(question) + 2


def test_the_question_is_told_to_windows_that_make_its_tokens_global():
    task = adapted(ExtractiveQA(), length=64, sparse_attention=SlidingWindows("question"), head=Extract())
    (row,), _ = windows_of(task, record("old fox"))
    asked = [TOKENIZER.vocabulary.cls, *TOKENIZER.encode("Who saw the old fox?")]
    assert row["question"].tolist() == [1] * len(asked) + [0] * (len(row["tokens"]) - len(asked))
    batch = collate([[row], []], task.lengths(64), pad=0, template=row)  # The other row is only padding.
    check_batch(batch, task._model, task.lengths(64), 2)
    assert batch["question"].sum(1).tolist() == [len(asked), 0]
    del batch["question"]
    with pytest.raises(UserError, match=r"batch has no 'question', the encoder expects int32 \[2, 64\]"):
        check_batch(batch, task._model, task.lengths(64), 2)


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("answer", ["Zürcher", "Café-Wirt", "東京", "saw\r\nthe", "Then an old fox", "Der", "Zürich"])
def test_an_answer_comes_back_through_every_tokenizer_and_from_windows(name, answer):
    task = adapted(
        ExtractiveQA(stride=7, max_question_length=4, max_answer_length=99), length=40, tokenizer=BUILT[name]
    )
    rows, notes = windows_of(task, record(answer), BUILT[name])
    assert [note["window"] for note in notes] == list(range(len(rows)))
    said = task.extract(right_answers(rows, notes, 40), notes).text
    assert said == answer.replace("\r\n", "\n")


@pytest.mark.parametrize("answer", ["un cafe\u0301", "दिल्ली में", "e\u0301te\u0301"])
def test_an_answer_keeps_the_combining_marks_that_its_last_token_lacks(answer):
    """WordPiece removes these marks with the accents. The last answer ends the passage; windows end after each word."""
    context = "un cafe\u0301 a दिल्ली में, en e\u0301te\u0301"
    tokenizer = WordPiece(vocab_size=40, lowercase=True).build(iter([context] * 9))
    task = adapted(ExtractiveQA(stride=1, max_question_length=1), length=16, tokenizer=tokenizer)
    rows, notes = windows_of(task, record(answer, context=context, question="a"), tokenizer)
    assert task.extract(right_answers(rows, notes, 16), notes).text == answer


@pytest.mark.parametrize("before", ["", "\ufeff", "a\r", "a\r\n", "a\r\nb\r", "\ufeffa\r\rb "])
@pytest.mark.parametrize("answer", ["The fox", "\nThe fox", "\rThe fox"])
def test_the_span_of_an_answer_follows_the_normalization_of_line_ends(before, answer):
    """A lone carriage return stays in the text, so it moves no answer."""
    context = f"{before}{answer} ran\r\nhome"
    found = {"question": "Who?", "context": context, "answers": {"text": [answer], "answer_start": [len(before)]}}
    ((begin, end),) = ExtractiveQA().read(found).note["spans"]
    normalized = normalize_line_ends(context, Counter())
    assert normalized[begin:end] == answer.replace("\r\n", "\n")


def test_windows_overlap_and_cover_the_passage_and_those_without_the_answer_say_none():
    task = adapted(ExtractiveQA(stride=6), length=20)
    rows, notes = windows_of(task, record("Zürich"))
    passage = TOKENIZER.encode(CONTEXT).tolist()
    room = 20 - 3 - len(TOKENIZER.encode("Who saw the old fox?"))
    found = [row["tokens"].tolist()[note["first"] : -1] for row, note in zip(rows, notes, strict=True)]
    assert found == [passage[i * 6 : i * 6 + room] for i in range(len(found))]
    assert len(found) > 2 and found[-1][-1] == passage[-1] and len(passage) > 6 * (len(found) - 2) + room
    spans = [row["span"].tolist() for row in rows]
    assert spans[0] == [0, 0] and notes[0]["span"] is None  # [CLS]
    assert spans[-1][1] == len(rows[-1]["tokens"]) - 2


def test_a_stride_longer_than_a_window_leaves_no_token_out():
    task = adapted(ExtractiveQA(stride=500), length=20)
    rows, notes = windows_of(task, record("Zürich"))
    found = [
        token for row, note in zip(rows, notes, strict=True) for token in row["tokens"].tolist()[note["first"] : -1]
    ]
    assert found == TOKENIZER.encode(CONTEXT).tolist()


def test_none_is_said_by_the_last_token_of_a_decoder():
    task = adapted(ExtractiveQA(no_answer=True), "gpt", 64, BUILT["bytes"])
    (row,), _ = windows_of(task, record(), BUILT["bytes"])
    assert row["span"].tolist() == [len(row["tokens"]) - 1] * 2


# --- answers from logits --------------------------------------------------------------------------------------------


def numbers(**marks) -> tuple[np.ndarray, list]:
    """Returns the logits of two windows, with four passage tokens from token 2 on: "a b c d" and "c d e f"."""
    logits = np.zeros((2, 8, 2))
    for name, value in marks.items():
        window, place, end = (int(c) for c in name[1:])
        logits[window, place, end] = value
    starts = [0, 2, 4, 6]
    notes = [
        {"window": i, "first": 2, "null": 0, "context": text, "starts": starts, "ends": [s + 1 for s in starts]}
        for i, text in enumerate(("a b c d", "c d e f"))
    ]
    return logits, [{**note, "answers": ["x"]} for note in notes]


def test_the_best_span_is_of_the_passage_in_order_and_not_too_long():
    task = ExtractiveQA(max_answer_length=2)
    assert task.extract(*numbers(_030=5, _041=5)).text == "b c"
    assert task.extract(*numbers(_030=5, _041=5, _140=6, _151=6)).text == "e f"  # from the second window
    assert task.extract(*numbers(_000=9, _071=9, _030=1, _031=1)).text == "b"  # question, padding: not in the passage
    assert task.extract(*numbers(_050=5, _021=5)).text in ("d", "a")  # No end before the start.
    assert task.extract(*numbers(_020=5, _051=5, _021=1)).text == "a"  # Four tokens are too many.


def test_only_the_best_begins_and_ends_are_tried_with_each_other():
    marks = dict(_020=9, _051=9, _030=3, _041=3, _140=9, _111=9)
    said = {n: ExtractiveQA(n_best=n, max_answer_length=2).extract(*numbers(**marks)).text for n in (1, 2)}
    assert said == {1: "", 2: "b c"}  # "a b c d" is too long, and in the other window the end is before the start.


@pytest.mark.parametrize("threshold, text", [(0.0, ""), (3.5, ""), (4.5, "b")])
def test_none_is_said_where_its_lowest_score_is_higher_by_more_than_the_threshold(threshold, text):
    marks = dict(_000=5, _001=5, _100=4, _101=4, _030=2, _031=2)  # scores: no answer 10 and 8, "b" 4
    task = ExtractiveQA(no_answer=True, null_score_diff_threshold=threshold)
    said = task.extract(*numbers(**marks))
    assert said.text == text and said.null_score_diff == 4.0
    assert ExtractiveQA().extract(*numbers(**marks)).text == "b"
    assert task.prediction(*numbers(**marks)) == {"prediction": text, "score": 4.0, "null_score_diff": 4.0}


def test_figures_are_of_records_and_not_of_windows():
    logits, notes = numbers(_030=5, _031=5)
    both = [*notes, *({**note, "answers": ["b", "e"]} for note in notes)]
    found = ExtractiveQA().metrics(np.concatenate([logits, logits]), both)
    assert found == {"exact_match": 0.5, "answer_f1": 0.5}


def test_answers_are_compared_as_squad_does():
    said = ["The  Fox!", "an old dog", "", "cat", "the"]
    truth = [["fox"], ["old red dog", "wolf"], [], [], ["the", "an owl"]]
    found = label_metrics.answer_metrics(said, truth, some_have_none=True)
    assert found == pytest.approx(
        {
            **{"exact_match": 2 / 5, "answer_f1": (1 + 0.8 + 1 + 0 + 0) / 5},
            **{"has_answer_exact_match": 1 / 3, "has_answer_f1": 1.8 / 3, "no_answer_accuracy": 0.5},
        }
    )
    assert label_metrics.answer_metrics(["a b c"], [["b c d e"]], False)["answer_f1"] == pytest.approx(2 * 2 / (2 + 4))


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_list_of_answers_is_read_as_two_lists_are():
    one, other = record("old fox", "Zürich"), record("old fox", "Zürich")
    one["answers"] = [
        {"text": text.encode(), "answer_start": np.int32(start)}
        for text, start in zip(*other["answers"].values(), strict=True)
    ]
    assert ExtractiveQA().read(one) == ExtractiveQA().read(other)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"answers": {"text": ["old fox"], "answer_start": [3]}}, "'old fox' is not at character 3 .*, it is at 35"),
        ({"answers": {"text": ["cat"], "answer_start": [3]}}, "'cat' is not at .*, nor anywhere in it: .*'skip'"),
        ({"answers": {"text": [""], "answer_start": [3]}}, "the answer '' is not at"),
        ({"answers": {"text": [], "answer_start": []}}, "holds no answer: .*no_answer=True"),
        ({"answers": []}, "holds no answer"),
        ({"answers": {"text": ["a"], "answer_start": []}}, "it must be"),
        ({"answers": {"text": ["Der"], "answer_start": [-1]}}, "it must be"),
        ({"answers": {"text": [3], "answer_start": [3]}}, "it must be"),
        ({"answers": {"text": ["Der"]}}, "it must be"),
        ({"answers": "Der"}, "holds 'Der', it must be"),
        ({"answers": None}, "holds None, it must be"),
        ({"answers": np.array([1, 2])}, "it must be"),
        ({"answers": {"text": ["Der"], "answer_start": [float("inf")]}}, "it must be"),
        ({"context": "  "}, "field 'context' is empty"),
        ({"question": ""}, "field 'question' is empty"),
        ({"context": 1.5}, "field 'context' holds float"),
    ],
)
def test_a_broken_record_says_what_is_wrong_with_it(change, said):
    with pytest.raises(ValueError, match=said):
        ExtractiveQA().read({**record("Der"), **change})


@pytest.mark.parametrize("name", ["context", "question", "answers"])
def test_a_missing_field_is_named(name):
    given = {key: value for key, value in record("Der").items() if key != name}
    with pytest.raises(ValueError, match=f"no field '{name}'.*config.objective.{name}_field"):
        ExtractiveQA().read(given)


def test_answers_elsewhere_are_refused_with_their_line_or_left_out_and_counted(tmp_path):
    bad, half = record("Der"), record("old fox", "Zürich")
    bad["answers"]["answer_start"], half["answers"]["answer_start"][0] = [2], 1
    given = [record("Der"), bad, half, record("Zürich")]
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in given[:: 1 if name == "train" else 3])
        )
    experiment = config()
    experiment.data.source = JsonLines(path=str(tmp_path / "train.jsonl"), valid_path=str(tmp_path / "valid.jsonl"))
    experiment.data.cache_dir = str(tmp_path / "cache")
    experiment.tokenizer = WordPiece(vocab_size=60)
    with pytest.raises(UserError, match=r"train.jsonl:2: the answer 'Der' is not at character 2 .* it is at 0"):
        prepare(experiment, report=lambda line: None)
    experiment.objective.wrong_answers = "skip"
    prepared = prepare(experiment, report=lambda line: None)
    (corpus,) = prepared.train
    assert [note["answers"] for note in map(corpus.note, range(corpus.num_documents)) if not note["window"]] == [
        *(["Der"], ["Zürich"], ["Zürich"])
    ]
    assert corpus.skipped["answers that are not where they should be in their passage"] == 2
    assert corpus.skipped["records left out, as no other answer is there"] == 1
    assert "skipped 2 answers that are not where they should be in their passage" in prepared.summary


# --- fields -----------------------------------------------------------------------------------------------------------


def config(**task):
    experiment = tiny.get_config("bert")
    experiment.model.masked_lm_head, experiment.evaluate.batches = False, 0
    experiment.data.sequence_length = 64
    experiment.objective = ExtractiveQA(**{"max_question_length": 16, **task})
    experiment.data.source = JsonLines(path=__file__)
    experiment.objective.complete(experiment)
    return experiment


def windows(longest_question):
    """Returns the fields of a model with global attention for the question."""
    return {
        **{"sparse_attention": SlidingWindows("question", longest_question), "head": Extract()},
        **{"layer_pattern": ("local",), "window": 8},
    }


def test_it_is_sound_and_planned_without_records():
    experiment = config()
    experiment.model = dataclasses.replace(experiment.model, **windows(17))
    validate(experiment)
    assert batch_shapes(experiment)["question"].shape == (8, 64)
    experiment = config()
    validate(experiment)
    assert experiment.model.head == Extract() and batch_shapes(experiment)["span"].shape == (8, 2)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda e: setattr(e.objective, "stride", 0), "config.objective.stride is 0, it must be at least 1"),
        (
            lambda e: setattr(e.objective, "null_score_diff_threshold", 1.5),
            "null_score_diff_threshold is 1.5, but without config.objective.no_answer=True, each question gets an",
        ),
        (lambda e: setattr(e.objective, "max_question_length", 60), "max_question_length 60 leaves no room"),
        (lambda e: setattr(e.data, "drop_duplicates", True), "drop_duplicates compares whole documents"),
        (lambda e: setattr(e.model, "head", Classify(2, "single")), r"ExtractiveQA needs Extract\(\)"),
        (lambda e: setattr(e.evaluate, "select_by", "no_answer_accuracy"), "allowed: answer_f1, exact_match, loss"),
        (
            lambda e: [setattr(e.model, name, value) for name, value in windows(16).items()],
            "max_question_length is 16, which with the token before the question is more than "
            "config.model.sparse_attention.longest_question 16: set longest_question to 17",
        ),
        (
            lambda e: setattr(e, "tuning", PromptTuning()) or [setattr(e.model, *item) for item in windows(17).items()],
            "whose tokens would be before the question",
        ),
        (
            lambda e: setattr(e.model, "head", Extract(second_text=True)) or setattr(e.model, "num_token_types", 1),
            "config.model.family is encoder and num_token_types is 1: set second_text to False",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, said):
    experiment = config()
    change(experiment)
    with pytest.raises(UserError, match=said):
        validate(experiment)


def test_only_what_windows_follow_from_makes_another_corpus():
    task = adapted(ExtractiveQA())
    same = [ExtractiveQA(n_best=3), ExtractiveQA(max_answer_length=5), ExtractiveQA(null_score_diff_threshold=1.0)]
    assert all(adapted(other).corpus_settings() == task.corpus_settings() for other in same)
    others = [adapted(ExtractiveQA(stride=5)), adapted(ExtractiveQA(), length=40), adapted(ExtractiveQA(), "gpt")]
    assert all(other.corpus_settings() != task.corpus_settings() for other in others)
