"""A file has its old content or its new one, and nothing is left beside it."""

import os

import pytest

from pretrainax.config.atomic_files import replacing, write_atomically


@pytest.mark.parametrize("content, expected", [("grün\n", "grün\n".encode()), (b"\x00\xff", b"\x00\xff")])
def test_text_is_utf_8_and_bytes_are_as_they_are(tmp_path, content, expected):
    write_atomically(str(tmp_path / "file"), content)
    assert (tmp_path / "file").read_bytes() == expected


def test_the_old_content_stays_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(str(path)) as f:
        f.write(b"new")
        f.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_of_a_file_that_fails_nothing_is_left(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(str(path)) as f:
        f.write(b"ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
