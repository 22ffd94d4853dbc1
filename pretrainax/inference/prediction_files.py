"""Files of records that a model is asked about, and of what it says of each: JSON lines, TSV and CSV."""

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
from pretrainax.data.line_ends import plain
from pretrainax.data.sources import Csv, JsonLines, Source, Tsv
from pretrainax.data.sources.base import Record
from pretrainax.data.sources.records import RecordLines
from pretrainax.files.atomic_files import replacing
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.visible import visible
from pretrainax.tasks import Task

STANDARD = files.STANDARD_INPUT  # as a path: what comes from the command before, or goes to the one behind
_NAMED = 20  # bad records that are named, at most
_READERS = {reader.__name__: reader for reader in (JsonLines, Tsv, Csv)}


class Asked(NamedTuple):
    """A record of a file that a model is asked about."""

    where: str  # file and line
    fields: JsonObject  # its own
    record: Record  # what the task reads of it


class Input:
    """The records of --input, one after the other.

    Raises:
      UserError: no such file, or one that is read in another way.
    """

    def __init__(self, given: str, experiment: Experiment, skip_bad: bool):
        self._source, self._skip_bad, self.bad = _source_of(given), skip_bad, 0
        self._source.config_path = "--input"
        self._paths = [STANDARD]
        if self._source.path != STANDARD:
            if problems := list(self._source.problems(experiment)):
                raise UserError(problems[0])
            self._paths = files.find(self._source, "train", self._source.endings)

    def records(self, task: Task) -> Iterator[Asked]:
        """Yields the records; a bad one is a UserError with file and line, or is counted in `bad` and named."""
        for path in self._paths:
            shard = files.Part(path, 0, None)
            for number, row in self._source.rows(shard):
                where = self._source.where(shard, number)
                try:
                    fields = self._source.parse(row)
                    record = task.ask(fields)
                    texts = tuple(plain(text, collections.Counter()) for text in record.texts)
                    "".join(texts).encode()  # half of a surrogate pair is no text
                except (ValueError, RecursionError) as e:
                    if not self._skip_bad:
                        raise UserError(f"{where}: {e}; --skip_bad leaves out and counts such records") from e
                    self._leave_out(f"{where}: {e}")
                    continue
                yield Asked(where, fields, Record(texts, record.note))

    def _leave_out(self, line: str) -> None:
        self.bad += 1
        if self.bad <= _NAMED:
            print(visible(f"left out: {line}"), file=sys.stderr)
        elif self.bad == _NAMED + 1:
            print("left out: and more, which are counted at the end", file=sys.stderr)


def _source_of(given: str) -> RecordLines:
    """Returns what reads --input: a source is given as in a config, or follows from the ending of a file."""
    if re.fullmatch(r"\w+\(.*\)", given, re.DOTALL):
        source = Source.parse(given)
    else:
        name = Choice.reader_of(os.path.expanduser(given)) or "JsonLines"
        source = _READERS.get(name, JsonLines)(path=given)
        if name not in _READERS and not os.path.isdir(given) and name != "TextFiles":
            raise UserError(f"--input={given} is for {name}, which is not read here: {_WAYS}")
    if not isinstance(source, RecordLines):
        raise UserError(f"--input={given} is {type(source).__name__}, which is not read here: {_WAYS}")
    return source


_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_WAYS = "give JSON lines (or - for those of the standard input), .tsv, .csv, or \"Csv(path='FILE', delimiter=';')\""


class Output:
    """Writes what is said of records, a line each."""

    def __init__(self, file: BinaryIO, format: str):
        self._file, self._format = file, format
        self._columns: Optional[list[str]] = None  # of a table: those of the first record

    def add(self, asked: Asked, said: JsonObject) -> None:
        """Writes the fields of a record, and beside them what is said of it."""
        if taken := [name for name in said if name in asked.fields]:
            raise UserError(
                f"{asked.where}: the record has a field {taken[0]!r} already, which is written here: rename it"
            )
        line = self._row(asked, said) if self._format == "csv" else _json(asked.fields | said)
        self._file.write(f"{line}\n".encode("utf-8", "backslashreplace"))  # as JSON writes half of a surrogate pair

    def _row(self, asked: Asked, said: JsonObject) -> str:
        flat = {name: value for name, value in asked.fields.items()}
        for name, value in said.items():
            flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
        if self._columns is None:
            self._columns = list(flat)
            self._file.write(f"{_table_line(self._columns)}\n".encode())
        if sorted(flat) != sorted(self._columns):
            other = sorted(set(flat) ^ set(self._columns))[0]
            raise UserError(
                f"{asked.where}: the field {other!r} is not in all records, and a table has the same columns in each "
                "line: take --format=jsonl"
            )
        return _table_line([_cell(flat[name]) for name in self._columns])


@contextlib.contextmanager
def writing(path: str, format: str) -> Iterator[Output]:
    """Yields the output of a path, which is there when all is written, or not at all; of "-", the standard output.

    Raises:
      UserError: a folder where nothing can be written.
    """
    if path == STANDARD:
        try:
            yield Output(sys.stdout.buffer, format)
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # `| head` has read enough: what follows is for nobody
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # which Python flushes at its end
            sys.exit(128 + signal.SIGPIPE)
        return
    try:
        with replacing(path) as file:
            yield Output(file, format)
    except OSError as e:
        raise UserError(f"--output={path} cannot be written: {e.strerror}") from e


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=lambda text: text.decode())  # very long texts are UTF-8


def _cell(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else value.decode() if isinstance(value, bytearray) else _json(value)


def _harmless(cell: str) -> str:
    """Returns a cell with ' before what a spreadsheet would run as a formula, as OWASP's CSV Injection has it.

    Numbers stay as they are.
    """
    return f"'{cell}" if cell.startswith(_FORMULA) and not _NUMBER.fullmatch(cell) else cell


def _table_line(cells: list[str]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow(
        map(_harmless, cells)
    )  # whose own line end, \\r\\n, has both characters quoted within a cell
    return line.getvalue().removesuffix("\r\n")
