"""A file has either its old or its new content, and no other files remain; the same holds for folders."""

import os
import socket
import subprocess
import sys

import pytest

from pretrainax.files.atomic_files import remove_leftovers, replacing, replacing_folder, write_atomically


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


def write_folder(path, content):
    with replacing_folder(str(path)) as folder:
        with open(os.path.join(folder, "file"), "w") as f:
            f.write(content)
        return folder


def test_a_folder_is_there_when_it_is_complete_and_under_a_name_of_this_process_before(tmp_path):
    before = write_folder(tmp_path / "folder", "new")
    assert os.listdir(tmp_path) == ["folder"] and (tmp_path / "folder" / "file").read_text() == "new"
    assert before == f"{tmp_path / 'folder'}.tmp-{socket.gethostname()}-{os.getpid()}"


def test_of_a_folder_that_fails_nothing_is_left(tmp_path):
    with pytest.raises(KeyboardInterrupt), replacing_folder(str(tmp_path / "folder")):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_the_folder_of_a_faster_process_stays(tmp_path):
    write_folder(tmp_path / "folder", "first")
    write_folder(tmp_path / "folder", "second")
    assert os.listdir(tmp_path) == ["folder"] and (tmp_path / "folder" / "file").read_text() == "first"


def test_what_a_killed_process_of_the_same_number_left_is_no_part_of_a_folder(tmp_path):
    left = tmp_path / f"folder.tmp-{socket.gethostname()}-{os.getpid()}"
    left.mkdir()
    (left / "stray").touch()
    write_folder(tmp_path / "folder", "new")
    assert os.listdir(tmp_path / "folder") == ["file"] and os.listdir(tmp_path) == ["folder"]


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_stays(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host, living = socket.gethostname(), os.getppid()
    stays = [f"a.json.tmp-{host}-{living}", "a.json.tmp-elsewhere-1", "a.json", f"b.tmp-{host}-x", f"tmp-{host}-1"]
    goes = [
        f"a.json.tmp-{host}-{dead.pid}",
        f"b.tmp-{host}-{os.getpid()}",
        "old.tmp-elsewhere-2",
        f"c.tmp-{host}-9999999999",
    ]
    for name in stays + goes:
        (tmp_path / name).write_text("")
    (tmp_path / f"folder.tmp-{host}-{dead.pid}").mkdir()
    (tmp_path / f"folder.tmp-{host}-{dead.pid}" / "a").write_text("")
    os.utime(tmp_path / "old.tmp-elsewhere-2", (0, 0))
    remove_leftovers(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(stays)
