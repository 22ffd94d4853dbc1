"""A data source that reads ArrayRecord files."""

import collections
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Optional

from pretrainax.config import Experiment, UserError
from pretrainax.data import files
from pretrainax.data.sources.base import Document, Source
from pretrainax.data.sources.records import RecordFiles, equal_ranges, json_object, row_location, rows_per_chunk

_BATCH_BYTES = 1 << 22  # bytes of records in memory at a time; a single larger record is read alone


@dataclasses.dataclass
class ArrayRecord(RecordFiles, Source):
    """Reads ArrayRecord files whose records are UTF-8 text or, with `text_field`, JSON objects.

    `path` is a file, a folder (all .array_record and .arrayrecord files in it and its subfolders) or a glob. A shard is
    a range of records. Without `valid_path`, a hash of the text selects `valid_fraction` of the documents for
    validation. ArrayRecord decompresses whole groups of records (`group_size` of the writer), so a whole group is in
    memory at a time.
    """

    text_field: Optional[str] = dataclasses.field(
        default=None, kw_only=True
    )  # JSON field with the text; None: the whole record is plain text

    endings: ClassVar[tuple[str, ...]] = (".array_record", ".arrayrecord")

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.target_field is not None and self.text_field is None:
            yield f"{self.config_path}.target_field is {self.target_field!r}: set {self.config_path}.text_field too"

    def _cuts(self, file: str) -> Iterator[tuple[int, int]]:
        return equal_ranges(_opened(file).num_records(), os.path.getsize(file))

    def read(self, shard: files.FileShard, skipped: collections.Counter) -> Iterator[Document]:
        def parse(record: bytes) -> Mapping:
            self.check_size(len(record))
            return {None: record} if self.text_field is None and self._task is None else json_object(record)

        return self.documents(_records(shard), parse, row_location(shard.place), shard.split, skipped)


def _records(shard: files.FileShard) -> Iterator[tuple[int, bytes]]:
    path, start, stop, _ = shard
    # The first read has one record, because the size on disk does not show the size in memory.
    reader, first, rows = _opened(path), start, 1
    while first < stop:
        last = min(first + rows, stop)
        try:
            records = reader.read(first, last)
        except (RuntimeError, ValueError, IndexError) as e:
            raise UserError(f"{path}, rows {first} to {last - 1} (from 0): damaged ({e})") from e
        yield from enumerate(records, first)
        first, size = last, sum(map(len, records))
        rows = min(2 * rows, rows_per_chunk(len(records), size, _BATCH_BYTES))


def _opened(path: str) -> Any:
    from array_record.python import array_record_module

    reader = array_record_module.ArrayRecordReader(path, "readahead_buffer_size:0")  # 0: no read-ahead
    if not reader.num_records():  # also 0 for truncated files, because the index is at the end of a file
        raise UserError(f"{path}: not an ArrayRecord file, damaged, or without records")
    return reader
