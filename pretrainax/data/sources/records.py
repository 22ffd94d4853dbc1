"""Defines base classes of data sources with records, which handle text fields, pairs, splits and broken records."""

import collections
import contextlib
import copy
import dataclasses
import json
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Optional, TypeVar, Union

from pretrainax.config import Experiment, UserError, nearest
from pretrainax.data import files, long_lines
from pretrainax.data.line_ends import normalize_line_ends
from pretrainax.data.sources.base import Document, Reader, Record
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.visible import visible

_MAX_SHOWN = 5  # maximum number of broken rows of a shard that are printed

Row = TypeVar("Row")  # type of an unparsed record of a file
Line = Union[bytes, bytearray]  # a line of UTF-8, with its line end


@dataclasses.dataclass(kw_only=True)
class Records:
    """Base class of data sources with records. A "." in a field name selects a nested field, as in "translation.de"."""

    text_field: str = "text"  # field of a record that contains the text
    target_field: Optional[str] = None  # field with the target of a pair, whose source is text_field; None: no pairs
    prefix: str = ""  # prepended to the text, for example the task of a pair ("translate English to German: ")
    valid_fraction: float = 0.01  # fraction of the records for validation, if it has no separate files or split
    on_error: str = "stop"  # action for a broken record: stop (raise an error) | skip (skip and count)
    max_record_bytes: int = files.MAX_RECORD_BYTES  # larger records count as broken; memory use is a few times this

    broken: ClassVar[str] = "broken records"  # name under which skipped broken records are counted
    config_path: ClassVar[str]  # defined by Source
    shows_broken: ClassVar[bool] = True  # whether the first skipped broken records are printed
    _task: ClassVar[Optional[Reader]] = None  # converts records to documents; None: documents are plain text or pairs

    def reading(self, task: Reader) -> "Records":
        source = copy.copy(self)
        source._task = task  # pyright: ignore[reportAttributeAccessIssue]
        return source

    @property
    def pairs(self) -> bool:
        return self.target_field is not None and self._task is None

    @property
    def holds_out(self) -> bool:
        return getattr(self, "valid_path", None) is None and getattr(self, "valid_split", None) is None

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from files.fraction_problems(self)
        if self.on_error not in ("stop", "skip"):
            yield f"{self.config_path}.on_error is {self.on_error!r}, {nearest(self.on_error, ('stop', 'skip'))}"
        if self.max_record_bytes < 1:
            yield f"{self.config_path}.max_record_bytes is {self.max_record_bytes}, it must be at least 1"

    def check_size(self, size: int) -> None:
        """Raises ValueError if `size`, a record's size in bytes, is greater than `max_record_bytes`."""
        if size > self.max_record_bytes:
            raise ValueError(
                f"a record of {size:,} bytes or more, {self.config_path}.max_record_bytes is "
                f"{self.max_record_bytes:,}: raise it if the record is text and the memory suffices"
            )

    def documents(
        self,
        rows: Iterable[tuple[int, Any]],
        parse: Callable[[Any], Mapping],
        where: Callable[[int], str],
        split: Optional[str],
        skipped: collections.Counter,
    ) -> Iterator[Document]:
        """Parses rows and yields their documents.

        Counts in `skipped` the repairs made to the yielded documents and, with on_error="skip", the broken rows. Prints
        the first broken rows to stderr.

        Args:
          rows: (row number, unparsed row).
          parse: converts a row to a record; raises ValueError if the row is broken.
          where: converts a row number to a location for error messages.
          split: the split whose documents are yielded, or None for all documents. A document's split is determined by a
            hash of its text, so equal texts are in the same split.
          skipped: counter of repairs and broken rows, by kind.

        Raises:
          UserError: a row is broken, and `on_error` is "stop".
        """
        num_broken = 0
        for number, row in rows:
            repairs = collections.Counter()
            try:
                document, fraction = self._document(parse(row), repairs)
            except (ValueError, RecursionError) as e:  # broken JSON and broken UTF-8 are ValueErrors
                if self.on_error == "skip":
                    if split != "valid":  # counted in one split only
                        skipped[self.broken] += 1
                        num_broken += 1
                        self._show_broken(num_broken, f"{where(number)}: {e}")
                    continue
                skipping = f"{type(self).__name__}(..., on_error='skip') in {self.config_path} skips and counts them"
                raise UserError(f"{where(number)}: {e}; {skipping}") from e
            if split is None or (split == "valid") == (fraction < self.valid_fraction):
                if repairs:
                    skipped.update(repairs)
                yield document

    def _show_broken(self, num_broken: int, message: str) -> None:
        """Prints the message for a skipped broken row of a shard, whose broken rows are numbered from 1."""
        if not self.shows_broken:
            return
        if num_broken <= _MAX_SHOWN:
            print(visible(f"skipped {message}"), file=sys.stderr)
        elif num_broken == _MAX_SHOWN + 1:
            print(f"skipped more {self.broken}; the summary of the data has their number", file=sys.stderr)

    def _document(self, record: Mapping, repairs: collections.Counter) -> tuple[Document, float]:
        """Converts a record to a document, and returns it with a hash in [0, 1) that determines its split.

        Counts the repairs made to the text in `repairs`, by kind.
        """
        if self._task is not None:
            return self._task_record(self._task, self._task.read(record), repairs)
        text = normalize_line_ends(self._text(record, "text_field"), repairs)
        is_long = isinstance(text, bytearray)
        encoded = text if is_long else text.encode("utf-8")
        self.check_size(len(encoded))
        # The source text determines the split of a pair, so all targets of the same source are in the same split.
        fraction = files.fraction(encoded)
        if self.target_field is not None:
            target = normalize_line_ends(self._text(record, "target_field"), repairs)
            source, target = (t.decode() if isinstance(t, bytearray) else t for t in (text, target))
            self.check_size(len(encoded) + len(target.encode("utf-8")))
            return (self.prefix + source, target), fraction
        if is_long:
            text[:0] = self.prefix.encode()
        return text if is_long else self.prefix + text, fraction

    def _task_record(self, task: Reader, record: Record, repairs: collections.Counter) -> tuple[Document, float]:
        """Repairs the texts in a task's record, and returns it with a hash in [0, 1) that determines its split."""
        repairs.update(record.mended)
        texts = tuple(normalize_line_ends(text, repairs) for text in record.texts)
        self.check_size(sum(len(text.encode("utf-8")) for text in texts))
        record = dataclasses.replace(record, texts=texts)
        # All questions about a passage (or all hypotheses for a premise) are in the same split.
        return record, files.fraction(task.group(record).encode("utf-8"))

    def _text(self, record: Mapping, field: str) -> Union[str, bytearray]:
        path = self.config_path
        setting = f"{path}.{field}" if path.startswith("config.") else f"{field} in {path}"  # --source has no flags
        return text_of(record, getattr(self, field), setting)

    def columns_read(self, names: Iterable[str]) -> list[str]:
        """Returns the table columns that this source needs; for a nested field, this is its top-level column.

        Args:
          names: all columns of the table.

        Raises:
          UserError: the table lacks a required column.
        """
        columns, names, optional = {}, list(names), () if self._task is None else self._task.optional_fields
        fields = [(f"{self.config_path}.{name}", getattr(self, name)) for name in ("text_field", "target_field")]
        if self._task is not None:
            fields = [
                (f"a field of config.objective {type(self._task).__name__}", field) for field in self._task.fields
            ]
        for setting, field in fields:
            if field is not None:
                column = field if field in names else field.partition(".")[0]
                if column not in names and field in optional:
                    continue
                if column not in names:
                    raise UserError(f"{setting} is {field!r}, {nearest(field, names)}")
                columns[column] = None
        return list(columns)


