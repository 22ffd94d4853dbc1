"""Implements data sources for text files with one record per line, in columns separated by tabs or commas."""

import codecs
import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Optional

from pretrainax.config import Experiment, UserError
from pretrainax.data import files
from pretrainax.data.sources.base import Document, Source
from pretrainax.data.sources.records import Line, RecordLines

SUSPICIOUS = "lines inside of quotes that look like records"  # name in the counts of repairs


class TableRow(NamedTuple):
    """A record of a file before decoding, with the column names of the file."""

    columns: tuple[str, ...]
    size: int  # bytes
    fields: Optional[list[Line]]  # None: the quotes are invalid
    num_suspicious: int = (
        0  # lines inside of a quoted field that look like records, so that the quote may be a stray one
    )


@dataclasses.dataclass
class Tsv(RecordLines[TableRow], Source):
    """Reads plain or compressed (.gz, .xz, .zst) files with one record per line, in tab-separated columns (as in GLUE).

    The first line of each file contains the names of the columns, unless `columns` is set. Without `quoting`, quotes
    are ordinary characters. With `quoting`, a field that begins with a double quote may contain delimiters and line
    ends, and two consecutive double quotes inside it stand for one (RFC 4180). Quotes in other fields are ordinary
    characters. A record whose quotes are invalid ends with its first line.

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

    def fingerprint(self) -> str:
        settings = files.settings_of(self)
        if self.quoting and self.on_error == "skip":
            settings["resynchronizes"] = True  # earlier versions lost the records after a stray quote
        return files.fingerprint(self, settings, self.endings)

    def read(self, shard: files.FileShard, skipped: collections.Counter) -> Iterator[Document]:
        def parse(row: TableRow) -> dict[str, str]:
            record = self.parse(row)
            if row.num_suspicious:
                skipped[SUSPICIOUS] += row.num_suspicious * (shard.split != "valid")  # counted in one split only
            return record

        return self.documents(self.rows(shard), parse, functools.partial(self.where, shard), shard.split, skipped)

    def rows(self, shard: files.FileShard) -> Iterator[tuple[int, TableRow]]:
        columns, number, lines, ahead = self.columns, 0, self.lines(shard), collections.deque()
        while ahead or _read_line(lines, ahead):
            num_lines = 1
            if ahead[0].strip(b"\r\n"):
                row, num_lines = self._first_row(columns, ahead, lines)
                if columns:
                    yield number, row
                else:
                    columns = self._header(row, self.where(shard, number))
            for _ in range(num_lines):
                ahead.popleft()
            number += num_lines

    def _first_row(
        self, columns: tuple[str, ...], ahead: collections.deque[Line], lines: Iterator[Line]
    ) -> tuple[TableRow, int]:
        """Splits the first record of `ahead` and `lines` into fields; returns it and its number of lines.

        A record continues on the next line while a quoted field is open. If this does not lead to a record with as many
        fields as `columns`, the quote is a stray one: the first line alone becomes a broken record, and the next record
        begins on the second line.

        Args:
          columns: the names of the columns, or () for the line that contains them.
          ahead: the lines that were read and are not part of an earlier record, at least one; lines are appended.
          lines: the following lines of the file.
        """
        fields, size, is_open, delimiter = [], 0, False, self.delimiter.encode()
        for i in itertools.count():
            if i == len(ahead) and not _read_line(lines, ahead):
                break
            line = ahead[i].removeprefix(b"" if i else codecs.BOM_UTF8)
            size += len(line)
            if i and size > self.max_record_bytes:
                break
            try:
                is_open = _split_line(line, delimiter, self.quoting, fields, is_open)
            except ValueError:
                break
            if not is_open and (not i or len(fields) == len(columns or fields)):
                inside = list(itertools.islice(ahead, 1, i))
                looks_like_rows = len(columns) > 1 and all(x.count(delimiter) == len(columns) - 1 for x in inside)
                return TableRow(columns, size, fields, len(inside) * looks_like_rows), i + 1
            if not is_open:
                break
        return TableRow(columns, len(ahead[0]), None), 1

    def _header(self, row: TableRow, where: str) -> tuple[str, ...]:
        """Returns the column names in the first row of a file; raises UserError if they are invalid."""
        try:
            columns = tuple(self._decode(row))
        except ValueError as e:
            raise UserError(f"{where}: the names of the columns cannot be read: {e}") from e
        if duplicate := _duplicate(columns):
            raise UserError(
                f"{where}: two columns have the name {duplicate!r}; if this line is a record, set their names, for "
                f"example columns=('label', 'text') in {self.config_path}"
            )
        return columns

    def parse(self, row: TableRow) -> dict[str, str]:
        fields = self._decode(row)
        if len(fields) != len(row.columns):
            raise ValueError(
                f"{len(fields)} columns, expected {len(row.columns)}: {', '.join(row.columns)} (delimiter "
                f"{self.delimiter!r}, quoting={self.quoting})"
            )
        return dict(zip(row.columns, fields, strict=True))

    def _decode(self, row: TableRow) -> list[str]:
        """Returns the fields of a record; raises ValueError if it is too large, or its quotes or text are invalid."""
        self.check_size(row.size)
        if row.fields is None:
            raise ValueError("a quote is not closed, or text follows a closing quote")
        with self.named_encoding():
            return [field.decode("utf-8") for field in row.fields]


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


def _read_line(lines: Iterator[Line], ahead: collections.deque[Line]) -> bool:
    """Appends the next of `lines` to `ahead`; returns False if there is none."""
    if (line := next(lines, None)) is not None:
        ahead.append(line)
    return line is not None


def _split_line(line: Line, delimiter: bytes, quoting: bool, fields: list[Line], is_open: bool) -> bool:
    """Appends the fields in a line to `fields`; returns True if the last field is in quotes that are not closed.

    Args:
      is_open: whether the line begins inside of the last field in `fields`, whose quotes are not closed.

    Raises:
      ValueError: text follows a closing quote.
    """
    if not is_open and not (quoting and b'"' in line):
        fields.extend(line.removesuffix(b"\n").removesuffix(b"\r").split(delimiter))
        return False
    start, stop = 0, len(line.removesuffix(b"\n").removesuffix(b"\r"))
    while start <= stop:
        if is_open or line.startswith(b'"', start):
            if not is_open:
                fields.append(bytearray())
                start += 1
            end = line.find(b'"', start)
            while end >= 0 and line.startswith(b'"', end + 1):
                end = line.find(b'"', end + 2)
            is_open = end < 0
            fields[-1] += line[start : len(line) if is_open else end].replace(b'""', b'"')
            if is_open:
                return True
            end += 1
            if end < stop and not line.startswith(delimiter, end):
                raise ValueError
        else:
            end = line.find(delimiter, start, stop)
            end = stop if end < 0 else end
            fields.append(line[start:end])
        start = end + len(delimiter)
    return False
