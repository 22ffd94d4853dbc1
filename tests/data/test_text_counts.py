"""Tests the counts of text in inputs and targets, and the detection of ids that do not determine their text."""

import collections
import re

import numpy as np
import pytest

from pretrainax.data.batch import SEGMENT_FIELDS
from pretrainax.data.collate import collate
from pretrainax.data.corpus import Corpus
from pretrainax.data.objectives import CausalLM, ObjectiveInput, SpanCorruption
from pretrainax.data.packing import BestFit
from pretrainax.data.pipeline import Batches, batches_of
from pretrainax.data.preparation import shards
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.row_stream import RowOptions
from pretrainax.data.text_counts import TextCounter, bytes_per_spelled, text_loss_reason
from pretrainax.tasks import Instructions
from pretrainax.tokenization import BPE, ByteBPE, Characters, Unigram, WordPiece
from pretrainax.tokenization.huggingface import read_tokenizer
from tests.planning.test_shapes import OBJECTIVES, experiment_of
from tests.support.huggingface_directories import old
from tests.tasks.test_cut_records import SIZES, TASKS, TOKENIZERS, bound

TEXTS = [
    "The cat sat on the mat, and the dog on the log.\n" * 4,
    "A caf\u00e9, an \u00c9clair\t\u2014 and the END.\n" * 4,
]
LINES = [line for text in TEXTS * 5 for line in text.splitlines()]
BYTE_BPE = ByteBPE(vocab_size=280).build(iter(TEXTS))
UNIGRAM = Unigram(vocab_size=290).build(iter(TEXTS))


def corpus(folder, tokenizer, texts=TEXTS):
    folder.mkdir()
    with shards.ShardWriter(str(folder), 0, tokenizer) as writer:
        list(writer.write(texts, collections.Counter()))
    shards.write_index(str(folder), 1, tokenizer.vocabulary.size, "fingerprint")
    return Corpus(str(folder))


# --- the text of ids


@pytest.mark.parametrize(
    "tokenizer", [BYTE_BPE, UNIGRAM, BPE(vocab_size=300).build(iter(TEXTS))], ids=("bytes", "unigram", "bpe")
)
def test_tokenizers_that_keep_the_text_lose_nothing(tmp_path, tokenizer):
    assert text_loss_reason(tokenizer, [corpus(tmp_path / "c", tokenizer)]) == ""


def test_added_tokens_of_spaces_lose_nothing(tmp_path):
    tokenizer = read_tokenizer(old("gpt_neox"))
    held = corpus(tmp_path / "c", tokenizer, ["def f():\n    return  1\n", *TEXTS])
    assert held.token_counts[500:].sum() and text_loss_reason(tokenizer, [held]) == ""


@pytest.mark.parametrize(
    "tokenizer, text, reason",
    [
        (WordPiece(vocab_size=60).build(iter(TEXTS)), TEXTS, "the tokenizer does not distinguish 'A' from 'a'"),
        (
            WordPiece(vocab_size=60, lowercase=False).build(iter(TEXTS)),
            TEXTS,
            "the tokens spell 354 bytes, but the text",
        ),
        (
            WordPiece(vocab_size=9, lowercase=False).build(iter(["ab ba"])),
            ["a b"],
            "not distinguish .a.{2}b. from 'a b'",
        ),
        (Characters().build(iter(["abc "])), ["abc", "a c!?"], "2 tokens of the text are unknown to the tokenizer"),
    ],
)
def test_what_a_tokenizer_loses_is_said(tmp_path, tokenizer, text, reason):
    assert re.search(reason, text_loss_reason(tokenizer, [corpus(tmp_path / "c", tokenizer, text)]))


def test_bytes_that_no_token_spells_are_lost(tmp_path):
    prepared = corpus(tmp_path / "c", BYTE_BPE)
    prepared.num_bytes += 3  # As if the tokenizer had dropped blanks.
    assert f"but the text has {prepared.num_bytes:,}" in text_loss_reason(BYTE_BPE, [prepared])


# --- counts


def batches_of_text(folder, tokenizer, objective, packing=None, no_target_bytes="not asked for"):
    options = RowOptions(
        sequence_length=24,
        global_batch_size=4,
        seed=3,
        packing=packing,
        text=tokenizer.text_table,
        no_target_bytes=no_target_bytes,
    )
    return Batches([corpus(folder, tokenizer, LINES)], objective, tokenizer.vocabulary, options)


