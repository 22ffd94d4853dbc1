"""Base classes of data sources with records: fields of text, pairs, held-out data, and broken records."""

import collections
import copy
import dataclasses
import json
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Optional, TypeVar, Union

from pretrainax.config import Experiment, UserError, nearest
from pretrainax.data import files, long_lines
from pretrainax.data.line_ends import normalize_line_ends
from pretrainax.data.sources.base import Document, Reader, Record
from pretrainax.files.json_files import JsonObject

Row = TypeVar("Row")  # unparsed record of a file


@dataclasses.dataclass(kw_only=True)
class Records:
    """Common fields of data sources with records. "translation.de" is a nested field."""

    text_field: str = "text"  # field of a record that contains the text
    target_field: Optional[str] = None  # field of the target: a record is a pair, and the text is its source
    prefix: str = ""  # prepended to the text, for example the task of a pair ("translate English to German: ")
    valid_fraction: float = 0.01  # fraction of the records for validation, if it has no separate files or split
    on_error: str = "stop"  # action for a broken record: stop | skip (and count) it
    max_record_bytes: int = files.MAX_RECORD_BYTES  # larger records are broken; memory use is a few times as much

    broken: ClassVar[str] = "broken records"  # their name in the counts
    _task: ClassVar[Optional[Reader]] = None  # converts records to documents

    def reading(self, task: Reader) -> "Records":
        of_task = copy.copy(self)
        of_task._task = task  # pyright: ignore[reportAttributeAccessIssue]
        return of_task

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
        """Raises ValueError if a record of `size` bytes is too large."""
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
        """Yields the documents of numbered rows.

        Args:
          parse: returns the record of a row; raises ValueError if the row is broken.
          where: returns the location of a row number for error messages.
          split: yields only documents of this split; a hash of the text selects it, so that equal texts are in the same
            split. None: yields all documents.
        """
        for number, row in rows:
            repairs = collections.Counter()
            try:
                document, fraction = self._document(parse(row), repairs)
            except (ValueError, RecursionError) as e:  # broken JSON and broken UTF-8 are ValueErrors
                if self.on_error == "skip":
                    skipped[self.broken] += split != "valid"  # counted in one split only
                    continue
                skipping = f"{type(self).__name__}(..., on_error='skip') in {self.config_path} skips and counts them"
                raise UserError(f"{where(number)}: {e}; {skipping}") from e
            if split is None or (split == "valid") == (fraction < self.valid_fraction):
                if repairs:
                    skipped.update(repairs)
                yield document

    def _document(self, record: Mapping, repairs: collections.Counter) -> tuple[Document, float]:
        """Returns the document of a record, and a number in [0, 1) that decides its split; counts repairs of text."""
        if self._task is not None:
            return self._record_of_task(self._task.read(record), repairs)
        text = normalize_line_ends(self._text(record, "text_field"), repairs)
        long = isinstance(text, bytearray)
        encoded = text if long else text.encode("utf-8")
        self.check_size(len(encoded))
        # The source decides the split of a pair, so that all targets of a source are in the same split.
        fraction = files.fraction(encoded)
        if self.target_field is not None:
            target = normalize_line_ends(self._text(record, "target_field"), repairs)
            source, target = (t.decode() if isinstance(t, bytearray) else t for t in (text, target))
            self.check_size(len(encoded) + len(target.encode("utf-8")))
            return (self.prefix + source, target), fraction
        if long:
            text[:0] = self.prefix.encode()
        return text if long else self.prefix + text, fraction

    def _record_of_task(self, record: Record, repairs: collections.Counter) -> tuple[Document, float]:
        repairs.update(record.mended)
        texts = tuple(normalize_line_ends(text, repairs) for text in record.texts)
        self.check_size(sum(len(text.encode("utf-8")) for text in texts))
        # The first text decides the split, so that all questions about a passage, or premise, are in the same split.
        fraction = files.fraction(next(filter(None, texts), "").encode("utf-8"))
        return dataclasses.replace(record, texts=texts), fraction

    def _text(self, record: Mapping, setting: str) -> Union[str, bytearray]:
        return text_of(record, getattr(self, setting), f"{self.config_path}.{setting}")

    def columns_read(self, names: Iterable[str]) -> list[str]:
        """Returns the columns of a table to read, without nested fields; raises UserError if a column is missing."""
        columns, names = {}, list(names)
        fields = [(f"{self.config_path}.{name}", getattr(self, name)) for name in ("text_field", "target_field")]
        if self._task is not None:
            fields = [(f"a field of config.objective {type(self._task).__name__}", x) for x in self._task.fields]
        for setting, field in fields:
            if field is not None:
                column = field if field in names else field.partition(".")[0]
                if column not in names:
                    raise UserError(f"{setting} is {field!r}, {nearest(field, names)}")
                columns[column] = None
        return list(columns)


