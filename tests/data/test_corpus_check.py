"""Tests that a run compares a corpus with its checksums while reading it, and ends if one byte has changed."""

import json
import os
import pathlib

import pytest

from pretrainax.config import UserError
from pretrainax.data.corpus import Corpus
from pretrainax.data.corpus_check import CorpusCheck
from tests.data.test_corpus import write


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    return write(tmp_path, [["the first", "a"], ["second one here"], ["b", "and the last"]])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_whole_corpus_is_read_to_the_end(corpus):
    with CorpusCheck([corpus]) as check:
        check.wait()
    assert check.left == 0 and not check.unknown
    assert set(corpus.checksums) == {f"0000{i}.tokens" for i in range(3)} | {"documents.bin", "counts.bin"}


@pytest.mark.parametrize("name", ["00001.tokens", "documents.bin", "counts.bin"])
def test_file_with_another_byte_is_named_with_what_to_do(corpus, name):
    flip(pathlib.Path(corpus.directory) / name)
    with CorpusCheck([corpus]) as check, pytest.raises(UserError, match=rf"{name} is damaged: delete .* and prepare"):
        check.wait()


def test_file_that_is_gone_is_named(corpus):
    os.remove(os.path.join(corpus.directory, "00002.tokens"))
    with CorpusCheck([corpus]) as check, pytest.raises(UserError, match=r"00002\.tokens is damaged: .*No such file"):
        check.wait()


def test_processes_share_the_files_out(corpus):
    flip(pathlib.Path(corpus.directory) / "00001.tokens")
    damaged = []
    for process in range(3):
        with CorpusCheck([corpus], process, 3) as check:
            try:
                check.wait()
            except UserError:
                damaged.append(process)
    assert len(damaged) == 1


def test_corpus_of_before_there_were_checksums_is_read_and_told(corpus):
    path = pathlib.Path(corpus.directory) / "index.json"
    index = json.loads(path.read_text())
    del index["checksums"], index["checksum"]
    path.write_text(json.dumps(index))
    old = Corpus(corpus.directory)
    with CorpusCheck([old]) as check:
        check.wait()
    assert check.unknown == [corpus.directory] and old.tokens(0, 3).tolist() == corpus.tokens(0, 3).tolist()
