"""Lines of JSON."""

import codecs
import collections
import dataclasses
import os
from collections.abc import Iterator
from typing import ClassVar, Optional, Union

from pretrainax.data import files, line_ends, long_lines
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

        def parse(line: Union[bytes, bytearray]) -> dict:
            self.check_size(len(line))
            if line.startswith(codecs.BOM_UTF8):
                skipped[line_ends.MARKS] += shard.split != "valid"  # else counted in both splits
            return json_object(line)

        lines = _lines(shard, self.max_record_bytes)
        numbered = ((number, line) for number, line in enumerate(lines) if not line.isspace())
        return self.documents(numbered, parse, where, shard.split, skipped)


def _lines(shard: files.Part, most: int) -> Iterator[Union[bytes, bytearray]]:
    """Yields the lines of a shard; of those with more than `most` bytes the beginning, which has more too."""
    with files.opened(shard.place) as f:
        if shard.stop is not None:
            f.seek(shard.start)
        while (shard.stop is None or f.tell() < shard.stop) and (line := long_lines.read_line(f, most)):
            is_cut = len(line) > most and not line.endswith(b"\n")
            yield line
            if is_cut:
                files.skip_line(f)
