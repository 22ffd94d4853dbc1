"""Reads records for prediction (JSON lines, TSV, CSV), and writes predictions (JSON lines, CSV)."""

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
from pretrainax.data.sources import Csv, JsonLines, Source, Tsv
from pretrainax.data.sources.base import Record
from pretrainax.data.sources.records import RecordLines
from pretrainax.files.atomic_files import replacing
from pretrainax.files.json_files import JsonObject
from pretrainax.files.regular_files import check_regular
from pretrainax.inference.predictions import check_tokens, read_unlabeled
from pretrainax.reporting.visible import visible
from pretrainax.tasks import Task
from pretrainax.tokenization.base import Tokenizer

STANDARD = files.STANDARD_INPUT  # path that means standard input or standard output
_MAX_LOGGED = 20  # maximum number of invalid records that are logged
_READERS = {reader.__name__: reader for reader in (JsonLines, Tsv, Csv)}


class InputRecord(NamedTuple):
    """A record of the input file: its location, all its fields, and the parsed record for the task."""

    where: str  # file and line number, for messages
    fields: JsonObject  # all fields of the record
    record: Record  # the text and metadata that the task reads


class Input:
    """Reads the records from the files that the flag --input selects, in order.

    The attribute `bad` is the number of invalid records that were skipped so far, due to the flag --skip_bad.

    Raises:
      UserError: the file does not exist or has an unsupported format.
    """

    def __init__(self, given: str, experiment: Experiment, skip_bad: bool):
        self._source, self._skip_bad, self.bad = _parse_input(given), skip_bad, 0
        self._source.config_path = "--input"
        self._paths = [STANDARD]
        if self._source.path != STANDARD:
            if problems := list(self._source.problems(experiment)):
                raise UserError(problems[0])
            self._paths = files.find_files(self._source, "train", self._source.endings)

    def records(self, task: Task, tokenizer: Tokenizer) -> Iterator[InputRecord]:
        """Yields the records of all files, parsed for `task`, which is bound to `tokenizer`.

        With --skip_bad, invalid records are logged, skipped and counted in `bad`.

        Raises:
          UserError: a record is invalid and --skip_bad is not set. The message gives the file and the line number.
        """
        for path in self._paths:
            shard = files.FileShard(path, 0, None)
            for number, row in self._source.rows(shard):
                where = self._source.where(shard, number)
                try:
                    fields = self._source.parse(row)
                    record = read_unlabeled(task, fields)
                    "".join(record.texts).encode()  # raises ValueError for an unpaired surrogate
                    check_tokens(task, record, tokenizer)
                except (ValueError, RecursionError) as e:
                    if not self._skip_bad:
                        raise UserError(f"{where}: {e}; --skip_bad leaves out and counts bad records") from e
                    self._skip(f"{where}: {e}")
                    continue
                yield InputRecord(where, fields, record)

    def _skip(self, line: str) -> None:
        self.bad += 1
        if self.bad <= _MAX_LOGGED:
            print(visible(f"left out: {line}"), file=sys.stderr)
        elif self.bad == _MAX_LOGGED + 1:
            print("left out: more records; the end of the output has their number", file=sys.stderr)


def _parse_input(expression: str) -> RecordLines:
    """Converts the value of --input, a path or the config expression of a data source, to a data source.

    The file extension of a path, or of the files in a folder, determines the class. The default is JsonLines.
    """
    path = os.path.expanduser(expression)
    if re.fullmatch(r"\w+\(.*\)", expression, re.DOTALL):
        source = Source.parse(expression)
    elif os.path.isdir(path):
        readers = _readers_of_folder(path) or ["JsonLines"]
        if len(readers) > 1:
            raise UserError(
                f"--input={expression} has files for {' and '.join(readers)}, which one command cannot read: set it to "
                f"\"{readers[0]}(path='{expression}')\", for example"
            )
        source = _READERS[readers[0]](path=expression)
    else:
        name = Choice.reader_of(path) or "JsonLines"
        may_be_json = name == "TextFiles" and (not os.path.exists(path) or files.begins_with_json(path))
        if name not in _READERS and not may_be_json:
            raise UserError(f"--input={expression} needs {name}, which predict does not support: {_FORMATS}")
        source = _READERS.get(name, JsonLines)(path=expression)
    if not isinstance(source, RecordLines):
        raise UserError(f"--input={expression} is {type(source).__name__}, which predict does not support: {_FORMATS}")
    return source


def _readers_of_folder(folder: str) -> list[str]:
    """Lists the names of the data sources in _READERS that read files in a folder and its subfolders."""
    names = [name.lower() for _, _, names in os.walk(folder) for name in names]
    return [name for name, reader in _READERS.items() if any(file.endswith(reader.endings) for file in names)]


