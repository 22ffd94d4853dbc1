"""Tests the count of truncated records in a row plan: the records whose examples change with a longer row."""

import collections

import numpy as np
import pytest

from pretrainax.data.corpus import Corpus
from pretrainax.data.objectives import ObjectiveInput
from pretrainax.data.packing import OneEach
from pretrainax.data.preparation import shards
from pretrainax.data.row_plan import make_row_plan
from pretrainax.tasks import (
    Chunks,
    Classification,
    Instructions,
    MultipleChoice,
    Regression,
    Retrieval,
    TextGeneration,
    TokenClassification,
)
from pretrainax.tokenization import ByteBPE, Unigram, WordPiece
from tests.support import tiny

LINES = ["a fine film and a dull one", "no film at all is fine"] * 20
TOKENIZERS = {
    "bert": WordPiece(vocab_size=40).build(iter(LINES)),
    "t5": Unigram(vocab_size=278).build(iter(LINES)),
    "gpt": ByteBPE(vocab_size=270).build(iter(LINES)),
}
SIZES = range(1, 24)  # words of the longest text of a record


def words(count):
    return "a " * count + "film"


def conversation(count):
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": words(count)}]


ONE, PAIR = {"labels": ("0", "1")}, {"pair_field": "pair", "labels": ("0", "1")}
TASKS = {
    "one text": ("bert", Classification, ONE, lambda n: {"text": words(n), "label": 0}),
    "one text of a decoder": ("gpt", Classification, ONE, lambda n: {"text": words(n), "label": 0}),
    "one text of two stacks": ("t5", Regression, {}, lambda n: {"text": words(n), "label": 0.5}),
    "a pair": ("bert", Classification, PAIR, lambda n: {"text": words(n), "pair": words(3), "label": 0}),
    "words": ("bert", TokenClassification, ONE, lambda n: {"tokens": ["a"] * n, "tags": [0] * n}),
    "choices": (
        "bert",
        MultipleChoice,
        {"choices": 2, "question_field": None},
        lambda n: {"context": words(2), "choices": ["a", words(n)], "answer": 0},
    ),
    "a passage": ("bert", Retrieval, {}, lambda n: {"query": "a", "passage": words(n)}),
    "a text to write": ("t5", TextGeneration, {}, lambda n: {"text": "a", "target": words(n)}),
    "an input": ("t5", TextGeneration, {}, lambda n: {"text": words(n), "target": "a"}),
    "an input of a decoder": ("gpt", TextGeneration, {}, lambda n: {"text": words(n), "target": "a"}),
    "a conversation": ("gpt", Instructions, {}, lambda n: {"messages": conversation(n)}),
}


def bound(variant, task, length):
    experiment = tiny.get_config(variant)
    experiment.data.sequence_length, experiment.objective = length, task
    return task.adapted(experiment).bind(TOKENIZERS[variant])


def tokens_of(task, encoded, vocabulary):
    """Counts the input and target tokens of a document."""
    ends, tokens = np.cumsum([len(ids) for ids in encoded.parts]), np.concatenate(encoded.parts)
    text = ObjectiveInput(tokens, np.ones_like(tokens), ends, note=encoded.note)
    example = task.example(text, np.random.default_rng(0), vocabulary)
    return [len(example[name]) for name in ("tokens", "encoder_tokens", "targets") if name in example]


def counted(folder, variant, task, length, make):
    """Returns the number of truncated records in the row plan, and the encoded documents of each record."""
    tokenizer = TOKENIZERS[variant]
    records = [task.read(make(n)) for n in SIZES]
    with shards.ShardWriter(str(folder), 0, tokenizer, "records", task) as writer:
        assert len(list(writer.write(iter(records), collections.Counter()))) >= len(SIZES)
    shards.write_index(str(folder), 1, tokenizer.vocabulary.size, "fingerprint", "records")
    plan = make_row_plan(Corpus(str(folder)), task, OneEach(), length, 4, shuffle=False)
    return plan.statistics["records cut short"], [list(task.encode(record, tokenizer)) for record in records]


@pytest.mark.parametrize("name", TASKS)
def test_records_are_counted_that_a_longer_row_would_not_cut(name, tmp_path):
    variant, kind, fields, make = TASKS[name]
    length = 40 if kind is Instructions else 16
    task, longer = bound(variant, kind(**fields), length), bound(variant, kind(**fields), 1000)
    said, encoded = counted(tmp_path, variant, task, length, make)
    vocabulary = TOKENIZERS[variant].vocabulary
    lose = [tokens_of(task, each, vocabulary) != tokens_of(longer, each, vocabulary) for (each,) in encoded]
    assert 0 < sum(lose) < len(SIZES) and lose == sorted(lose)
    assert said == sum(lose)


def test_a_query_that_is_too_long_is_counted(tmp_path):
    task = bound("bert", Retrieval(query_length=8), 16)
    said, _ = counted(tmp_path, "bert", task, 16, lambda n: {"query": words(n), "passage": "a"})
    assert said == sum(n + 1 > 6 for n in SIZES)


def test_of_windows_a_record_counts_that_has_more_than_are_read(tmp_path):
    task = bound("bert", Classification(labels=("0", "1"), chunks=Chunks(max_windows=2, stride=7)), 16)
    said, _ = counted(tmp_path, "bert", task, 16, TASKS["one text"][3])
    assert said == sum(n + 1 > 14 + 7 for n in SIZES)
