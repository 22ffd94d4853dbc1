"""Reads records for prediction (JSON lines, TSV, CSV), and writes predictions (JSON lines, CSV)."""

import collections
import contextlib
import csv
import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, Optional

from pretrainax.config import Choice, Experiment, UserError
from pretrainax.data import files
from pretrainax.data.line_ends import normalize_line_ends
from pretrainax.data.sources import Csv, JsonLines, Source, Tsv
from pretrainax.data.sources.base import Record
from pretrainax.data.sources.records import RecordLines
from pretrainax.files.atomic_files import replacing
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.visible import visible
from pretrainax.tasks import Task

STANDARD = files.STANDARD_INPUT  # the path of standard input and standard output
_NAMED = 20  # maximum number of invalid records that are logged
_READERS = {reader.__name__: reader for reader in (JsonLines, Tsv, Csv)}


class InputRecord(NamedTuple):
    """A record of the input file, with its location and its parsed form for the task."""

    where: str  # file and line, for messages
    fields: JsonObject  # all fields of the record
    record: Record  # the part that the task reads


class Input:
    """The records of --input, in order.

    The attribute `bad` is the number of invalid records so far that were left out, with --skip_bad.

    Raises:
      UserError: the file does not exist or has an unsupported format.
    """

    def __init__(self, given: str, experiment: Experiment, skip_bad: bool):
        self._source, self._skip_bad, self.bad = _source_of(given), skip_bad, 0
        self._source.config_path = "--input"
        self._paths = [STANDARD]
        if self._source.path != STANDARD:
            if problems := list(self._source.problems(experiment)):
                raise UserError(problems[0])
            self._paths = files.find_files(self._source, "train", self._source.endings)

    def records(self, task: Task) -> Iterator[InputRecord]:
        """Yields the records of all files.

        With --skip_bad, invalid records are logged, left out and counted in `bad`.

        Raises:
          UserError: a record is invalid, without --skip_bad; the message has the file and the line.
        """
        for path in self._paths:
            shard = files.FileShard(path, 0, None)
            for number, row in self._source.rows(shard):
                where = self._source.where(shard, number)
                try:
                    fields = self._source.parse(row)
                    record = task.read_unlabeled(fields)
                    texts = tuple(normalize_line_ends(text, collections.Counter()) for text in record.texts)
                    "".join(texts).encode()  # fails for half of a surrogate pair
                except (ValueError, RecursionError) as e:
                    if not self._skip_bad:
                        raise UserError(f"{where}: {e}; --skip_bad leaves out and counts bad records") from e
                    self._leave_out(f"{where}: {e}")
                    continue
                yield InputRecord(where, fields, Record(texts, record.note))

    def _leave_out(self, line: str) -> None:
        self.bad += 1
        if self.bad <= _NAMED:
            print(visible(f"left out: {line}"), file=sys.stderr)
        elif self.bad == _NAMED + 1:
            print("left out: more records; the end of the output has their number", file=sys.stderr)


def _source_of(given: str) -> RecordLines:
    """Returns the data source for --input, which is a config expression of a source, or a path.

    The file extension of a path determines the class of the source. The default is JsonLines.
    """
    if re.fullmatch(r"\w+\(.*\)", given, re.DOTALL):
        source = Source.parse(given)
    else:
        name = Choice.reader_of(os.path.expanduser(given)) or "JsonLines"
        source = _READERS.get(name, JsonLines)(path=given)
        if name not in _READERS and not os.path.isdir(given) and name != "TextFiles":
            raise UserError(f"--input={given} needs {name}, which predict does not support: {_FORMATS}")
    if not isinstance(source, RecordLines):
        raise UserError(f"--input={given} is {type(source).__name__}, which predict does not support: {_FORMATS}")
    return source


_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_FORMATS = "give JSON lines (- for standard input), .tsv, .csv, or \"Csv(path='FILE', delimiter=';')\""


class Output:
    """Writes one line per record: the fields of the record and its prediction."""

    def __init__(self, file: BinaryIO, format: str):
        self._file, self._format = file, format
        self._columns: Optional[list[str]] = None  # columns of the first record, for CSV; None: before the first record

    def add(self, asked: InputRecord, said: JsonObject) -> None:
        """Writes a line with the fields of a record and its prediction.

        Args:
          said: prediction of the record.

        Raises:
          UserError: the record has a field with the name of an output field, or the fields of the records differ (CSV).
        """
        if duplicates := [name for name in said if name in asked.fields]:
            raise UserError(
                f"{asked.where}: the record has a field {duplicates[0]!r} already, which is an output field: rename it"
            )
        line = self._row(asked, said) if self._format == "csv" else _json(asked.fields | said)
        self._file.write(f"{line}\n".encode("utf-8", "backslashreplace"))  # for halves of surrogate pairs, as in JSON

    def _row(self, asked: InputRecord, prediction: JsonObject) -> str:
        row = {name: value for name, value in asked.fields.items()}
        for name, value in prediction.items():
            row |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
        if self._columns is None:
            self._columns = list(row)
            self._file.write(f"{_table_line(self._columns)}\n".encode())
        if sorted(row) != sorted(self._columns):
            other = sorted(set(row) ^ set(self._columns))[0]
            raise UserError(
                f"{asked.where}: the field {other!r} is not in all records, but all lines of a table have the same "
                "columns: set --format=jsonl"
            )
        return _table_line([_cell(row[name]) for name in self._columns])


@contextlib.contextmanager
def writing(path: str, format: str) -> Iterator[Output]:
    """Yields an output file, which replaces the file at `path` atomically on success; "-" is the standard output.

    Args:
      format: "csv"; any other value: JSON lines.

    Raises:
      UserError: the file cannot be written.
    """
    if path == STANDARD:
        try:
            yield Output(sys.stdout.buffer, format)
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # `| head` has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
            sys.exit(128 + signal.SIGPIPE)
        return
    try:
        with replacing(path) as file:
            yield Output(file, format)
    except OSError as e:
        raise UserError(f"--output={path} cannot be written: {e.strerror}") from e


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=lambda text: text.decode())  # very long texts are UTF-8 bytes


def _cell(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else value.decode() if isinstance(value, bytearray) else _json(value)


def _harmless(cell: str) -> str:
    """Returns a CSV cell with the prefix ' if a spreadsheet would interpret it as a formula (OWASP, CSV Injection).

    Numbers are unchanged.
    """
    return f"'{cell}" if cell.startswith(_FORMULA) and not _NUMBER.fullmatch(cell) else cell


def _table_line(cells: list[str]) -> str:
    line = io.StringIO()
    # The csv writer quotes cells that contain a character of its line end, \r\n, so cells may contain both characters.
    csv.writer(line).writerow(map(_harmless, cells))
    return line.getvalue().removesuffix("\r\n")
