"""Records that sources read: which fields hold the text, pairs, what is held out, and broken records."""

import collections
import copy
import dataclasses
import json
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Optional, TypeVar, Union

from pretrainax.config import Experiment, UserError, nearest
from pretrainax.data import files, long_lines
from pretrainax.data.line_ends import plain
from pretrainax.data.sources.base import Document, Reader, Record
from pretrainax.files.json_files import JsonObject

Row = TypeVar("Row")  # of a file: what is read at a time


@dataclasses.dataclass(kw_only=True)
class Records:
    """Fields of every source of records. A field inside of another one is "translation.de"."""

    text_field: str = "text"  # the field of a record that holds its text
    target_field: Optional[str] = None  # with it, a record is a pair: the text is the source, this the target
    prefix: str = ""  # put before the text, as the task of a pair ("translate English to German: ")
    valid_fraction: float = 0.01  # of the records, where validation has no files and no split of its own
    on_error: str = "stop"  # at a broken record: stop | skip it and count it
    max_record_bytes: int = files.MAX_RECORD_BYTES  # a larger record is a broken one; memory takes a few times as much

    broken: ClassVar[str] = "broken records"  # how they are counted
    _task: ClassVar[Optional[Reader]] = None  # which makes documents of the records

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
        """Raises ValueError where a record of this many bytes is too large."""
        if size > self.max_record_bytes:
            raise ValueError(
                f"a record of {size:,} bytes or more, {self.config_path}.max_record_bytes is "
                f"{self.max_record_bytes:,}: raise it if the record is text, and the memory enough"
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
          parse: makes the record of a row; ValueError where it is broken.
          where: names the row of a number in an error line.
          split: only documents of this one, by a hash of the text, so that equal texts are in the same; None: all.
        """
        for number, row in rows:
            found = collections.Counter()
            try:
                document, place = self._document(parse(row), found)
            except (ValueError, RecursionError) as e:  # broken JSON and broken UTF-8 are ValueErrors
                if self.on_error == "skip":
                    skipped[self.broken] += split != "valid"  # else counted in both splits
                    continue
                skipping = f"{type(self).__name__}(..., on_error='skip') in {self.config_path} skips and counts them"
                raise UserError(f"{where(number)}: {e}; {skipping}") from e
            if split is None or (split == "valid") == (place < self.valid_fraction):
                if found:
                    skipped.update(found)
                yield document

    def _document(self, record: Mapping, found: collections.Counter) -> tuple[Document, float]:
        if self._task is not None:
            return self._record_of_task(self._task.read(record), found)
        text = plain(self._text(record, "text_field"), found)
        long = isinstance(text, bytearray)
        encoded = text if long else text.encode("utf-8")
        self.check_size(len(encoded))
        # The place of a pair is that of its source: a source is in one split, with all its targets.
        place = files.fraction(encoded)
        if self.target_field is not None:
            target = plain(self._text(record, "target_field"), found)
            source, target = (t.decode() if isinstance(t, bytearray) else t for t in (text, target))
            self.check_size(len(encoded) + len(target.encode("utf-8")))
            return (self.prefix + source, target), place
        if long:
            text[:0] = self.prefix.encode()
        return text if long else self.prefix + text, place

    def _record_of_task(self, record: Record, found: collections.Counter) -> tuple[Document, float]:
        found.update(record.mended)
        texts = tuple(plain(text, found) for text in record.texts)
        self.check_size(sum(len(text.encode("utf-8")) for text in texts))
        # Its place is that of its first text: what is asked of one passage, or premise, is in one split.
        place = files.fraction(next(filter(None, texts), "").encode("utf-8"))
        return dataclasses.replace(record, texts=texts), place

    def _text(self, record: Mapping, setting: str) -> Union[str, bytearray]:
        return text_of(record, getattr(self, setting), f"{self.config_path}.{setting}")

    def columns_read(self, names: Iterable[str]) -> list[str]:
        """Returns the columns of a table that are read, without fields inside. UserError where one is missing."""
        columns, names = {}, list(names)
        wanted = [(f"{self.config_path}.{name}", getattr(self, name)) for name in ("text_field", "target_field")]
        if self._task is not None:
            wanted = [(f"a field of config.objective {type(self._task).__name__}", x) for x in self._task.fields]
        for setting, field in wanted:
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
    valid_path: Optional[str] = None  # files for validation; None: a share of `path`

    endings: ClassVar[tuple[str, ...]]  # of the files that a folder is searched for

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from files.path_problems(self)
        yield from super().problems(experiment)

    def fingerprint(self) -> str:
        return files.fingerprint(self, files.settings_of(self), self.endings)

    def shards(self, split: str) -> list[files.Part]:
        wanted = None if self.valid_path is not None else split
        found = files.find(self, "train" if wanted else split, self.endings)
        return [files.Part(file, start, stop, wanted) for file in found for start, stop in self._cuts(file)]

    def _cuts(self, file: str) -> Iterator[tuple[int, Optional[int]]]:
        """Returns (start, stop) of the shards of a file."""
        raise NotImplementedError


class RecordLines(RecordFiles, Generic[Row]):
    """Files of lines, each of which is a record or a part of one: they can be read as they come."""

    def rows(self, shard: files.Part) -> Iterator[tuple[int, Row]]:
        """Yields the number, from 0, of the first line of each record of a shard, and what `parse` reads."""
        raise NotImplementedError

    def parse(self, row: Row) -> JsonObject:
        """Returns the record of a row; ValueError where it is broken."""
        raise NotImplementedError

    def where(self, shard: files.Part, number: int) -> str:
        """Names the line of a number of a shard, for error lines."""
        first = files.line_number(shard.place, shard.start) if shard.start else 1
        return f"{shard.place}:{first + number}"


@dataclasses.dataclass(kw_only=True)
class RecordSets(Records):
    """Data sets whose splits have names."""

    train_split: str = "train"  # the split that is for training
    valid_split: Optional[str] = None  # the one for validation; None: valid_fraction of train_split is held out

    def named(self, split: str, names: Iterable[str]) -> tuple[str, Optional[str]]:
        """Returns the data set's name of a split, and which of its documents are wanted."""
        field = "train_split" if split == "train" or self.valid_split is None else "valid_split"
        name = getattr(self, field)
        if name not in names:
            raise UserError(f"{self.config_path}.{field} is {name!r}, {nearest(name, names)}")
        return name, split if self.valid_split is None else None


def value_of(record: Mapping, name: str, setting: str) -> object:
    """Returns what a field of a record holds, "translation.de" for one inside of another.

    Args:
      setting: the field of the config that names it, for the error.

    Raises:
      ValueError: there is no such field.
    """
    value = record
    for key in [name] if name in record else name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"no field {name!r}, {nearest(name, record)} (set {setting})")
        value = value[key]
    return value


