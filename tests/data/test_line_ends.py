"""Tests that every source removes byte-order marks and the carriage returns of Windows' line ends, and counts them."""

import collections
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import UserError
from pretrainax.data import files, long_lines
from pretrainax.data.line_ends import MARKS, RETURNS, normalize_line_ends
from pretrainax.data.sources import HuggingFace, JsonLines, TextFiles
from tests.data.sources.test_sources_tables import both
from tests.support.reading import texts, write_lines

DIRTY, CLEAN = "\ufeffone\r\ntwo\r\n", "one\ntwo\n"


@given(st.text(alphabet="a\r\n\ufeffé"))
def test_text_and_its_utf8_are_made_plain_in_the_same_way(text):
    of_text, of_bytes = collections.Counter(), collections.Counter()
    made = normalize_line_ends(text, of_text)
    assert normalize_line_ends(bytearray(text.encode()), of_bytes).decode() == made and of_text == of_bytes
    assert "\r\n" not in made or "\r\r\n" in text
    assert len(text) - len(made) == of_text.total()


@pytest.mark.parametrize("text", ["", "one\ntwo", "a\rb", "x\ufeffy"])
def test_plain_text_stays(text):
    found = collections.Counter()
    assert normalize_line_ends(text, found) == text and not found


def test_text_files_are_made_plain_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(DIRTY.encode())
    skipped = collections.Counter()
    source = TextFiles(str(tmp_path / "a.txt"), valid_path=str(tmp_path / "a.txt"))
    assert texts(source, "train", skipped) == [CLEAN] and skipped == {MARKS: 1, RETURNS: 2}


def test_no_carriage_return_is_left_where_a_text_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 16)
    (tmp_path / "a.txt").write_bytes(b"words\r\n" * 300)
    for fraction in (0.1, 0.101, 0.102, 0.103, 0.104):  # Some cut within a line end.
        source = TextFiles(str(tmp_path / "a.txt"), valid_fraction=fraction)
        assert "\r" not in "".join(texts(source, "train") + texts(source, "valid"))


@pytest.mark.parametrize("length", [1, 1 << 22], ids=["short", "long"])
def test_json_lines_are_made_plain_and_counted_once(tmp_path, monkeypatch, length):
    monkeypatch.setattr(long_lines, "LONG_LINE_BYTES", min(long_lines.LONG_LINE_BYTES, 10 * length))
    lines = [json.dumps({"text": DIRTY + "x" * 200 + str(i)}) + "\r\n" for i in range(20)]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "".join(lines).encode())
    source, skipped = JsonLines(str(tmp_path / "a.jsonl"), valid_fraction=0.5), collections.Counter()
    documents = texts(source, "train", skipped) + texts(source, "valid", skipped)
    documents = [d if isinstance(d, str) else d.decode() for d in documents]
    assert sorted(documents) == sorted(CLEAN + "x" * 200 + str(i) for i in range(20))
    assert skipped == {MARKS: 21, RETURNS: 40}


@pytest.mark.parametrize("kind", [0, 1], ids=["Parquet", "ArrayRecord"])
def test_tables_are_made_plain_and_counted(tmp_path, kind):
    source, path = both(tmp_path, {"text": [DIRTY, "plain"]})[kind]
    skipped = collections.Counter()
    assert texts(source(path, valid_path=path, text_field="text"), "train", skipped) == [CLEAN, "plain"]
    assert skipped == {MARKS: 1, RETURNS: 2}


def test_hugging_face_sets_and_targets_are_made_plain(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": DIRTY, "target": DIRTY}])
    source = HuggingFace("json", data_files=(path,), target_field="target", valid_fraction=1e-9)
    skipped = collections.Counter()
    assert texts(source, "train", skipped) == [(CLEAN, CLEAN)] and skipped == {MARKS: 2, RETURNS: 4}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_is_told_with_what_mends_it(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("\ufeffsome text\n".encode(encoding))
    with pytest.raises(UserError, match=r"a\.txt is UTF-16, not UTF-8: convert it with iconv -f UTF-16 -t UTF-8"):
        texts(TextFiles(str(tmp_path), valid_path=str(tmp_path)), "train")
