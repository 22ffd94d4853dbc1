"""Tests packing: the pieces of documents, the pieces that fit together, and the rows of an epoch."""

import collections
import dataclasses
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import UserError
from pretrainax.config.overrides import set_field
from pretrainax.data.corpus import Corpus
from pretrainax.data.objectives import CausalLM, Denoising, MaskedLM, NextSentencePrediction, SpanCorruption
from pretrainax.data.packing import BestFit, FirstFit, OneEach, Windows, cut_documents, cut_sentences
from pretrainax.data.pipeline import Batches, iterate
from pretrainax.data.preparation import shards
from pretrainax.data.row_plan import make_row_plan
from pretrainax.tokenization.base import Vocabulary
from tests.support import tiny
from tests.support.rows import row_options

VOCABULARY = Vocabulary(size=5000, pad=0, eos=1, unk=2, cls=3, sep=4, mask=5, sentinels=tuple(range(6, 106)))
SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=80)
PACKINGS = [FirstFit(), BestFit(), OneEach()]


def name_of(value):
    return type(value).__name__


# --- pieces


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 20))
def test_pieces_of_documents_cover_them(lengths, longest):
    ends = np.cumsum(lengths)
    starts, sizes = cut_documents(ends, longest)
    np.testing.assert_array_equal(starts, np.cumsum([0, *sizes[:-1]]))  # contiguous
    assert sizes.sum() == ends[-1] and sizes.max() <= longest and sizes.min() >= 1
    assert set(ends.tolist()) <= set((starts + sizes).tolist())  # No piece spans two documents.


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=8), st.integers(1, 40))
def test_pieces_end_where_sentences_do(documents, longest):
    ends, sentence_ends = np.cumsum([sum(d) for d in documents]), np.cumsum([s for d in documents for s in d])
    starts, sizes = cut_sentences(ends, sentence_ends, longest)
    np.testing.assert_array_equal(starts, np.cumsum([0, *sizes[:-1]]))
    assert sizes.sum() == ends[-1] and sizes.max() <= longest and sizes.min() >= 1
    assert set(ends.tolist()) <= set((starts + sizes).tolist())
    for start, size in zip(starts, sizes, strict=True):
        if start + size not in sentence_ends:  # Then a sentence was too long for a piece.
            assert size == longest and not ((sentence_ends > start) & (sentence_ends < start + size)).any()


def test_sentences_are_taken_greedily():
    starts, sizes = cut_sentences(np.array([20, 26]), np.array([4, 9, 12, 20, 23, 26]), 10)
    assert list(zip(starts, sizes, strict=True)) == [(0, 9), (9, 3), (12, 8), (20, 6)]


# --- fitting


@pytest.mark.parametrize("packing", PACKINGS, ids=name_of)
@given(sizes=SIZES)
def test_no_row_is_overfull_and_none_is_empty(packing, sizes):
    sizes = np.array(sizes)
    rows = packing.rows(sizes, (40, 20))
    assert set(rows.tolist()) == set(range(rows.max() + 1))
    for side, room in enumerate((40, 20)):
        assert np.bincount(rows, weights=sizes[:, side]).max() <= room


def test_first_fit_takes_the_oldest_row_with_room():
    assert FirstFit().rows(np.array([(6, 1), (8, 1), (4, 1), (2, 1), (9, 1)]), (10, 5)).tolist() == [0, 1, 0, 1, 2]


def test_best_fit_takes_the_row_that_it_fills_best():
    rows = BestFit().rows(np.array([(3, 1), (6, 1), (7, 1), (4, 1)]), (10, 5)).tolist()
    assert rows[0] == rows[2] and rows[1] == rows[3]


@pytest.mark.parametrize("packing", [FirstFit(), BestFit()], ids=name_of)
def test_targets_bound_a_row_too(packing):
    assert len(set(packing.rows(np.array([(1, 3), (1, 3), (1, 3)]), (10, 6)).tolist())) == 2


# --- rows of a corpus


