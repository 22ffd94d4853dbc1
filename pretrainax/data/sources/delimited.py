"""Tables in files of text: a record a line, in columns that tabs or commas part."""

import codecs
import collections
import csv
import dataclasses
import functools
import io
import sys
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Optional

from pretrainax.config import Experiment, UserError
from pretrainax.data import files
from pretrainax.data.sources.base import Document, Source
from pretrainax.data.sources.json_lines import Line, lines_of
from pretrainax.data.sources.records import RecordLines

csv.field_size_limit(sys.maxsize)  # `max_record_bytes` says how large a record is at most


class Row(NamedTuple):
    """A record as it stands in a file, and the names of its columns."""

    columns: tuple[str, ...]
    line: Line  # or several of them, where a quoted field has line ends


@dataclasses.dataclass
class Tsv(RecordLines[Row], Source):
    """A record a line, in columns that tabs part, as in the files of GLUE; plain, .gz, .xz or .zst.

    The first line of each file names the columns, unless `columns` does. All that a column holds is text; quotes are
    letters like others. With `quoting`, what stands between double quotes may have delimiters and line ends in it, and
    a quote as two (RFC 4180).

    `path` is a file, a folder (every .tsv, plain or not, below it) or a glob; a file is one shard. Without
    `valid_path`, `valid_fraction` of the records are for validation, chosen by a hash of the text.
    """

    columns: tuple[str, ...] = ()  # their names, for files whose first line is a record already
    delimiter: str = "\t"  # between two columns: one character
    quoting: bool = False  # "…" around a field is not part of it

    endings: ClassVar[tuple[str, ...]] = files.with_archives(".tsv")

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            yield f"{self.config_path}.delimiter is {self.delimiter!r}, it must be one character, no quote or line end"
        if twice := _twice(self.columns):
            yield f"{self.config_path}.columns has {twice!r} twice, each must have a name of its own"

    def _cuts(self, file: str) -> Iterator[tuple[int, Optional[int]]]:
        yield 0, None

    def read(self, shard: files.Part, skipped: collections.Counter) -> Iterator[Document]:
        where = functools.partial(self.where, shard)
        return self.documents(self.rows(shard), self.parse, where, shard.split, skipped)

    def rows(self, shard: files.Part) -> Iterator[tuple[int, Row]]:
        columns = self.columns
        for number, line in self._whole(lines_of(shard, self.max_record_bytes)):
            if not line.strip(b"\r\n"):
                continue
            if columns:
                yield number, Row(columns, line)
            else:
                columns = self._header(line, self.where(shard, number))

    def _whole(self, lines: Iterator[Line]) -> Iterator[tuple[int, Line]]:
        """Joins the lines of each record, which has its quotes in pairs; yields the number of the first beside it."""
        first, whole, quotes = 0, bytearray(), 0
        for number, line in enumerate(lines):
            if not whole:
                first = number
            whole += line
            quotes += line.count(b'"') if self.quoting else 0
            if quotes % 2 == 0 or len(whole) > self.max_record_bytes:
                yield first, whole
                whole, quotes = bytearray(), 0
        if whole:  # which `parse` refuses
            yield first, whole

    def _header(self, line: Line, where: str) -> tuple[str, ...]:
        try:
            columns = tuple(self._fields(line))
        except ValueError as e:
            raise UserError(f"{where}: the names of the columns cannot be read: {e}") from e
        if twice := _twice(columns):
            raise UserError(
                f"{where}: two columns have the name {twice!r}; if this line is a record, name the columns, as "
                f"{self.config_path}.columns=label,text"
            )
        return columns

    def parse(self, row: Row) -> dict[str, str]:
        self.check_size(len(row.line))
        fields = self._fields(row.line)
        if len(fields) != len(row.columns):
            raise ValueError(
                f"{len(fields)} columns, of {len(row.columns)} that are named: {', '.join(row.columns)} (delimiter "
                f"{self.delimiter!r}, quoting={self.quoting})"
            )
        return dict(zip(row.columns, fields, strict=True))

    def _fields(self, line: Line) -> list[str]:
        text = line.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        if not self.quoting:
            return text.split(self.delimiter)
        try:
            (fields,) = csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter, strict=True)
        except (csv.Error, ValueError) as e:  # ValueError: there are several records
            raise ValueError("a quote that is opened and not closed, or stands within a field") from e
        return fields


@dataclasses.dataclass
class Csv(Tsv):
    """The same with commas, and fields in double quotes where they have commas, quotes or line ends (RFC 4180)."""

    delimiter: str = ","
    quoting: bool = True

    endings: ClassVar[tuple[str, ...]] = files.with_archives(".csv")


def _twice(names: tuple[str, ...]) -> Optional[str]:
    """Returns the first name that comes twice; None where there is none."""
    return next((name for name, count in collections.Counter(names).items() if count > 1), None)