@dataclasses.dataclass
class RecordFiles(Records):
    """Base class of data sources that read records from files."""

    path: str  # a file, a folder or a glob
    valid_path: Optional[str] = None  # files for validation; None: `valid_fraction` of the records in `path`

    endings: ClassVar[tuple[str, ...]]  # file name endings of the files to read if `path` is a folder

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from files.path_problems(self)
        yield from super().problems(experiment)

    def fingerprint(self) -> str:
        return files.fingerprint(self, files.settings_of(self), self.endings)

    def shards(self, split: str) -> list[files.FileShard]:
        selected = None if self.valid_path is not None else split
        paths = files.find_files(self, "train" if selected else split, self.endings)
        return [
            files.FileShard(file, start, stop, selected) for file in paths for start, stop in self._shard_ranges(file)
        ]

    def _shard_ranges(self, file: str) -> Iterator[tuple[int, Optional[int]]]:
        """Yields the range (start, stop) of each shard of a file.

        The subclass defines the unit of the range, for example bytes. A `stop` of None means the end of the file.
        """
        raise NotImplementedError


@dataclasses.dataclass
class EncodedFiles(RecordFiles):
    """Base class of data sources that read text files in any encoding of Python."""

    # encoding of the files, by its name in Python: utf-8 (with or without a byte-order mark), latin-1, cp1252, utf-16
    encoding: str = dataclasses.field(default="utf-8", kw_only=True)

    def problems(self, experiment: Experiment) -> Iterator[str]:
        try:
            "".encode(self.encoding)
        except (LookupError, ValueError):
            common = "'utf-8', 'latin-1', 'cp1252' or 'utf-16'"
            yield f"{self.config_path}.encoding is {self.encoding!r}, it must be a text encoding such as {common}"
        yield from super().problems(experiment)

    @property
    def _encoding_advice(self) -> str:
        return f"{self.config_path}.encoding is {self.encoding!r}: set it to the encoding of the file"

    def open_file(self, path: str) -> contextlib.AbstractContextManager[files.Stream]:
        """Opens a file, decompressed and converted to UTF-8."""
        return files.open_as_utf8(path, self.encoding, self._encoding_advice)

    @contextlib.contextmanager
    def named_encoding(self) -> Iterator[None]:
        """Converts a UnicodeDecodeError in this context to a ValueError that names the field `encoding`."""
        try:
            yield
        except UnicodeDecodeError as e:
            reason = e if files.is_utf8_encoding(self.encoding) else f"a byte that {self.encoding} does not define"
            raise ValueError(f"{reason}; {self._encoding_advice}") from e


