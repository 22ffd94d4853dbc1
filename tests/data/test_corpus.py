"""Tests that a corpus returns the right tokens for its windows and documents."""

import collections
import json
import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrainax.config import UserError
from pretrainax.data.corpus import Corpus
from pretrainax.data.preparation import shards
from pretrainax.tokenization import Characters

TOKENIZER = Characters().build(iter(["abcdefghijklmnopqrstuvwxyz .\n"]))
EOS = TOKENIZER.vocabulary.eos
SIZE = TOKENIZER.vocabulary.size


def write(directory, lists):
    """Writes a corpus of lists of documents, one list per shard."""
    directory = str(directory)
    for i, documents in enumerate(lists):
        with shards.ShardWriter(directory, i, TOKENIZER) as writer:
            list(writer.write(documents, collections.Counter()))
    shards.write_index(directory, len(lists), SIZE, "fingerprint")
    return Corpus(directory)


def expected(shards):
    """Returns (the tokens of all documents in order, the index of each token's document)."""
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
    with pytest.raises(ValueError, match="invalid window"):
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


def test_pickle_is_small_and_opens_the_same(small):
    small.window(0, 10)
    pickled = pickle.dumps(small)
    assert len(pickled) < 300
    np.testing.assert_array_equal(pickle.loads(pickled).window(2, 20)[0], small.window(2, 20)[0])


def test_truncated_shard_is_named(small):
    path = os.path.join(small.directory, "00002.tokens")
    os.truncate(path, 4)
    with pytest.raises(UserError, match=r"00002\.tokens is damaged: delete .* and prepare again"):
        small.window(0, small.num_tokens)


def test_more_tokens_than_31_bits_count(tmp_path):
    """The file has 2^31 + 1,000 tokens; all but the last 3 are a hole that takes no space."""
    size = 2**31 + 1000
    with open(tmp_path / "00000.tokens", "wb") as f:
        f.truncate(2 * size)
        f.seek(2 * (size - 3))
        f.write(np.array([7, 8, 9], np.uint16).tobytes())
    np.array([size - 2, size], np.int64).tofile(tmp_path / "documents.bin")
    index = {"tokens": size, "documents": 2, "bytes": size, "skipped": {}, "parts": None, "num_parts": 0}
    index |= {"fingerprint": "", "dtype": "uint16", "shards": [size]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    tokens, segment_ids = Corpus(str(tmp_path)).window(size - 4, 4)
    assert (tokens.tolist(), segment_ids.tolist()) == ([0, 7, 8, 9], [1, 1, 2, 2])
    assert Corpus(str(tmp_path)).document(1).tolist() == [8, 9]


def test_index_of_shards_with_more_than_31_bits_of_tokens(tmp_path):
    """The first of two shards has 2^31 tokens; joining the shards requires only their totals."""
    for i, (size, ends) in enumerate([(2**31, [5, 2**31]), (3, [3])]):
        arrays = {"ends": np.array(ends), "bytes": np.ones(len(ends), np.int64), "counts": np.array([size, 0])}
        shards.finish_shard(shards.shard_path(str(tmp_path), i), arrays, {}, "checksum")
    shards.write_index(str(tmp_path), 2, 2, "fingerprint")
    assert Corpus(str(tmp_path)).document_ends.tolist() == [5, 2**31, 2**31 + 3]
    assert Corpus(str(tmp_path)).num_tokens == Corpus(str(tmp_path)).token_counts.sum() == 2**31 + 3


@pytest.mark.slow
def test_folder_without_index_is_no_corpus(tmp_path):
    with pytest.raises(ValueError, match="holds no prepared corpus"):
        Corpus(str(tmp_path))