class Numbers:
    """A tokenizer of text like "5 6 7"."""

    vocabulary = VOCABULARY

    def encode_batch(self, texts):
        return [np.array(text.split(), np.int32) for text in texts]

    def encode(self, text):
        return self.encode_batch([text])[0]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """200 documents; token t of document d is 200 + (100 d + t) mod 4,000."""
    directory = str(tmp_path_factory.mktemp("corpus"))
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    texts = [" ".join(str(200 + (100 * d + t) % 4000) for t in range(n)) for d, n in enumerate(lengths)]
    with shards.ShardWriter(directory, 0, Numbers()) as writer:
        list(writer.write(texts, collections.Counter()))
    shards.write_index(directory, 1, VOCABULARY.size, "numbers")
    return Corpus(directory)


def make(corpus, packing, objective=None, **settings):
    options, others = row_options(dict(sequence_length=32, global_batch_size=4, seed=3, packing=packing) | settings)
    return Batches([corpus], objective or CausalLM(), VOCABULARY, options, **others)


@pytest.mark.parametrize("packing", PACKINGS, ids=name_of)
@pytest.mark.parametrize("objective", [CausalLM(), MaskedLM(), SpanCorruption()], ids=name_of)
def test_an_epoch_holds_every_token_once(corpus, packing, objective):
    batches = make(corpus, packing, objective)
    for epoch in range(2):
        rows = range(epoch * batches.rows_per_epoch, (epoch + 1) * batches.rows_per_epoch)
        made = [example for row in rows for example in batches.examples(row)[1]]
        texts = [objective.restore(example, VOCABULARY) for example in made]
        left_out = batches.statistics()["pieces without a target"]
        assert sum(map(len, texts)) == corpus.num_tokens - left_out  # They have one token each.
        found = np.bincount(np.concatenate(texts), minlength=VOCABULARY.size)
        assert (corpus.token_counts - found).min() >= 0


@pytest.mark.parametrize("packing", [FirstFit(), BestFit()], ids=name_of)
def test_examples_of_a_row_are_told_apart(corpus, packing):
    batch = make(corpus, packing)[0]
    for tokens, segments, positions, weights in zip(
        *(batch[name] for name in ("tokens", "segment_ids", "positions", "loss_weights")), strict=True
    ):
        for segment in range(1, segments.max() + 1):
            inside = segments == segment
            np.testing.assert_array_equal(positions[inside], np.arange(inside.sum()))
            steps = np.diff(tokens[inside].astype(int)) % 4000
            assert (steps == 1).all()  # one document
        np.testing.assert_array_equal(weights, segments > 0)
        np.testing.assert_array_equal(tokens[segments == 0], VOCABULARY.pad)


def test_masked_positions_of_a_packed_row_point_at_their_tokens(corpus):
    objective = MaskedLM(mask_fraction=0.0, random_fraction=0.0)  # Every token stays unchanged.
    batch = make(corpus, BestFit(), objective)[3]
    used = batch["loss_weights"] > 0
    at = np.take_along_axis(batch["tokens"], batch["masked_positions"], axis=1)
    np.testing.assert_array_equal(at[used], batch["targets"][used])
    assert used.sum(1).min() >= 1 and batch["targets"].shape == (4, objective.lengths(32).targets)


@pytest.mark.parametrize("packing", [*PACKINGS, OneEach(buckets=(8, 16)), Windows()], ids=repr)
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_same_packed_batches(corpus, packing, processes):
    whole = make(corpus, packing)
    parts = [make(corpus, packing, process_index=p, process_count=processes) for p in range(processes)]
    for step in (0, 7, 1000):
        for name, array in whole[step].items():
            np.testing.assert_array_equal(array, np.concatenate([part[step][name] for part in parts]))