@dataclasses.dataclass
class RecordLines(EncodedFiles, Generic[Row]):
    """Base class of data sources whose records are one or more lines of text; their files are read as streams."""

    def lines(self, shard: files.FileShard) -> Iterator[Line]:
        """Yields the lines of a shard as UTF-8, truncating any line of more than `max_record_bytes` bytes.

        A truncated line still has more than `max_record_bytes` bytes, so `check_size` refuses it.
        """
        most = self.max_record_bytes
        with self.open_file(shard.path_or_split) as f:
            if shard.stop is not None:
                f.seek(shard.start)
            while (shard.stop is None or f.tell() < shard.stop) and (line := long_lines.read_line(f, most)):
                is_truncated = len(line) > most and not line.endswith(b"\n")
                yield line
                if is_truncated:
                    files.skip_line(f)

    def rows(self, shard: files.FileShard) -> Iterator[tuple[int, Row]]:
        """Yields (number, row) for each record of a shard.

        `number` is the number of the record's first line, counted from 0 in the shard. `row` is the unparsed record, as
        passed to `parse`.
        """
        raise NotImplementedError

    def parse(self, row: Row) -> JsonObject:
        """Converts a row to a record; raises ValueError if the row is broken."""
        raise NotImplementedError

    def where(self, shard: files.FileShard, number: int) -> str:
        """Returns "file:line" for error messages; `number` is the line's number in the shard, from 0."""
        first = files.line_number(shard.path_or_split, shard.start) if shard.start else 1
        return f"{shard.path_or_split}:{first + number}"


@dataclasses.dataclass(kw_only=True)
class RecordSets(Records):
    """Base class of data sources that read datasets with named splits."""

    train_split: str = "train"  # the dataset's split for training
    valid_split: Optional[str] = None  # the dataset's split for validation; None: `valid_fraction` of train_split

    def named(self, split: str, names: Iterable[str]) -> tuple[str, Optional[str]]:
        """Returns which of the dataset's own splits contains the documents of `split`, and how to select them.

        Args:
          split: "train" or "valid".
          names: the splits of the dataset.

        Returns:
          The name of the dataset's split; and `split` if a hash must select the documents in it, or None if all of its
          records belong to `split`.

        Raises:
          UserError: the dataset has no split with the configured name.
        """
        field = "train_split" if split == "train" or self.valid_split is None else "valid_split"
        name = getattr(self, field)
        if name not in names:
            raise UserError(f"{self.config_path}.{field} is {name!r}, {nearest(name, names)}")
        return name, split if self.valid_split is None else None


