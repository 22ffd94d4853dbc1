"""Implements a data source that reads ArrayRecord files."""

import collections
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Optional

from pretrainax.config import Experiment, UserError
from pretrainax.data import files
from pretrainax.data.sources.base import Document, Source
from pretrainax.data.sources.records import RecordFiles, equal_ranges, json_object, row_location, rows_per_chunk

_BATCH_BYTES = 1 << 22  # bytes of records in memory at a time; a larger record is read alone


@dataclasses.dataclass
class ArrayRecord(RecordFiles, Source):
    """Reads ArrayRecord files whose records are UTF-8 text or, with `text_field`, JSON objects.

    `path` is a file, a folder (all .array_record and .arrayrecord files in it and its subfolders) or a glob. A shard is
    a range of records. Without `valid_path`, a hash of the text selects `valid_fraction` of the documents for
    validation. ArrayRecord decompresses a whole group of records at a time (the writer's `group_size`), so a group must
    fit in memory.
    """

    text_field: Optional[str] = dataclasses.field(
        default=None, kw_only=True
    )  # JSON field with the text; None: records are plain text

    endings: ClassVar[tuple[str, ...]] = (".array_record", ".arrayrecord")

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.target_field is not None and self.text_field is None:
            yield f"{self.config_path}.target_field is {self.target_field!r}: set {self.config_path}.text_field too"

    def _shard_ranges(self, file: str) -> Iterator[tuple[int, int]]:
        return equal_ranges(_open_reader(file).num_records(), os.path.getsize(file))

    def read(self, shard: files.FileShard, skipped: collections.Counter) -> Iterator[Document]:
        def parse(record: bytes) -> Mapping:
            self.check_size(len(record))
            return {None: record} if self.text_field is None and self._task is None else json_object(record)

        return self.documents(_records(shard), parse, row_location(shard.path_or_split), shard.split, skipped)


def _records(shard: files.FileShard) -> Iterator[tuple[int, bytes]]:
    """Yields (index in the file, content) for each record of a shard."""
    path, start, stop, _ = shard
    # The first read has one record, because the size on disk does not determine the size in memory.
    reader, first, rows = _open_reader(path), start, 1
    while first < stop:
        last = min(first + rows, stop)
        try:
            records = reader.read(first, last)
        except (RuntimeError, ValueError, IndexError) as e:
            raise UserError(f"{path}, rows {first} to {last - 1} (from 0): damaged ({e})") from e
        yield from enumerate(records, first)
        first, size = last, sum(map(len, records))
        rows = min(2 * rows, rows_per_chunk(len(records), size, _BATCH_BYTES))


def _open_reader(path: str) -> Any:
    """Opens an ArrayRecord file; raises UserError if the file has no records or is damaged."""
    from array_record.python import array_record_module

    reader = array_record_module.ArrayRecordReader(path, "readahead_buffer_size:0")  # 0: no read-ahead
    if not reader.num_records():  # also 0 for truncated files, because the index is at the end of a file
        raise UserError(f"{path}: not an ArrayRecord file, damaged, or without records")
    return reader
