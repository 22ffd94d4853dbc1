"""Tests that `max_record_bytes` limits the size of a record and the memory to read it, also in compressed files."""

import collections
import gzip
import json
import lzma
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter

from pretrainax.config import UserError
from pretrainax.data import files, long_lines
from pretrainax.data.sources import ArrayRecord, HuggingFace, JsonLines, Parquet
from tests.support.reading import texts, write_lines

LIMIT = 1 << 20
RECORDS = [{"text": "short"}, {"text": "x" * (LIMIT + 50)}, {"text": "last"}]
COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def write(path, kind):
    """Writes three records, the second too large, to a file of `kind`; returns its source and the record's place."""
    if kind in COMPRESS:
        path = path.with_suffix(f".jsonl{kind}")
        path.write_bytes(COMPRESS[kind]("".join(json.dumps(r) + "\n" for r in RECORDS).encode()))
        return JsonLines(str(path), valid_path=str(path)), rf"{path.name}:2"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(RECORDS), path, compression="zstd")
        return Parquet(str(path), valid_path=str(path)), rf"{path.name}, row 1 \(from 0\)"
    if kind == "hugging face":
        lines = write_lines(path, RECORDS)
        source = HuggingFace("json", data_files=(lines,), valid_data_files=(lines,), valid_split="validation")
        return source, r"train, row 1 \(from 0\)"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in RECORDS:
        writer.write(json.dumps(record).encode())
    writer.close()
    return ArrayRecord(str(path), valid_path=str(path), text_field="text"), rf"{path.name}, row 1 \(from 0\)"


@pytest.mark.parametrize("kind", [*COMPRESS, "parquet", "array_record", "hugging face"])
def test_record_over_the_limit_is_named_or_skipped(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(long_lines, "LONG_LINE_BYTES", 1 << 16)
    source, where = write(tmp_path / "a", kind)
    source.max_record_bytes = LIMIT
    size = r"a record of 1,\d\d\d,\d\d\d bytes or more, config.data.source.max_record_bytes is 1,048,576: raise it"
    with pytest.raises(UserError, match=f"{where}: {size}"):
        texts(source, "train")
    source.on_error, skipped = "skip", collections.Counter()
    assert texts(source, "train", skipped) == ["short", "last"] and skipped.total() == 1
    source.on_error, source.max_record_bytes = "stop", files.MAX_RECORD_BYTES
    assert len(texts(source, "train")) == 3


@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
def test_line_takes_no_more_memory_than_the_limit(tmp_path, kind):
    """The line has 64 MB; the reader stores at most the limit and one read in memory."""
    path = tmp_path / f"a.jsonl{kind}"
    path.write_bytes(COMPRESS[kind](b'{"text": "' + b"x" * (64 << 20) + b'"}\n'))
    source = JsonLines(str(path), valid_path=str(path), max_record_bytes=LIMIT, on_error="skip")
    tracemalloc.start()
    assert texts(source, "train") == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 << 20


@pytest.mark.slow
def test_table_that_swells_takes_memory_by_what_is_decoded(tmp_path, monkeypatch):
    """A file of a few kB has one value of 1 MB that 400 rows share; the reader decodes a few rows at a time."""
    monkeypatch.setattr("pretrainax.data.sources.parquet._DECODED_BYTES", 8 << 20)
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": pa.array(["x" * LIMIT] * 400)}), path, compression="zstd")
    before, most = pa.total_allocated_bytes(), 0
    for shard in (source := Parquet(path, valid_path=path)).shards("train"):
        for document in source.read(shard, collections.Counter()):
            assert len(document) == LIMIT
            most = max(most, pa.total_allocated_bytes() - before)
    assert most < 48 << 20


def test_records_that_swell_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    """A file has 50 records of 1 MB, each a few hundred bytes on disk; the reader decodes 8 MB at a time."""
    from array_record.python import array_record_module

    path, sizes, reader = str(tmp_path / "a.array_record"), [], array_record_module.ArrayRecordReader
    writer = ArrayRecordWriter(path, "group_size:1")
    for i in range(50):
        writer.write((str(i) + "x" * LIMIT).encode())
    writer.close()

    class Watched(reader):
        def read(self, *place):
            records = super().read(*place)
            sizes.append(sum(map(len, records)))
            return records

    monkeypatch.setattr(array_record_module, "ArrayRecordReader", Watched)
    assert len(texts(ArrayRecord(path, valid_path=path), "train")) == 50
    assert max(sizes) < 9 << 20


def test_zstandard_is_read_in_time_that_grows_as_its_content(tmp_path):
    """The reader copies each part of a frame's content once; the test measures memory instead of time."""
    path = tmp_path / "a.zst"
    path.write_bytes(zstandard.compress(b"x" * (32 << 20)))
    reader, buffer, most = files._Generated(files._zstandard_frames(str(path))), bytearray(1 << 16), 0
    tracemalloc.start()
    while reader.readinto(buffer):
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        reader.readinto(buffer)
        if tracemalloc.get_traced_memory()[0] <= before:  # nothing was decompressed
            most = max(most, tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    assert most < 1 << 18


@pytest.mark.parametrize("limit", [0, -1])
def test_impossible_limit_is_a_problem_of_the_config(tmp_path, limit):
    (problem,) = JsonLines(str(tmp_path), max_record_bytes=limit).problems(None)
    assert problem == f"config.data.source.max_record_bytes is {limit}, it must be at least 1"


def test_fingerprint_is_that_of_before_there_was_a_limit_until_it_is_set(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    assert "max_record_bytes" not in files.settings_of(JsonLines(path))
    assert JsonLines(path, max_record_bytes=9).fingerprint() != JsonLines(path).fingerprint()
