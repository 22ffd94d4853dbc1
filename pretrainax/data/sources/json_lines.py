"""Implements a data source that reads JSON Lines files."""

import codecs
import collections
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import ClassVar, Optional, Union

from pretrainax.data import files, line_ends, long_lines
from pretrainax.data.sources.base import Document, Source
from pretrainax.data.sources.records import RecordLines, json_object

Line = Union[bytes, bytearray]


@dataclasses.dataclass
class JsonLines(RecordLines[Line], Source):
    """Reads plain or compressed (.gz, .xz, .zst) files with one JSON object per line, whose `text_field` is a document.

    `path` is a file, a folder (all .jsonl files in it and its subfolders, plain or compressed) or a glob. Without
    `valid_path`, a hash of the text selects `valid_fraction` of the documents for validation. Equal documents are
    therefore in the same split.
    """

    endings: ClassVar[tuple[str, ...]] = files.with_archives(".jsonl")
    broken: ClassVar[str] = "broken lines"

    def _shard_ranges(self, file: str) -> Iterator[tuple[int, Optional[int]]]:
        if files.is_archive(file):
            yield 0, None
        else:
            for shard in files.ranges(file, 0, os.path.getsize(file), longest_line=-1):
                yield shard.start, shard.stop

    def read(self, shard: files.FileShard, skipped: collections.Counter) -> Iterator[Document]:
        def parse(line: Line) -> dict:
            has_byte_order_mark = line.startswith(codecs.BOM_UTF8)
            record = self.parse(line)
            if has_byte_order_mark:
                skipped[line_ends.MARKS] += shard.split != "valid"  # counted in one split only
            return record

        return self.documents(self.rows(shard), parse, functools.partial(self.where, shard), shard.split, skipped)

    def rows(self, shard: files.FileShard) -> Iterator[tuple[int, Line]]:
        lines = enumerate(lines_of(shard, self.max_record_bytes))
        return ((number, line) for number, line in lines if not line.isspace())

    def parse(self, row: Line) -> dict:
        self.check_size(len(row))
        return json_object(row)


def lines_of(shard: files.FileShard, most: int) -> Iterator[Line]:
    """Yields the lines of a shard, truncating any line of more than `most` bytes.

    A truncated line still has more than `most` bytes, so the caller can detect it by its length.
    """
    with files.open_decompressed(shard.path_or_split) as f:
        if shard.stop is not None:
            f.seek(shard.start)
        while (shard.stop is None or f.tell() < shard.stop) and (line := long_lines.read_line(f, most)):
            is_truncated = len(line) > most and not line.endswith(b"\n")
            yield line
            if is_truncated:
                files.skip_line(f)