@pytest.mark.parametrize("packing", [None, BestFit()], ids=("windows", "packed"))
def test_rows_say_how_much_text_they_are_made_of_and_targets_how_many_bytes_they_have(tmp_path, packing):
    batches = batches_of_text(tmp_path / "c", BYTE_BPE, CausalLM(), packing, no_target_bytes="")
    batch, eos = batches[2], BYTE_BPE.vocabulary.eos
    for row in range(4):
        examples = batches.examples(8 + row)[1]
        read = np.concatenate([e["tokens"] for e in examples])  # without the last target of each example
        assert batch["text_tokens"][row] == (read != eos).sum()
        assert batch["text_bytes"][row] == sum(len(BYTE_BPE.spellings()[i]) for i in read if i != eos)
        targets = np.concatenate([e["targets"][e["loss_weights"] > 0] for e in examples])
        assert batch["target_bytes"][row] == sum(len(BYTE_BPE.spellings()[i]) for i in targets if i != eos)
    is_text = (batch["targets"] != eos) & (batch["loss_weights"] > 0)
    np.testing.assert_array_equal(batch["text_weights"], is_text.astype(np.float32))
    assert 0 < is_text.sum() < batch["loss_weights"].sum() and batch["text_tokens"].dtype == np.int32


def test_sentinels_and_ends_are_no_text(tmp_path):
    batch = batches_of_text(tmp_path / "c", UNIGRAM, SpanCorruption())[0]
    vocabulary = UNIGRAM.vocabulary
    is_text = ~np.isin(batch["targets"], [vocabulary.eos, *vocabulary.sentinels])
    np.testing.assert_array_equal(batch["text_weights"], (is_text & (batch["loss_weights"] > 0)).astype(np.float32))
    read = sum(
        int((~np.isin(batch[name], list(vocabulary.special_ids))).sum()) for name in ("encoder_tokens", "targets")
    )
    assert batch["text_tokens"].sum() == read  # Each token of the text is on one of the two sides.
    assert "target_bytes" not in batch  # The decoder's loss is not the likelihood of a text.


def test_a_space_that_a_tokenizer_adds_is_no_byte_of_the_text(tmp_path):
    # As if the tokenizer had added a space to "cat" and to "dog".
    prepared = corpus(tmp_path / "c", BYTE_BPE, [" cat", " dog"])
    prepared.num_bytes -= 2
    table = BYTE_BPE.text_table._replace(adds_space=True)
    tokens = prepared.tokens(0, prepared.num_tokens)
    example = CausalLM().example(ObjectiveInput(tokens, np.ones_like(tokens)), None, BYTE_BPE.vocabulary)
    vocabulary = BYTE_BPE.vocabulary
    counter = TextCounter(table, bytes_per_spelled(table, prepared), vocabulary, with_target_bytes=True)
    example = counter.add_counts(example, tokens)
    first = len(BYTE_BPE.spellings()[tokens[0]])
    assert (
        example["target_bytes"] == len(" cat" + " dog") - first - 1
    )  # The first token is no target, "dog" has no space.
    assert example["text_bytes"] == len("cat" + "dog")


def test_counts_of_a_row_are_those_of_all_its_examples():
    examples = [{"tokens": np.zeros(2, np.int32), "text_tokens": np.array(n, np.int32)} for n in (3, 4)]
    batch = collate([examples], CausalLM().lengths(8), 0)
    assert batch["text_tokens"].tolist() == [7] and batch["text_tokens"].dtype == np.int32


# --- text_tokens never exceeds tokens


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_no_objective_counts_more_text_than_its_rows_read(objective, text, cache):
    experiment = experiment_of(objective, text)
    experiment.data.cache_dir = str(cache)
    batches = batches_of(experiment, prepare(experiment), "train")
    for i in range(3):
        batch = batches[i]
        read = sum((batch[name] > 0).sum(axis=1) for name in SEGMENT_FIELDS if name in batch)
        assert (batch["text_tokens"] <= read).all() and batch["text_tokens"].sum() > 0.4 * read.sum()


@pytest.mark.parametrize("name", TASKS)
def test_no_task_counts_the_text_that_it_cuts(name):
    variant, kind, fields, make = TASKS[name]
    tokenizer = TOKENIZERS[variant]
    vocabulary, table = tokenizer.vocabulary, tokenizer.text_table
    task = bound(variant, kind(**fields), 40 if kind is Instructions else 16)
    counter = TextCounter(table, 1.0, vocabulary, with_target_bytes=False)
    for size in SIZES:
        (encoded,) = task.encode(task.read(make(size)), tokenizer)
        ends, tokens = np.cumsum([len(ids) for ids in encoded.parts]), np.concatenate(encoded.parts)
        example = task.example(
            ObjectiveInput(tokens, np.ones_like(tokens), ends, note=encoded.note), np.random.default_rng(0), vocabulary
        )
        read = sum(table.is_text[example[name]].sum() for name in ("tokens", "encoder_tokens") if name in example)
        assert counter.add_counts(example, tokens)["text_tokens"] == min(read, table.is_text[tokens].sum())
