"""Tests that the measurements of a corpus of any size are equal to counts by hand and by NumPy."""

import collections
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrainax.data.inspection import corpus as report
from pretrainax.data.inspection.corpus import DocumentHashes, measure
from pretrainax.tokenization import BPE, Characters
from pretrainax.tokenization.base import unknown_share

EOS, UNK, FIRST = 1, 2, 3  # ids of Characters: special tokens, then "a", "b", "c", …
TOKENIZER = Characters().build(iter(["abcdefghijklmnopqrstuvwxyz"]))


def corpus(documents, tokenizer=TOKENIZER):
    """Builds the attributes of a Corpus that `measure` reads, in memory. documents: strings, or arrays of ids."""
    ids = [np.append(tokenizer.encode(d) if isinstance(d, str) else d, EOS).astype(np.int32) for d in documents]
    tokens = np.concatenate(ids)
    return types.SimpleNamespace(
        num_documents=len(ids),
        num_tokens=len(tokens),
        num_bytes=len(tokens) - len(ids),
        document_ends=np.cumsum([len(i) for i in ids]),
        tokens=lambda start, length: tokens[start : start + length],
        token_counts=np.bincount(tokens, minlength=tokenizer.vocabulary.size),
        skipped={"empty documents": 3},
        parts="sentences",
        num_parts=17,
    )


def figures(documents):
    return measure({"train": corpus(documents)}, TOKENIZER)["train"]


# --- by hand -------------------------------------------------------------------------------------------------------


def test_figures_of_three_documents():
    found = figures(["abc", "ab", "aaaa?"])
    assert (found["documents"], found["tokens"], found["bytes"]) == (3, 13, 10)
    assert found["bytes_per_token"] == 10 / 13
    assert found["length_mean"] == 13 / 3
    assert found["longest"] == {"document": 2, "tokens": 6, "opening": "aaaa<unk></s>"}
    assert found["unknown_share"] == 1 / 13
    assert (found["pieces"], found["pieces_used"], found["pieces_below_10"]) == (26, 3, 26)
    assert found["counts_by_rank"] == [[1, 6], [2, 2], [3, 1]]  # a, b, c
    assert (found["sentences"], found["skipped"]) == (17, {"empty documents": 3})


def test_ten_uses_are_not_below_ten():
    assert figures(["a" * 10 + "b" * 9])["pieces_below_10"] == 25


def test_bytes_of_sentencepiece_are_unknown_characters():
    tokenizer = BPE(vocab_size=280).build(iter(["abracadabra " * 50]))
    ids = tokenizer.encode("é")  # two bytes
    counts = np.bincount(tokenizer.encode("abraé"), minlength=tokenizer.vocabulary.size)
    assert len(ids) == 2 and unknown_share(counts, tokenizer) == 2 / counts.sum()


def test_splits_know_what_they_share_with_earlier_ones():
    found = measure({"train": corpus(["ab", "cd", "cd"]), "valid": corpus(["cd", "cd", "x"])}, TOKENIZER)
    assert found["train"]["in_earlier_splits"] == {} and found["train"]["duplicates"] == 1
    assert found["valid"]["in_earlier_splits"] == {"train": 2}


# --- against NumPy -------------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(0, 300) | st.integers(0, 20_000), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(LENGTHS)
def test_quantiles_of_lengths(lengths):
    found = figures([np.full(n, FIRST) for n in lengths])["length_quantiles"]
    for q, length in found.items():
        exact = np.quantile(np.array(lengths) + 1, float(q), method="inverted_cdf")
        assert length <= exact <= np.floor(length * 2 ** (1 / 64)) + 1  # The width of a bin is 1 below 64.


@settings(max_examples=50, deadline=None)
@given(LENGTHS)
def test_histogram_of_lengths(lengths):
    bars = figures([np.full(n, FIRST) for n in lengths])["length_histogram"]
    by_hand = collections.Counter(int(np.floor(2 * np.log2(n + 1) + 1e-9)) for n in lengths)
    assert {round(2 * np.log2(start)): count for start, count in bars} == by_hand


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab", max_size=4), min_size=1, max_size=40), st.integers(1, 9))
def test_duplicates_in_blocks_of_any_size(documents, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_BLOCK", block)
        patch.setattr(report, "_HASHES_PER_BLOCK", 4)
        found = figures(documents)
    assert found["duplicates"] == len(documents) - len(set(documents)) and found["duplicates_compared"] == 1
    assert found["longest"]["tokens"] == max(map(len, documents)) + 1
    assert sum(count for _, count in found["length_histogram"]) == len(documents)


# --- more documents than the limit ---------------------------------------------------------------------------------

HASHES = np.random.default_rng(0).integers(1 << 63, size=60_000).astype(np.uint64)


def test_duplicates_of_many_documents_are_estimated():
    twice = DocumentHashes(iter(np.split(np.tile(HASHES, 2), 30)), limit=2_000)
    assert twice.level == 5  # 60,000 / 2^5 = 1,875
    # The sample includes each of 60,000 documents with probability 1/32. The standard deviation of the estimate is
    # sqrt(31 / 60,000) = 2.3 %; the tolerance is 5 of them.
    assert abs(twice.duplicates / 60_000 - 1) < 5 * 0.023


def test_shared_documents_are_estimated_from_the_same_sample():
    whole, part = DocumentHashes(iter([HASHES]), limit=2_000), DocumentHashes(iter([HASHES[:20_000]]), limit=2_000)
    assert whole.level == 5 and part.level == 4
    # As above, with 20,000 documents: sqrt(31 / 20,000) = 3.9 %; the tolerance is 5 standard deviations.
    assert abs(part.among(whole) / 20_000 - 1) < 5 * 0.039
    assert DocumentHashes(iter([HASHES[:1000]])).among(DocumentHashes(iter([HASHES[1000:]]))) == 0


def test_copies_of_one_document_need_no_room():
    same = DocumentHashes(iter([np.full(1000, 7, np.uint64)] * 10), limit=5)
    assert (same.level, same.duplicates) == (0, 9_999)


# --- table ---------------------------------------------------------------------------------------------------------


def test_table_has_a_column_a_split_of_one_width():
    found = measure({"train": corpus(["ab", "ab"]), "valid": corpus(["ab" * 600])}, TOKENIZER)
    lines = report.table(found).splitlines()
    assert len({len(line) for line in lines}) == 1
    cells = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in lines}
    assert cells[""] == ["train", "valid"]
    assert cells["documents"] == ["2", "1"] and cells["tokens"] == ["6", "1,201"]
    assert cells["duplicates of earlier documents"] == ["1 (50.00%)", "0 (0.00%)"]
    assert cells["documents that are in train too"] == ["", "0 (0.00%)"]
    assert cells["skipped: empty documents"] == ["3", "3"]