def text_of(record: Mapping, name: str, setting: str) -> Union[str, bytearray]:
    """Returns the text that a field of a record holds; a very long one as its UTF-8. Raises as `value_of`, and
    ValueError where it is no text."""
    value = value_of(record, name, setting)
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):  # a label, or a number that is a text
        return str(value)
    if not isinstance(value, (str, bytearray)):
        raise ValueError(f"field {name!r} holds {type(value).__name__}, it must be a string or a whole number")
    return value


def json_object(line: Union[bytes, bytearray]) -> dict:
    """Reads the object of a line of JSON, of a bytearray with its long strings as UTF-8; ValueError if it is none."""
    try:
        is_long = isinstance(line, bytearray)
        record = long_lines.parse(line) if is_long else json.loads(line.rstrip().decode("utf-8-sig"))
    except json.JSONDecodeError as e:
        raise ValueError(f"broken JSON at column {e.colno} ({e.msg})") from e
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is needed, not {type(record).__name__}")
    return record


def named_classes(features: Mapping) -> Callable[[Mapping], dict]:
    """Puts the names of classes, and of those in lists, in place of their numbers, for a data set whose features know
    them."""
    names = {name: feature.int2str for name, feature in features.items() if hasattr(feature, "int2str")}
    inner = {name: getattr(feature, "feature", None) for name, feature in features.items()}  # of lists
    names |= {name: _of_each(feature.int2str) for name, feature in inner.items() if hasattr(feature, "int2str")}

    def parse(record: Mapping) -> dict:
        return {k: names[k](v) if k in names and v is not None else v for k, v in record.items()}

    return parse


def _of_each(name_of: Callable[[int], str]) -> Callable[[Iterable[int]], list[str]]:
    return lambda numbers: [name_of(int(number)) for number in numbers]


def equal_cuts(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of ranges of `count` rows, of `size` bytes in all: about SHARD_BYTES each."""
    rows = rows_of(count, size, files.SHARD_BYTES)
    for start in range(0, count, rows):
        yield start, min(start + rows, count)


def rows_of(count: int, size: int, wanted: int) -> int:
    """Returns how many of `count` rows of `size` bytes have about `wanted` bytes; at least one."""
    return max(1, count * wanted // max(size, 1))


def row_of(place: str) -> Callable[[int], str]:
    return lambda number: f"{place}, row {number} (from 0)"
