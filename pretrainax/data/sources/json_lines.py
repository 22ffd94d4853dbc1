"""Lines of JSON."""

import collections
import dataclasses
import os
from collections.abc import Iterator
from typing import ClassVar, Optional, Union

from pretrainax.data import files, long_lines
from pretrainax.data.sources.base import Document, Source
from pretrainax.data.sources.records import RecordFiles, json_object


@dataclasses.dataclass
class JsonLines(RecordFiles, Source):
    """One JSON object a line, the document in its `text_field`; plain, .gz, .xz or .zst.

    `path` is a file, a folder (every .jsonl, plain or not, below it) or a glob. Without `valid_path`, `valid_fraction`
    of the documents are for validation, chosen by a hash of the text, so that equal documents are in the same split.
    """

    endings: ClassVar[tuple[str, ...]] = files.with_archives(".jsonl")
    broken: ClassVar[str] = "broken lines"

    def _cuts(self, file: str) -> Iterator[tuple[int, Optional[int]]]:
        if files.is_archive(file):
            yield 0, None
        else:
            for part in files.ranges(file, 0, os.path.getsize(file), longest_line=-1):
                yield part.start, part.stop

    def read(self, shard: files.Part, skipped: collections.Counter) -> Iterator[Document]:
        def where(number: int) -> str:
            first = files.line_number(shard.place, shard.start) if shard.start else 1
            return f"{shard.place}:{first + number}"

        lines = ((number, line) for number, line in enumerate(_lines(shard)) if not line.isspace())
        return self.documents(lines, json_object, where, shard.split, skipped)


def _lines(shard: files.Part) -> Iterator[Union[bytes, bytearray]]:
    with files.opened(shard.place) as f:
        if shard.stop is None:
            while line := long_lines.read_line(f):
                yield line
            return
        f.seek(shard.start)
        while f.tell() < shard.stop:
            yield long_lines.read_line(f)
