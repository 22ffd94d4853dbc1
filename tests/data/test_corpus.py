"""Shards on disk hold what was written, and windows and documents are where they should be."""

import collections
import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrainax.config import UserError
from pretrainax.data import corpus
from pretrainax.data.corpus import Corpus
from pretrainax.tokenizer import Characters

TOKENIZER = Characters().build(iter(["abcdefghijklmnopqrstuvwxyz .\n"]))
EOS = TOKENIZER.vocabulary.eos
SIZE = TOKENIZER.vocabulary.size


def write(directory, shards):
    """A corpus of lists of documents, one list a shard."""
    directory = str(directory)
    for i, documents in enumerate(shards):
        corpus.write_shard(directory, i, documents, collections.Counter(), TOKENIZER)
    corpus.write_index(directory, len(shards), SIZE, "fingerprint")
    return Corpus(directory)


def expected(shards):
    """(tokens of all documents one after the other, number of its document for each)."""
    documents = [d for shard in shards for d in shard if d.strip()]
    tokens = [[*TOKENIZER.encode(d), EOS] for d in documents]
    return np.concatenate(tokens), np.repeat(np.arange(len(tokens)), [len(t) for t in tokens])


SHARDS = [["the first", "a"], [], ["second one here"], ["b", "c", "and the last"]]


@pytest.fixture
def small(tmp_path):
    return write(tmp_path, SHARDS)


def test_window_of_everything_is_everything(small):
    np.testing.assert_array_equal(small.window(0, small.num_tokens)[0], expected(SHARDS)[0])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.text(alphabet="ab ", max_size=6), max_size=4), min_size=1, max_size=5), st.data())
def test_any_window_spans_shards_and_documents(tmp_path_factory, shards, data):
    shards = [*shards, ["ab"]]
    written, (tokens, owners) = write(tmp_path_factory.mktemp("corpus"), shards), expected(shards)
    start = data.draw(st.integers(0, len(tokens) - 1))
    length = data.draw(st.integers(1, len(tokens) - start))
    window, segment_ids = written.window(start, length)
    np.testing.assert_array_equal(window, tokens[start : start + length])
    np.testing.assert_array_equal(segment_ids, owners[start : start + length] - owners[start] + 1)


def test_window_is_int32(small):
    assert [x.dtype for x in small.window(3, 9)] == [np.int32, np.int32]


@pytest.mark.parametrize(("start", "length"), [(-1, 4), (0, 0), (0, 10**6), (10**6, 1)])
def test_window_outside_is_an_error(small, start, length):
    with pytest.raises(ValueError, match="of a corpus of"):
        small.window(start, length)


def test_documents_are_separated_texts(small):
    documents = [TOKENIZER.decode(small.document(i)) for i in range(small.num_documents)]
    assert documents == [d + "</s>" for shard in SHARDS for d in shard]


def test_document_outside_is_an_error(small):
    with pytest.raises(IndexError):
        small.document(small.num_documents)


def test_totals_are_those_of_the_text(small):
    documents = [d for shard in SHARDS for d in shard]
    assert (small.num_documents, small.num_bytes) == (len(documents), sum(map(len, documents)))


def test_token_counts_are_those_of_the_tokens(small):
    np.testing.assert_array_equal(small.token_counts, np.bincount(expected(SHARDS)[0], minlength=SIZE))


def test_empty_documents_are_skipped_and_counted(tmp_path):
    skipped = collections.Counter()
    corpus.write_shard(str(tmp_path), 0, ["", "a", " \n"], skipped, TOKENIZER)
    corpus.write_index(str(tmp_path), 1, SIZE, "fingerprint")
    assert Corpus(str(tmp_path)).skipped == {"empty documents": 2} and Corpus(str(tmp_path)).num_documents == 1


def test_long_document_is_tokenized_in_parts_and_stays_one(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_BATCH_CHARACTERS", 10)
    text = "some words\nand more of them\nwithoutanyspacesforaverylongtime"
    written = write(tmp_path, [["before", text, "after"]])
    np.testing.assert_array_equal(written.document(1), [*TOKENIZER.encode(text), EOS])


def test_pickle_is_small_and_opens_the_same(small):
    small.window(0, 10)
    pickled = pickle.dumps(small)
    assert len(pickled) < 300
    np.testing.assert_array_equal(pickle.loads(pickled).window(2, 20)[0], small.window(2, 20)[0])


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_take_two_bytes_where_they_fit(size, dtype):
    assert corpus.token_dtype(size) == dtype


def test_ids_over_16_bits_survive(tmp_path):
    characters = "".join(chr(c) for c in range(0x10000, 0x10000 + 66_000))
    tokenizer = Characters().build(iter([characters]))
    corpus.write_shard(str(tmp_path), 0, [characters], collections.Counter(), tokenizer)
    corpus.write_index(str(tmp_path), 1, tokenizer.vocabulary.size, "fingerprint")
    assert tokenizer.decode(Corpus(str(tmp_path)).document(0)[:-1]) == characters


def test_truncated_shard_is_named(small):
    path = os.path.join(small.directory, "00002.tokens")
    os.truncate(path, 4)
    with pytest.raises(UserError, match=r"00002\.tokens is damaged: delete .* and prepare again"):
        small.window(0, small.num_tokens)


def test_shard_that_fails_half_way_leaves_nothing(tmp_path):
    def documents():
        yield "a"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        corpus.write_shard(str(tmp_path), 0, documents(), collections.Counter(), TOKENIZER)
    assert os.listdir(tmp_path) == []


def test_missing_shards_are_those_without_totals_or_tokens(small):
    os.remove(os.path.join(small.directory, "00000.json"))
    os.truncate(os.path.join(small.directory, "00003.tokens"), 2)
    assert corpus.missing_shards(small.directory, 5, SIZE) == [0, 3, 4]


def test_folder_without_index_is_no_corpus(tmp_path):
    with pytest.raises(ValueError, match="holds no prepared corpus"):
        Corpus(str(tmp_path))