_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
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
          asked: the record.
          said: the prediction for the record.

        Raises:
          UserError: the record has a field with the name of an output field. For CSV, also if the fields of the records
            differ.
        """
        if self._format == "csv":
            said = _columns_of(said)
        if duplicates := [name for name in said if name in asked.fields]:
            raise UserError(
                f"{asked.where}: the record has a field {duplicates[0]!r} already, which is an output field: rename it"
            )
        fields = asked.fields | said
        line = self._csv_line(asked.where, fields) if self._format == "csv" else _format_json(fields)
        self._file.write(f"{line}\n".encode("utf-8", "backslashreplace"))  # escapes unpaired surrogates, as in JSON

    def _csv_line(self, where: str, fields: JsonObject) -> str:
        """Formats a CSV line of a record and its prediction; writes the header before the first line."""
        if self._columns is None:
            self._columns = list(fields)
            self._file.write(f"{_format_csv_line(self._columns)}\n".encode())
        if sorted(fields) != sorted(self._columns):
            missing = sorted(set(fields) ^ set(self._columns))[0]
            raise UserError(
                f"{where}: the field {missing!r} is not in all records, but all lines of a table have the same "
                "columns: set --format=jsonl"
            )
        return _format_csv_line([_format_cell(fields[name]) for name in self._columns])


def _columns_of(prediction: JsonObject) -> JsonObject:
    """Returns the columns of a prediction; a dict (the probabilities) has a column for each of its keys."""
    columns = {}
    for name, value in prediction.items():
        columns |= {f"{name}.{key}": x for key, x in value.items()} if isinstance(value, dict) else {name: value}
    return columns


_ENDINGS = {"jsonl": (".jsonl", ".ndjson", ".json"), "csv": (".csv",)}  # format -> file endings
_OTHER_ENDINGS = (".tsv", ".parquet", ".arrow", ".xls", ".xlsx", ".zip", *files.ARCHIVES)


def output_format(path: str, given: Optional[str]) -> str:
    """Returns the format of the output file `path`: `given`, or, if that is None, the format of the file's ending.

    Raises:
      UserError: the ending belongs to another format.
    """
    ending = os.path.splitext(path)[1].lower()
    by_ending = next((format for format, endings in _ENDINGS.items() if ending in endings), None)
    if ending in _OTHER_ENDINGS:
        raise UserError(f"--output={path}: predict writes JSON lines (.jsonl) or CSV (.csv), not {ending}")
    if given and by_ending and given != by_ending:
        raise UserError(f"--output={path} ends in {ending}, but --format is {given}: change one of them")
    return given or by_ending or "jsonl"


def check_output(path: str, overwrite: bool) -> None:
    """Raises UserError if something exists at `path`, unless it is a regular file and `overwrite` is True."""
    if path == STANDARD or not os.path.lexists(path):
        return
    if os.path.exists(path):
        check_regular(path)
    if not overwrite:
        raise UserError(f"--output={path} exists: choose another file, or add --overwrite to replace it")


@contextlib.contextmanager
def writing(path: str, format: str) -> Iterator[Output]:
    """Opens an output for predictions, which replaces the file at `path` atomically on success.

    The path "-" is the standard output.

    Args:
      format: "csv" for CSV; any other value means JSON lines.

    Raises:
      UserError: the file cannot be written.
    """
    if path == STANDARD:
        try:
            yield Output(sys.stdout.buffer, format)
            sys.stdout.buffer.flush()
        except OSError as e:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
            if isinstance(e, BrokenPipeError):  # `| head` has closed the pipe
                sys.exit(128 + signal.SIGPIPE)
            raise UserError(f"the standard output cannot be written: {e.strerror}") from e
        return
    try:
        with replacing(path) as file:
            yield Output(file, format)
    except OSError as e:
        raise UserError(f"--output={path} cannot be written: {e.strerror}") from e


def _format_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=lambda text: text.decode())  # very long text is UTF-8 bytes


def _format_cell(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else value.decode() if isinstance(value, bytearray) else _format_json(value)


def _escape_formula(cell: str) -> str:
    """Prefixes a CSV cell with ' if a spreadsheet would interpret it as a formula (OWASP, CSV Injection).

    Numbers are unchanged.
    """
    return f"'{cell}" if cell.startswith(_FORMULA_STARTS) and not _NUMBER.fullmatch(cell) else cell


def _format_csv_line(cells: list[str]) -> str:
    line = io.StringIO()
    # The csv writer quotes cells that contain a character of its line terminator, \r\n. Therefore cells may contain
    # both characters.
    csv.writer(line).writerow(map(_escape_formula, cells))
    return line.getvalue().removesuffix("\r\n")
