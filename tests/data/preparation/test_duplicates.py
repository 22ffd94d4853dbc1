"""Tests that only the first of equal documents remains, and that nothing else changes."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrainax.data.corpus import Corpus
from pretrainax.data.preparation import duplicates, shards
from pretrainax.tokenization import Characters

TOKENIZER = Characters().build(iter(["abc. "]))
SIZE = TOKENIZER.vocabulary.size


def write(directory, lists, parts=None):
    directory.mkdir()
    for i, documents in enumerate(lists):
        with shards.ShardWriter(str(directory), i, TOKENIZER, parts) as writer:
            list(duplicates.write_hashes(writer.write(documents, collections.Counter()), str(directory), i))


def joined(directory, count, parts=None):
    shards.write_index(str(directory), count, SIZE, "fingerprint", parts)
    return Corpus(str(directory))


TEXTS = st.sampled_from(["a", "b. c.", "ab", "abc. a. b.", "", "ca"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(TEXTS, max_size=6), min_size=1, max_size=4), st.sampled_from([None, "sentences"]))
def test_corpus_without_duplicates_is_the_corpus_of_the_others(tmp_path_factory, lists, parts):
    tmp_path = tmp_path_factory.mktemp("duplicates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_HASHES_PER_RANGE", 3)  # several ranges of hashes
        write(tmp_path / "whole", lists, parts)
        found = duplicates.find_duplicates(str(tmp_path / "whole"), len(lists))
    (tmp_path / "kept").mkdir()
    for i, numbers in enumerate(found):
        reasons = {"duplicates": numbers}
        duplicates.copy_shard_without(str(tmp_path / "whole"), str(tmp_path / "kept"), i, reasons, "uint16")
    seen = {""}
    firsts = [[d for d in documents if d not in seen and not seen.add(d)] for documents in lists]
    write(tmp_path / "wanted", firsts, parts)
    kept = joined(tmp_path / "kept", len(lists), parts)
    wanted = joined(tmp_path / "wanted", len(lists), parts)
    for name in ("documents.bin", "counts.bin", *(["parts.bin"] if parts else [])):
        assert (tmp_path / "kept" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()
    for i in range(len(lists)):
        name = f"{i:05d}.tokens"
        assert (tmp_path / "kept" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()
    assert kept.num_bytes == wanted.num_bytes
    dropped = sum(len([d for d in documents if d]) for documents in lists) - wanted.num_documents
    assert kept.skipped.get("duplicates", 0) == dropped


def test_pairs_are_equal_when_both_parts_are(tmp_path):
    write(tmp_path / "pairs", [[("ab", "c"), ("a", "bc"), ("ab", "c")]], "pairs")
    assert [n.tolist() for n in duplicates.find_duplicates(str(tmp_path / "pairs"), 1)] == [[2]]


def test_utf_8_and_string_are_equal(tmp_path):
    write(tmp_path / "both", [["abc"], [bytearray(b"abc")]])
    np.testing.assert_array_equal(duplicates.find_duplicates(str(tmp_path / "both"), 2)[1], [0])