@dataclasses.dataclass
class RecordFiles(Records):
    """Files of records. `path` is a file, a folder or a glob."""

    path: str  # a file, a folder or a glob
    valid_path: Optional[str] = None  # files for validation; None: a fraction of `path`

    endings: ClassVar[tuple[str, ...]]  # of files in a folder

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from files.path_problems(self)
        yield from super().problems(experiment)

    def fingerprint(self) -> str:
        return files.fingerprint(self, files.settings_of(self), self.endings)

    def shards(self, split: str) -> list[files.FileShard]:
        selected = None if self.valid_path is not None else split
        paths = files.find_files(self, "train" if selected else split, self.endings)
        return [files.FileShard(file, start, stop, selected) for file in paths for start, stop in self._cuts(file)]

    def _cuts(self, file: str) -> Iterator[tuple[int, Optional[int]]]:
        """Yields (start, stop) of the shards of a file."""
        raise NotImplementedError


class RecordLines(RecordFiles, Generic[Row]):
    """Files whose records are one or several lines, so that they can be read as a stream."""

    def rows(self, shard: files.FileShard) -> Iterator[tuple[int, Row]]:
        """Yields (number, row) of each record of a shard: its first line, from 0, and the argument of `parse`."""
        raise NotImplementedError

    def parse(self, row: Row) -> JsonObject:
        """Returns the record of a row; raises ValueError if the row is broken."""
        raise NotImplementedError

    def where(self, shard: files.FileShard, number: int) -> str:
        """Returns the file and the line of a line number in a shard, for error messages."""
        first = files.line_number(shard.place, shard.start) if shard.start else 1
        return f"{shard.place}:{first + number}"


@dataclasses.dataclass(kw_only=True)
class RecordSets(Records):
    """Datasets with named splits."""

    train_split: str = "train"  # split for training
    valid_split: Optional[str] = None  # split for validation; None: valid_fraction of train_split is held out

    def named(self, split: str, names: Iterable[str]) -> tuple[str, Optional[str]]:
        """Returns the dataset's name of a split, and the split that a hash selects from it, or None for all of it."""
        field = "train_split" if split == "train" or self.valid_split is None else "valid_split"
        name = getattr(self, field)
        if name not in names:
            raise UserError(f"{self.config_path}.{field} is {name!r}, {nearest(name, names)}")
        return name, split if self.valid_split is None else None


def value_of(record: Mapping, name: str, setting: str) -> object:
    """Returns the value of a field of a record; "translation.de" is a nested field.

    Args:
      setting: config field that contains `name`, for the error message.

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
    """Returns the text in a field of a record; a very long text as UTF-8 bytes. Arguments as in `value_of`.

    Raises:
      ValueError: the record has no such field, or its value is not text.
    """
    value = value_of(record, name, setting)
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):  # a label or a number
        return str(value)
    if not isinstance(value, (str, bytearray)):
        raise ValueError(f"field {name!r} holds {type(value).__name__}, it must be a string or a whole number")
    return value


def json_object(line: Union[bytes, bytearray]) -> dict:
    """Parses a line with a JSON object; long strings in a bytearray stay UTF-8 bytes. Raises ValueError if invalid."""
    try:
        is_long = isinstance(line, bytearray)
        record = long_lines.parse(line) if is_long else json.loads(line.rstrip().decode("utf-8-sig"))
    except json.JSONDecodeError as e:
        raise ValueError(f"broken JSON at column {e.colno} ({e.msg})") from e
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is needed, not {type(record).__name__}")
    return record


def class_name_decoder(features: Mapping) -> Callable[[Mapping], dict]:
    """Returns a function that replaces class numbers, also in lists, by the class names in a dataset's features."""
    names = {name: feature.int2str for name, feature in features.items() if hasattr(feature, "int2str")}
    inner = {name: getattr(feature, "feature", None) for name, feature in features.items()}  # of lists
    names |= {name: _of_each(feature.int2str) for name, feature in inner.items() if hasattr(feature, "int2str")}

    def parse(record: Mapping) -> dict:
        return {k: names[k](v) if k in names and v is not None else v for k, v in record.items()}

    return parse


def _of_each(name_of: Callable[[int], str]) -> Callable[[Iterable[int]], list[str]]:
    return lambda numbers: [name_of(int(number)) for number in numbers]


def equal_ranges(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of ranges of `count` rows with a total of `size` bytes; about SHARD_BYTES per range."""
    rows = rows_per_chunk(count, size, files.SHARD_BYTES)
    for start in range(0, count, rows):
        yield start, min(start + rows, count)


def rows_per_chunk(count: int, size: int, wanted: int) -> int:
    """Returns the number of rows, at least 1, in about `wanted` bytes; `count` rows have `size` bytes."""
    return max(1, count * wanted // max(size, 1))


def row_location(place: str) -> Callable[[int], str]:
    return lambda number: f"{place}, row {number} (from 0)"
