"""Tests that shards store the tokens of documents of any length, and the ends of their parts."""

import collections
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrainax.data.corpus import Corpus
from pretrainax.data.preparation import sentences, shards
from pretrainax.tokenization import ByteBPE, Characters, WordPiece

TOKENIZER = Characters().build(iter(["abcdefghijklmnopqrstuvwxyz .\n"]))
EOS = TOKENIZER.vocabulary.eos
SIZE = TOKENIZER.vocabulary.size


def write(directory, documents, tokenizer=TOKENIZER, parts=None):
    """Writes one shard; returns (its corpus, the documents that the writer yields, the counts of skipped documents)."""
    skipped = collections.Counter()
    with shards.ShardWriter(str(directory), 0, tokenizer, parts) as writer:
        written = list(writer.write(documents, skipped))
    shards.write_index(str(directory), 1, tokenizer.vocabulary.size, "fingerprint", parts)
    return Corpus(str(directory)), written, skipped


def documents_of(corpus):
    return [corpus.document(i).tolist() for i in range(corpus.num_documents)]


def parts_of(corpus):
    return [p.tolist() for p in np.split(corpus.tokens(0, corpus.num_tokens), corpus.part_ends[:-1])]


def ids(text):
    return TOKENIZER.encode(text).tolist()


def test_empty_documents_are_skipped_and_counted(tmp_path):
    corpus, written, skipped = write(tmp_path, ["", "a", " \n"])
    assert skipped == corpus.skipped == {"empty documents": 2}
    assert written == ["a"] and documents_of(corpus) == [[*ids("a"), EOS]]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.text(alphabet="ab é字😀\n.", max_size=40), max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.sampled_from([None, "sentences"]),
)
def test_documents_are_tokenized_in_pieces_and_stay_whole(tmp_path_factory, texts, as_bytes, parts):
    tokenizer = Characters().build(iter(["ab é字😀\n."]))
    documents = [bytearray(t.encode()) if b else t for t, b in zip(texts, as_bytes, strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH", 10)
        corpus, written, _ = write(tmp_path_factory.mktemp("shards"), documents, tokenizer, parts)
    wanted = [t for t in texts if t.strip()]
    assert [w if isinstance(w, str) else w.decode() for w in written] == wanted
    assert [tokenizer.decode(d[:-1]) for d in documents_of(corpus)] == wanted
    assert corpus.num_bytes == sum(len(t.encode()) for t in wanted)
    if parts:
        np.testing.assert_array_equal(np.intersect1d(corpus.part_ends, corpus.document_ends), corpus.document_ends)


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="ab é字😀\n"), st.integers(4, 12))
def test_pieces_are_short_and_make_up_the_text(text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH", size)
        for document in (text, bytearray(text.encode())):
            pieces = list(shards.split_text(document))
            assert "".join(pieces) == text
            assert all(len(p if isinstance(document, str) else p.encode()) <= size for p in pieces)


def test_long_text_is_cut_after_a_line_or_before_a_space(monkeypatch):
    monkeypatch.setattr(shards, "BATCH", 10)
    assert list(shards.split_text("ab cd\nef ghijkl mnopqrstuvwxyz")) == ["ab cd\n", "ef ghijkl", " mnopqrstu", "vwxyz"]


def test_sentences_end_where_they_do(tmp_path):
    texts = ["One here. Two there.", "and a third"]
    tokenizer = ByteBPE(vocab_size=270).build(texts * 10)
    corpus, _, _ = write(tmp_path, texts, tokenizer, "sentences")
    assert corpus.parts == "sentences" and corpus.num_parts == 3
    first, second, third = map(tokenizer.decode, parts_of(corpus))
    eos = "<|endoftext|>"
    assert (first, second + third) == ("One here.", " Two there." + eos + "and a third" + eos)


def test_sentence_of_no_known_character_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sentences, "split", lambda text: text.split("|"))
    monkeypatch.setattr(type(TOKENIZER), "_encode", lambda self, text: ids_without_marks(text))
    corpus, _, _ = write(tmp_path, ["a|!!|b|!!", "!|!"], parts="sentences")
    assert parts_of(corpus) == [[5], [5, EOS]] and corpus.skipped == {"empty documents": 1}


def ids_without_marks(text):
    return np.full(len(text.replace("!", "")), 5, np.int32)


def test_pairs_end_each_part_with_the_separator(tmp_path):
    corpus, written, _ = write(tmp_path, [("a", "bc"), ("", "b"), ("d", " "), ("ef", "g")], parts="pairs")
    assert parts_of(corpus) == [[*ids(part), EOS] for part in ("a", "bc", "ef", "g")]
    assert documents_of(corpus) == [[*ids("a"), EOS, *ids("bc"), EOS], [*ids("ef"), EOS, *ids("g"), EOS]]
    assert corpus.skipped == {"empty documents": 2} and written == [("a", "bc"), ("ef", "g")]


@pytest.mark.parametrize("parts", [None, "sentences", "pairs"])
def test_batch_of_documents_without_tokens_is_left_out(tmp_path, monkeypatch, parts):
    tokenizer = WordPiece(vocab_size=40).build(iter(["abcdefghijklmnopqrst"]))
    monkeypatch.setattr(shards, "BATCH", 3)
    texts = ["\u200b", "abc", "\0"]  # BERT removes format and control characters.
    corpus, _, _ = write(tmp_path, [(text, text) if parts == "pairs" else text for text in texts], tokenizer, parts)
    assert corpus.num_documents == 1 and corpus.skipped == {"empty documents": 2}


def test_long_parts_of_a_pair_stay_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BATCH", 10)
    pair = ("some words and more of them", "without")
    corpus, _, _ = write(tmp_path, [pair, ("a", "b")], parts="pairs")
    assert parts_of(corpus) == [[*ids(part), EOS] for part in (*pair, "a", "b")]


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_take_two_bytes_where_they_fit(size, dtype):
    assert shards.token_dtype(size) == dtype


def test_ids_over_16_bits_survive(tmp_path):
    characters = "".join(chr(c) for c in range(0x10000, 0x10000 + 66_000))
    tokenizer = Characters().build(iter([characters]))
    corpus, _, _ = write(tmp_path, [characters], tokenizer)
    assert tokenizer.decode(corpus.document(0)[:-1]) == characters


def test_shard_that_fails_half_way_leaves_nothing(tmp_path):
    def documents():
        yield "a"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write(tmp_path, documents())
    assert os.listdir(tmp_path) == []


def test_missing_shards_are_those_without_totals_or_tokens(tmp_path):
    for i in range(4):
        with shards.ShardWriter(str(tmp_path), i, TOKENIZER) as writer:
            list(writer.write(["abc"], collections.Counter()))
    os.remove(tmp_path / "00000.json")
    os.truncate(tmp_path / "00003.tokens", 2)
    assert shards.missing_shards(str(tmp_path), 5, SIZE) == [0, 3, 4]
