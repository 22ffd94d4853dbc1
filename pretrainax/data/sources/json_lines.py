"""Implements a data source that reads JSON Lines files."""

import codecs
import collections
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import ClassVar, Optional

from pretrainax.data import files, line_ends
from pretrainax.data.sources.base import Document, Source
from pretrainax.data.sources.records import Line, RecordLines, json_object


@dataclasses.dataclass
class JsonLines(RecordLines[Line], Source):
    """Reads plain or compressed (.gz, .xz, .zst) files with one JSON object per line, whose `text_field` is a document.

    `path` is a file, a folder (all .jsonl files in it and its subfolders, plain or compressed) or a glob. Without
    `valid_path`, a hash of the text selects `valid_fraction` of the documents for validation. Equal documents are
    therefore in the same split. A file in another encoding than UTF-8 is one shard.
    """

    endings: ClassVar[tuple[str, ...]] = files.with_archives(".jsonl")
    broken: ClassVar[str] = "broken lines"

    def _shard_ranges(self, file: str) -> Iterator[tuple[int, Optional[int]]]:
        if files.is_archive(file) or not files.is_utf8_encoding(self.encoding):
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
        lines = enumerate(self.lines(shard))
        return ((number, line) for number, line in lines if not line.isspace())

    def parse(self, row: Line) -> dict:
        self.check_size(len(row))
        with self.named_encoding():
            return json_object(row)
