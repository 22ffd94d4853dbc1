"""Tests the checksums of cached files, which detect one changed byte."""

import json
import threading

import pytest

from pretrainax.data import checksums


def test_checksum_of_a_file_is_that_of_what_was_written(tmp_path):
    written = checksums.new_hash()
    written.update(b"some ")
    written.update(b"tokens")
    (tmp_path / "a").write_bytes(b"some tokens")
    assert checksums.file_checksum(str(tmp_path / "a")) == written.hexdigest()


def test_checksum_is_given_up_when_nobody_wants_it(tmp_path):
    (tmp_path / "a").write_bytes(b"some tokens")
    stop = threading.Event()
    stop.set()
    assert checksums.file_checksum(str(tmp_path / "a"), stop) == checksums.new_hash().hexdigest()


def test_json_of_which_any_byte_is_another_one_is_none_or_the_same(tmp_path):
    path, value = tmp_path / "a.json", {"tokens": 120, "skipped": {"é": 1.5}, "shards": [60, 60]}
    checksums.write_json(str(path), value)
    content, seen = path.read_bytes(), []
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        seen.append(checksums.read_json(str(path)))
    assert seen.count(None) > 0.8 * len(content)
    assert all({key: found[key] for key in value} == value for found in seen if found is not None)


@pytest.mark.parametrize("content", ["", '{"tokens": 1', "[1]", "3", "\xff"])
def test_json_that_is_none_of_ours_is_none(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content.encode("latin-1"))
    assert checksums.read_json(str(tmp_path / "a.json")) is None
    assert checksums.read_json(str(tmp_path / "missing.json")) is None


def test_json_of_before_there_were_checksums_is_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"tokens": 3}))
    assert checksums.read_json(str(tmp_path / "a.json")) == {"tokens": 3}
