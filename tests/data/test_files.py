"""Tests that reading an archive returns all of its content or fails, and that splitting files loses nothing."""

import gzip
import lzma
import sys

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrainax.config import UserError
from pretrainax.data import files
from pretrainax.data.sources import TextFiles

COMPRESS = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "zst": lambda content: zstandard.ZstdCompressor().compress(content),
}
LINES = b"".join(b"line %d \xe2\x82\xac\n" % i for i in range(20_000))


def written(folder, kind, content):
    path = folder / f"a.{kind}"
    path.write_bytes(content)
    return str(path)


def content_of(path):
    with files.open_decompressed(path) as f:
        return f.read()


@pytest.mark.parametrize("kind", COMPRESS)
def test_archive_is_read_as_its_content(tmp_path, kind):
    assert content_of(written(tmp_path, kind, COMPRESS[kind](LINES))) == LINES


@pytest.mark.parametrize("kind", COMPRESS)
def test_endings_may_be_in_upper_case(tmp_path, kind):
    """Files from Windows may have such names; an earlier version ignored these files of a folder silently."""
    (tmp_path / "A.TXT").write_text("one")
    path = tmp_path / f"B.TXT.{kind.upper()}"
    path.write_bytes(COMPRESS[kind](LINES))
    source = TextFiles(str(tmp_path))
    assert files.find_files(source, "train", source.endings) == [str(tmp_path / "A.TXT"), str(path)]
    assert content_of(str(path)) == LINES and TextFiles.reader_of(str(path)) == "TextFiles"


@pytest.mark.parametrize("kind", COMPRESS)
def test_archives_behind_each_other_are_one(tmp_path, kind):
    parts = [LINES[:1000], b"", LINES[1000:1001], LINES[1001:]]
    assert content_of(written(tmp_path, kind, b"".join(map(COMPRESS[kind], parts)))) == LINES


@pytest.mark.parametrize("kind", COMPRESS)
def test_archive_of_nothing_holds_nothing(tmp_path, kind):
    assert content_of(written(tmp_path, kind, COMPRESS[kind](b""))) == b""


@pytest.mark.parametrize("kind", COMPRESS)
def test_archive_that_is_cut_off_names_file_and_line(tmp_path, kind):
    path = written(tmp_path, kind, COMPRESS[kind](LINES[:9000]) + COMPRESS[kind](LINES[9000:])[:-9])
    with pytest.raises(UserError, match=rf"a\.{kind}:(\d+): the {files.ARCHIVES['.' + kind]} file is broken here") as e:
        content_of(path)
    assert int(str(e.value).split(":")[1]) > LINES[:9000].count(b"\n")


@pytest.mark.parametrize("kind", COMPRESS)
def test_archive_with_a_wrong_byte_is_named(tmp_path, kind):
    content = bytearray(COMPRESS[kind](LINES))
    content[len(content) // 2 : len(content) // 2 + 50] = b"\xff" * 50
    with pytest.raises(UserError, match=rf"a\.{kind}:\d+: the {files.ARCHIVES['.' + kind]} file is broken here"):
        content_of(written(tmp_path, kind, content))


@pytest.mark.parametrize("kind", COMPRESS)
def test_file_that_is_no_archive_is_named(tmp_path, kind):
    with pytest.raises(UserError, match=rf"a\.{kind}:1: the {files.ARCHIVES['.' + kind]} file is broken here"):
        content_of(written(tmp_path, kind, b"no archive"))


def test_missing_package_is_named_with_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = written(tmp_path, "zst", COMPRESS["zst"](b"x"))
    with pytest.raises(
        UserError, match=r"is compressed and needs the package zstandard: pip install 'pretrainax\[data\]'"
    ):
        content_of(path)


@pytest.mark.parametrize("kind", ["txt", *COMPRESS])
@settings(max_examples=20, deadline=None)
@given(text=st.text(alphabet="aé字😀\n", max_size=300), share=st.floats(0, 1))
def test_byte_of_a_character_is_where_it_starts(tmp_path_factory, kind, text, share):
    path = written(tmp_path_factory.mktemp("files"), kind, COMPRESS.get(kind, bytes)(text.encode()))
    wanted = len(text[: int(share * len(text))].encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_CHUNK", 7)
        assert files.byte_of_character(path, share) == wanted
        assert files.line_number(path, wanted) == 1 + text.encode()[:wanted].count(b"\n")


@pytest.mark.parametrize("kind", ["txt", *COMPRESS])
@settings(max_examples=20, deadline=None)
@given(text=st.text(alphabet="aé字😀\n", max_size=500), start=st.integers(0, 100))
def test_pieces_are_the_whole_in_characters(tmp_path_factory, kind, text, start):
    path = written(tmp_path_factory.mktemp("files"), kind, COMPRESS.get(kind, bytes)(text.encode()))
    first = len(text[:start].encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "SHARD_BYTES", 20)
        pieces = list(files.pieces(path, first, None, longest_line=10))
    assert "".join(piece.decode() for _, piece in pieces) == text[start:]
    assert [offset for offset, _ in pieces] == [first + sum(len(p) for _, p in pieces[:i]) for i in range(len(pieces))]


@settings(max_examples=30, deadline=None)
@given(text=st.text(alphabet="aé字😀\n", max_size=500))
def test_ranges_are_what_pieces_gives(tmp_path_factory, text):
    path = written(tmp_path_factory.mktemp("files"), "txt", text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "SHARD_BYTES", 20)
        ranges = list(files.ranges(path, 0, len(text.encode()), longest_line=10))
        pieces = list(files.pieces(path, 0, None, longest_line=10))
    assert [part.start for part in ranges] == [offset for offset, _ in pieces]