def test_a_bucketed_batch_is_as_short_as_its_bucket(corpus):
    batches = make(corpus, OneEach(buckets=(8, 16)))
    seen = set()
    for step in range(batches.rows_per_epoch // 4):
        length = batches[step]["tokens"].shape[1]
        longest = batches[step]["segment_ids"].sum(1).max()
        assert longest <= length and (length == 8 or longest > length // 2)
        assert batches.lengths_of(step).inputs == length
        seen.add(length)
    assert seen == {8, 16, 32}


def test_what_fills_no_batch_is_counted(corpus):
    batches = make(corpus, OneEach(buckets=(8, 16)))
    counts = batches.statistics()
    starts, _ = cut_documents(corpus.document_ends, 33)
    left = counts["pieces left out of each epoch"] + counts["pieces without a target"]
    assert batches.rows_per_epoch + left == len(starts) and counts["pieces left out of each epoch"] < 3 * 4


def corpus_of(directory, lengths, parts=None, sentence=5):
    """Writes a corpus of documents of these lengths.

    All tokens of document d are 200 + 100 d, and an empty line follows each sentence.
    """
    words = [[str(200 + 100 * d)] * n for d, n in enumerate(lengths)]
    texts = ["\n\n".join(" ".join(x[i : i + sentence]) for i in range(0, len(x), sentence)) for x in words]
    with shards.ShardWriter(directory, 0, Numbers(), parts) as writer:
        list(writer.write(texts, collections.Counter()))
    shards.write_index(directory, 1, VOCABULARY.size, "numbers", parts)
    return Corpus(directory)


def test_the_end_of_a_document_alone_is_no_piece(tmp_path):
    cut = corpus_of(str(tmp_path), [30, 31] * 20)  # Plus a separator each; a row takes 31 tokens of text.
    batches = make(cut, OneEach(), MaskedLM(), sequence_length=33)
    assert batches.statistics()["pieces without a target"] == 20
    assert {len(example["tokens"]) for row in range(40) for example in batches.examples(row)[1]} == {33}


@pytest.mark.parametrize("objective", [NextSentencePrediction(), Denoising()], ids=name_of)
def test_the_end_of_a_document_with_a_long_sentence_alone_is_no_piece(objective, tmp_path):
    room = objective.lengths(32).raw
    cut = corpus_of(str(tmp_path), [room - 1, room] * 20, "sentences", sentence=100)  # plus a separator each
    plan = make_row_plan(cut, objective, OneEach(), 32, batch_size=4, shuffle=False)
    assert plan.statistics["pieces without a target"] == 20 and plan.rows_per_epoch == 40


def test_another_document_is_found_beside_one_that_is_nearly_all(tmp_path):
    mostly_one = corpus_of(str(tmp_path), [20, 5000, 15, 40], "sentences")
    batches = make(mostly_one, OneEach(), NextSentencePrediction(), sequence_length=32)
    others = set()
    for row in range(600):
        (example,) = batches.examples(row)[1]
        first, second = ({*x.tolist()} - {1} for x in NextSentencePrediction().segments(example))
        assert (first != second) == bool(example["pair_labels"])
        others |= second if first == {300} else set()
    assert others == {200, 300, 400, 500}


def test_next_sentences_want_two_documents(tmp_path):
    with pytest.raises(UserError, match="takes text from other documents, but a split of this corpus has only one"):
        make(corpus_of(str(tmp_path), [5000], "sentences"), OneEach(), NextSentencePrediction())


def test_a_plan_is_made_once(corpus, monkeypatch):
    first = make(corpus, BestFit(), sequence_length=20)[0]
    monkeypatch.setattr("pretrainax.data.row_plan._make_tables", None)
    np.testing.assert_array_equal(make(corpus, BestFit(), sequence_length=20)[0]["tokens"], first["tokens"])


@pytest.mark.parametrize(
    "split, begin, end",
    [
        ("train", "the corpus", "config.data.source, or set a smaller batch size or fewer buckets"),
        (
            "valid",
            "the validation text",
            "or set a larger valid_fraction, or set a smaller batch size or fewer buckets",
        ),
    ],
)
def test_a_corpus_without_a_row_is_refused(split, begin, end, tmp_path):
    (tmp_path / split).mkdir()
    corpus = corpus_of(str(tmp_path / split), [9] * 20)
    with pytest.raises(UserError) as e:
        make(corpus, OneEach(buckets=(8,)), global_batch_size=4096)
    what = (
        "has no row for CausalLM with OneEach and config.train.global_batch_size 4096: 20 pieces left out of each epoch"
    )
    assert str(e.value).startswith(f"{begin} {what}; add text") and str(e.value).endswith(end)


# --- documents in a new order in each epoch


SHUFFLED = Windows(shuffle_documents=True)


def epoch_of(batches, epoch):
    """Returns the pieces of each row of an epoch."""
    size = batches.rows_per_epoch
    return [batches.streams[0].row(n)[0] for n in range(epoch * size, (epoch + 1) * size)]


def neighbors(corpus, rows):
    """Returns the pairs of documents that follow each other in a row."""
    documents = [corpus.document_ends.searchsorted([start for start, _ in row], "right").tolist() for row in rows]
    return {pair for row in documents for pair in itertools.pairwise(row)}


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_shuffled_documents_come_once_an_epoch(corpus, epoch):
    batches, plain = make(corpus, SHUFFLED), make(corpus, Windows())
    rows = epoch_of(batches, epoch)
    found = np.zeros(corpus.num_tokens, int)
    for start, length in itertools.chain(*rows):
        assert len(set(corpus.document_ends.searchsorted((start, start + length - 1), "right"))) == 1
        found[start : start + length] += 1
    assert found.max() == 1 and (found == 0).sum() < 2 * 33  # Windows omit less than two rows of 33 tokens.
    assert {sum(length for _, length in row) for row in rows} == {33}
    assert batches.rows_per_epoch == plain.rows_per_epoch


def test_shuffled_documents_have_other_neighbors_in_each_epoch(corpus):
    batches = make(corpus, SHUFFLED)
    first, second = (neighbors(corpus, epoch_of(batches, epoch)) for epoch in (0, 1))
    # Two random orders share on average one of 199 pairs of neighbors.
    assert (
        len(first) > 100
        and len(first & second) < 8
        and first != neighbors(corpus, epoch_of(make(corpus, SHUFFLED, seed=4), 0))
    )
    plain = [
        neighbors(corpus, [[(row[0][0] + i, 1) for i in range(33)] for row in epoch_of(make(corpus, Windows()), e)])
        for e in (0, 1)
    ]
    assert len(plain[0] & plain[1]) > 100  # Without the option, most neighbors stay.


@pytest.mark.parametrize("objective", [CausalLM(), MaskedLM(), SpanCorruption()], ids=name_of)
def test_examples_of_shuffled_documents_are_their_tokens(corpus, objective):
    batches = make(corpus, SHUFFLED, objective)
    for row in (0, batches.rows_per_epoch + 3):
        pieces = batches.streams[0].row(row)[0]
        (example,), (text,) = batches.examples(row)[1], batches.inputs(row)
        tokens = np.concatenate([corpus.tokens(*piece) for piece in pieces])
        np.testing.assert_array_equal(objective.restore(example, VOCABULARY), tokens)
        np.testing.assert_array_equal(text.segment_ids, np.repeat(np.arange(len(pieces)) + 1, [n for _, n in pieces]))


def test_documents_of_shuffled_tokens_are_found(corpus):
    batches = make(corpus, SHUFFLED)
    batch, documents = batches.with_documents(batches.rows_per_epoch // 4 + 2)
    starts = np.append(0, corpus.document_ends)[documents]
    targets = [
        [int(t) in corpus.tokens(s, e - s) for t, s, e in zip(*row, strict=True)]
        for row in zip(batch["targets"], starts, corpus.document_ends[documents], strict=True)
    ]
    assert np.all(targets)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_resumes_in_the_second_epoch_of_shuffled_documents(corpus, workers):
    whole = make(corpus, SHUFFLED)
    start = whole.rows_per_epoch // 4 + 3
    expected = [whole[step] for step in range(start + 6)][start:]
    parts = [make(corpus, SHUFFLED, process_index=i, process_count=2) for i in (0, 1)]
    resumed = [list(iterate(pickle.loads(pickle.dumps(part)), start, start + 6, workers)) for part in parts]
    for step, batch in enumerate(expected):
        for name, array in batch.items():
            np.testing.assert_array_equal(np.concatenate([part[step][name] for part in resumed]), array)


def test_validation_reads_shuffled_documents_in_corpus_order(corpus):
    one, other = (make(corpus, packing, shuffle=False) for packing in (SHUFFLED, Windows()))
    assert epoch_of(one, 0) == epoch_of(other, 0)


def test_static_masks_exclude_shuffled_documents():
    experiment = tiny.get_config("bert")
    experiment.data.packing, experiment.objective = SHUFFLED, MaskedLM(static=True)
    (problem,) = experiment.data.packing.problems(experiment)
    assert "config.data.packing.shuffle_documents is True" in problem
    experiment.objective = dataclasses.replace(experiment.objective, static=False)
    assert not list(experiment.data.packing.problems(experiment))


def test_other_packings_name_no_order_of_documents():
    with pytest.raises(UserError, match="shuffle_documents") as error:
        set_field(tiny.get_config("gpt"), "config.data.packing", "BestFit(shuffle_documents=True)")
    assert "\n" not in str(error.value)
