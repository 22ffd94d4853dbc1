"""Implements data sources for text files with one record per line, in columns separated by tabs or commas."""

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

csv.field_size_limit(sys.maxsize)  # no limit, because `max_record_bytes` limits the records


class TableRow(NamedTuple):
    """An unparsed record of a file, with the column names of the file."""

    columns: tuple[str, ...]
    line: Line  # several lines if a quoted field contains line ends


@dataclasses.dataclass
class Tsv(RecordLines[TableRow], Source):
    """Reads plain or compressed (.gz, .xz, .zst) files with one record per line, in tab-separated columns (as in GLUE).

    The first line of each file contains the names of the columns, unless `columns` is set. Without `quoting`, quotes
    are ordinary characters. With `quoting`, a field in double quotes may contain delimiters and line ends, and two
    consecutive double quotes inside it stand for one (RFC 4180).

    `path` is a file, a folder (all .tsv files in it and its subfolders, plain or compressed) or a glob. A file is one
    shard. Without `valid_path`, a hash of the text selects `valid_fraction` of the records for validation.
    """

    columns: tuple[str, ...] = ()  # names of the columns; (): the first line of each file contains the names
    delimiter: str = "\t"  # the character between two columns
    quoting: bool = False  # whether fields may be in double quotes, which are not part of the value

    endings: ClassVar[tuple[str, ...]] = files.with_archives(".tsv")

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            yield f"{self.config_path}.delimiter is {self.delimiter!r}, it must be one character, no quote or line end"
        if duplicate := _duplicate(self.columns):
            yield f"{self.config_path}.columns has {duplicate!r} twice, names must be unique"

    def _shard_ranges(self, file: str) -> Iterator[tuple[int, Optional[int]]]:
        yield 0, None

    def read(self, shard: files.FileShard, skipped: collections.Counter) -> Iterator[Document]:
        where = functools.partial(self.where, shard)
        return self.documents(self.rows(shard), self.parse, where, shard.split, skipped)

    def rows(self, shard: files.FileShard) -> Iterator[tuple[int, TableRow]]:
        columns = self.columns
        for number, line in self._joined_lines(lines_of(shard, self.max_record_bytes)):
            if not line.strip(b"\r\n"):
                continue
            if columns:
                yield number, TableRow(columns, line)
            else:
                columns = self._header(line, self.where(shard, number))

    def _joined_lines(self, lines: Iterator[Line]) -> Iterator[tuple[int, Line]]:
        """Yields (0-based number of the first line, joined lines) for each record.

        Without `quoting`, each line is a record. With `quoting`, a record continues to the next line as long as it has
        an odd number of double quotes.
        """
        first, record, num_quotes = 0, bytearray(), 0
        for number, line in enumerate(lines):
            if not record:
                first = number
            record += line
            num_quotes += line.count(b'"') if self.quoting else 0
            if num_quotes % 2 == 0 or len(record) > self.max_record_bytes:
                yield first, record
                record, num_quotes = bytearray(), 0
        if record:  # an unpaired quote: `parse` raises ValueError
            yield first, record

    def _header(self, line: Line, where: str) -> tuple[str, ...]:
        """Returns the column names in the first line of a file; raises UserError if they are invalid."""
        try:
            columns = tuple(self._fields(line))
        except ValueError as e:
            raise UserError(f"{where}: the names of the columns cannot be read: {e}") from e
        if duplicate := _duplicate(columns):
            raise UserError(
                f"{where}: two columns have the name {duplicate!r}; if this line is a record, set their names, for "
                f"example {self.config_path}.columns=label,text"
            )
        return columns

    def parse(self, row: TableRow) -> dict[str, str]:
        self.check_size(len(row.line))
        fields = self._fields(row.line)
        if len(fields) != len(row.columns):
            raise ValueError(
                f"{len(fields)} columns, expected {len(row.columns)}: {', '.join(row.columns)} (delimiter "
                f"{self.delimiter!r}, quoting={self.quoting})"
            )
        return dict(zip(row.columns, fields, strict=True))

    def _fields(self, line: Line) -> list[str]:
        """Splits a record into its fields; raises ValueError if its quotes are invalid."""
        text = line.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        if not self.quoting:
            return text.split(self.delimiter)
        try:
            (fields,) = csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter, strict=True)
        except (csv.Error, ValueError) as e:  # ValueError: several records
            raise ValueError("a quote is not closed, or is inside of a field without quotes") from e
        return fields


@dataclasses.dataclass
class Csv(Tsv):
    """Reads files like `Tsv`, with commas as delimiters.

    Fields with commas, quotes or line ends are in double quotes (RFC 4180).
    """

    delimiter: str = ","
    quoting: bool = True

    endings: ClassVar[tuple[str, ...]] = files.with_archives(".csv")


def _duplicate(names: tuple[str, ...]) -> Optional[str]:
    """Returns the first name that occurs more than once, or None if all names are unique."""
    return next((name for name, count in collections.Counter(names).items() if count > 1), None)