def value_of(record: Mapping, name: str, setting: str) -> object:
    """Returns the value of a field in a record.

    Args:
      name: name of the field; "translation.de" is a nested field.
      setting: path of the config field that contains `name`, for the error message.

    Raises:
      ValueError: the record has no such field.
    """
    value = record
    for key in [name] if name in record else name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"no field {name!r}, {nearest(name, record)} (set {setting})")
        value = value[key]
    return value


def text_of(record: Mapping, name: str, setting: str) -> Union[str, bytearray]:
    """Returns the value of a field in a record as text; a very long text is returned as UTF-8 bytes.

    Integers are converted to text.

    Args:
      name: name of the field; "translation.de" is a nested field.
      setting: path of the config field that contains `name`, for the error message.

    Raises:
      ValueError: the record has no such field, or its value is neither text nor an integer.
    """
    value = value_of(record, name, setting)
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):  # for example a label
        return str(value)
    if not isinstance(value, (str, bytearray)):
        raise ValueError(f"field {name!r} holds {type(value).__name__}, it must be a string or a whole number")
    return value


_ONE_PER_LINE = "; a file of JSON lines has one object per line, without a list around them"


def json_object(line: Union[bytes, bytearray]) -> dict:
    """Parses a line that contains a JSON object; if it is a bytearray, long strings stay UTF-8 bytes.

    Raises:
      ValueError: the line is not valid JSON, or its value is not an object.
    """
    try:
        is_long = isinstance(line, bytearray)
        record = long_lines.parse(line) if is_long else json.loads(line.rstrip().decode("utf-8-sig"))
    except json.JSONDecodeError as e:
        hint = _ONE_PER_LINE if line.lstrip()[:1] == b"[" or line.strip() == b"{" else ""
        raise ValueError(f"broken JSON at column {e.colno} ({e.msg}){hint}") from e
    if not isinstance(record, dict):
        hint = _ONE_PER_LINE if isinstance(record, list) else ""
        raise ValueError(f"a JSON object is needed, not {type(record).__name__}{hint}")
    return record


def class_name_decoder(features: Mapping) -> Callable[[Mapping], dict]:
    """Returns a function that replaces the class numbers in a record with class names, including inside lists.

    Args:
      features: the features of a `datasets` or TFDS dataset, by field name. Class labels have the method `int2str`.
    """
    decoders = {name: feature.int2str for name, feature in features.items() if hasattr(feature, "int2str")}
    element_features = {name: getattr(feature, "feature", None) for name, feature in features.items()}  # of lists
    decoders |= {
        name: _list_decoder(feature.int2str)
        for name, feature in element_features.items()
        if hasattr(feature, "int2str")
    }

    def parse(record: Mapping) -> dict:
        return {k: decoders[k](v) if k in decoders and v is not None else v for k, v in record.items()}

    return parse


def _list_decoder(name_of: Callable[[int], str]) -> Callable[[Iterable[int]], list[str]]:
    return lambda numbers: [name_of(int(number)) for number in numbers]


def equal_ranges(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Divides `count` rows into ranges (start, stop) of about SHARD_BYTES.

    size: total size of the rows, in bytes.
    """
    rows = rows_per_chunk(count, size, files.SHARD_BYTES)
    for start in range(0, count, rows):
        yield start, min(start + rows, count)


def rows_per_chunk(count: int, size: int, wanted: int) -> int:
    """Returns how many rows (at least 1) make a chunk of about `wanted` bytes, if `count` rows take `size` bytes."""
    return max(1, count * wanted // max(size, 1))


def row_location(place: str) -> Callable[[int], str]:
    """Returns a function that converts a row number to a location for error messages."""
    return lambda number: f"{place}, row {number} (from 0)"
