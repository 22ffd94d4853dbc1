"""Reads the labels of records: converts them to indices, and infers the names of all labels from the records."""

import collections
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from pretrainax.config import Experiment, UserError, nearest
from pretrainax.data.sources.base import Record

UNKNOWN = 2  # number of labels that the plan of a run assumes before the records exist
_UNEVEN = 0.6  # fraction of the most frequent label above which accuracy no longer selects checkpoints
_MAX_INFERRED = 1_000  # maximum number of inferred labels; more labels are probably free text, numbers or identifiers


def label_name(value: object, field: str) -> str:
    """Returns the name of a label in a record: text as it is, whole numbers without a point, true and false as in JSON.

    Args:
      value: the label in the record.
      field: name of the record's field, for the error message.

    Raises:
      ValueError: the value is neither text, nor a whole number, nor a truth value.
    """
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (bool, np.bool_)):
        return str(value).lower()
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real) and float(value).is_integer():
        return str(int(float(value)))
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} holds the label {value!r}, it must be text, a whole number, true or false")
    return value


def label_number(value: object, field: str, labels: Sequence[str], meant: Sequence[str] = ()) -> int:
    """Converts a label in a record to its index in `labels`.

    Args:
      value: the label in the record, as a name or as a number from 0. If the name of any label is a number, the value
        is always a name. True and False are the names "true" and "false", "True" and "False", or "1" and "0".
      field: name of the record's field, for the error message.
      labels: names of all labels.
      meant: the labels that the numbers 0, 1, … in the records stand for. If empty, they are the labels in the order of
        `labels`.

    Raises:
      ValueError: `value` is not a label of the task.
    """
    name, meant = label_name(value, field), meant or labels
    is_bool = isinstance(value, (bool, np.bool_))
    for spelling in (name, str(value), str(int(value))) if is_bool else (name,):  # pyright: ignore[reportArgumentType]
        if spelling in labels:
            return labels.index(spelling)
    if name.isdecimal() and not any(map(is_number, labels)) and int(name) < len(meant):  # otherwise, numbers are names
        return labels.index(meant[int(name)])
    raise ValueError(f"field {field!r} holds the label {value!r}, {nearest(name, labels)} (config.objective.labels)")


def is_number(name: str) -> bool:
    """Checks whether the name of a label is a finite number: "7", "-1", "4.5"."""
    try:
        return math.isfinite(float(name))
    except ValueError:
        return False


def unused_label_warnings(counts: Mapping[int, int], labels: Sequence[str]) -> Iterator[str]:
    """Yields a warning if some labels have no training example; `counts` maps label indices to numbers of examples."""
    if unused := [name for i, name in enumerate(labels) if not counts.get(i)]:
        yield (
            f"NO EXAMPLE OF {', '.join(map(repr, unused))} in training: the model cannot learn these labels. Check "
            "that config.objective.labels spells the names as the records do"
        )


def uneven_selection(default: str, metric: str, labels: Iterable[str]) -> tuple[str, str]:
    """Chooses the metric that selects checkpoints; see `Objective.selection`.

    Args:
      default: the metric for labels that are about equally frequent.
      metric: the metric if more than 60 % of the records have the same label.
      labels: the label of each training record.
    """
    counts = collections.Counter(labels)
    ((label, count),) = counts.most_common(1)
    share = count / counts.total()
    if share <= _UNEVEN:
        return default, ""
    return metric, f"{share:.1%} of the training labels are {label!r}"


class _LabelReader:
    """Reads only the labels of records; see `data.sources.base.Reader`."""

    optional_fields = ()

    def __init__(self, field: str, values: Callable[[Mapping], Iterable[object]]):
        self.fields, self._field, self._values = (field,), field, values

    def read(self, record: Mapping, /) -> Record:
        names = [label_name(value, self._field) for value in self._values(record)]
        if "" in names:
            raise ValueError(f"field {self._field!r} holds an empty label")
        return Record((), {"labels": names})

    def group(self, record: Record) -> str:
        return ""  # the labels of both splits are read


def infer_labels(experiment: Experiment, field: str, values: Callable[[Mapping], Iterable[object]]) -> tuple[str, ...]:
    """Returns the sorted names of all labels in the training records, or () if the source of the records is invalid.

    If the validation records are held out from the training files, their labels count too. Names that are all numbers
    are sorted by value. For tags of spans, "O" is first, and B-X precedes I-X. Other names are sorted as strings.

    Args:
      field: name of the record's field with the label or labels.
      values: returns the labels in a record; raises ValueError if the record is broken.

    Raises:
      UserError: a record is broken, or the records have no labels or more than 1,000.
    """
    source = experiment.data.source
    if len(source.components()) > 1 or any(source.problems(experiment)):  # `validate` reports both
        return ()
    reading, names, num_records = source.reading(_LabelReader(field, values)), set(), 0
    vars(reading)["shows_broken"] = False  # the preparation shows them
    for split in ("train", "valid") if source.holds_out else ("train",):
        for shard in reading.shards(split):
            for record in reading.read(shard, collections.Counter()):
                assert isinstance(record, Record)
                names.update(record.note["labels"])
                num_records += 1
                if len(names) > _MAX_INFERRED:
                    raise UserError(
                        f"field {field!r} holds more than {_MAX_INFERRED:,} labels in the first {num_records:,} "
                        "records: set config.objective.labels if they are classes, or select another field"
                    )
    if not names:
        raise UserError(f"field {field!r} holds no label in the records of {source}: set config.objective.labels")
    return sorted_labels(names)


def sorted_labels(names: Iterable[str]) -> tuple[str, ...]:
    """Sorts the names of labels as `infer_labels` documents."""
    names = sorted(names)
    if all(map(is_number, names)):
        return tuple(sorted(names, key=float))
    if any(name[:2] in ("B-", "I-") for name in names):
        return tuple(sorted(names, key=lambda name: (name != "O", name[2:], name[:2])))
    return tuple(names)
