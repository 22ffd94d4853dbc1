"""The rows of an epoch: which pieces of the corpus each is made of.

A plan is made once for a corpus, an objective and a length, and kept beside the corpus; a row is looked up in it. So
packed rows are as much a function of (seed, index) as windows are.
"""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from typing import NamedTuple, Optional

import numpy as np
from absl import logging

from pretrainax.config import UserError, to_json
from pretrainax.data import checksums
from pretrainax.data.corpus import Corpus
from pretrainax.data.files import digest
from pretrainax.data.objectives import Objective
from pretrainax.data.packing import OneEach, Packing, cut_documents, cut_sentences
from pretrainax.data.permutation import permute
from pretrainax.data.preparation.shards import ENDS, NOTE_ENDS, NOTES, PARTS
from pretrainax.files.atomic_files import replacing_folder
from pretrainax.files.object_names import path_below

_FORMAT = 4  # of the files, and of how pieces are cut, left out and counted
_STATISTICS = "figures.json"

PermutationKeys = Optional[tuple[int, ...]]  # of an epoch, see permutation.permute; None: in order


class Row(NamedTuple):
    pieces: list[tuple[int, int]]  # (start, length) in the corpus
    bucket: int = 0  # which of the lengths of a OneEach


class RowPlan:
    """The rows of an epoch, in the order that `keys` give: a row is looked up by its number."""

    rows_per_epoch: int
    pieces_per_row: float = 1.0  # on average
    offsets: int = 1  # places where an epoch may begin
    statistics: dict[str, float]  # what was cut and what left out

    def row(self, number: int, keys: PermutationKeys, offset: int) -> Row:
        raise NotImplementedError


class WindowPlan(RowPlan):
    """Windows that do not overlap, each used once an epoch. With `shuffle` the first one starts anywhere in its own
    length; what is left over at either end is less than a window."""

    def __init__(self, num_tokens: int, raw: int, shuffle: bool):
        spare = raw - 1 if shuffle else 0  # all must fit wherever the first one starts
        self._raw, self.statistics = raw, {}
        self.rows_per_epoch = max(1, (num_tokens - spare) // raw)
        self.offsets = min(spare, num_tokens - self.rows_per_epoch * raw) + 1

    def row(self, number, keys, offset):
        place = number if keys is None else permute(number, self.rows_per_epoch, keys)
        return Row([(offset + place * self._raw, self._raw)])


class TablePlan(RowPlan):
    """Pieces sorted by row, and where the pieces of each row end: memory-mapped. Pickles as its path."""

    def __init__(self, directory: str):
        self.directory = directory
        self._starts, self._lengths, self._ends = (_load(directory, name) for name in ("starts", "lengths", "ends"))
        figures = checksums.read_json(os.path.join(directory, _STATISTICS))
        assert figures is not None  # of a plan that is whole
        self.statistics = figures["statistics"]
        self.rows_per_epoch = len(self._ends)
        self.pieces_per_row = len(self._starts) / max(len(self._ends), 1)

    def __reduce__(self):
        return type(self), (self.directory,)

    def row(self, number, keys, offset):
        return self._row(number if keys is None else permute(number, self.rows_per_epoch, keys))

    def _row(self, place: int) -> Row:
        first, last = int(self._ends[place - 1]) if place else 0, int(self._ends[place])
        return Row(list(zip(self._starts[first:last].tolist(), self._lengths[first:last].tolist(), strict=True)))


class BucketPlan(TablePlan):
    """A piece a row, sorted by bucket, and all rows of a global batch from one bucket.

    Of each bucket, what does not fill a batch is left out of the epoch: other pieces in each.
    """

    def __init__(self, directory: str, batch_size: int):
        super().__init__(directory)
        self._sizes, self._batch_size = _load(directory, "buckets").tolist(), batch_size
        batches = [size // batch_size for size in self._sizes]
        self._first_batch = np.cumsum([0, *batches])
        self._first_piece = np.cumsum([0, *self._sizes]).tolist()
        self.rows_per_epoch = sum(batches) * batch_size
        self.statistics["pieces left out of each epoch"] = sum(self._sizes) - self.rows_per_epoch

    def __reduce__(self):
        return type(self), (self.directory, self._batch_size)

    def row(self, number, keys, offset):
        batch, place = divmod(number, self._batch_size)
        if keys is not None:
            batch = permute(batch, int(self._first_batch[-1]), keys)
        bucket = int(np.searchsorted(self._first_batch, batch, "right")) - 1
        place += (batch - int(self._first_batch[bucket])) * self._batch_size
        if keys is not None:
            place = permute(place, self._sizes[bucket], keys)
        return self._row(self._first_piece[bucket] + place)._replace(bucket=bucket)


def make_row_plan(
    corpus: Corpus, objective: Objective, packing: Packing, sequence_length: int, batch_size: int, shuffle: bool
) -> RowPlan:
    """Returns the plan of a corpus, from the disk where it was made before and is whole.

    Raises:
      UserError: the corpus has not a single row.
    """
    longest = objective.lengths(sequence_length).raw
    if not packing.cuts:
        if corpus.num_tokens < longest:
            is_valid = os.path.basename(corpus.directory) == "valid"
            raise UserError(
                f"{'the validation text' if is_valid else 'the corpus'} has {corpus.num_tokens} tokens, one row of "
                f"config.data.sequence_length {sequence_length} takes {longest}: set a smaller one, or give more text "
                f"in config.data.source{', or a larger valid_fraction of it' if is_valid else ''}"
            )
        return WindowPlan(corpus.num_tokens, longest, shuffle)
    framed = [objective.measure(1)] if objective.unit == "records" else []  # which the model has a part in
    key = digest(_FORMAT, corpus.fingerprint, to_json(objective), to_json(packing), sequence_length, *framed)
    directory = _find_or_write(
        os.path.join(corpus.directory, f"rows-{key}"), lambda: _make_tables(corpus, objective, packing, sequence_length)
    )
    buckets = isinstance(packing, OneEach) and packing.buckets
    plan = BucketPlan(directory, batch_size) if buckets else TablePlan(directory)
    if not plan.rows_per_epoch:
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in plan.statistics.items() if count)
        raise UserError(
            f"the corpus has no row for {type(objective).__name__} with {type(packing).__name__} and "
            f"config.train.global_batch_size {batch_size}: {left_out or 'it has no document'}; give more text"
        )
    return plan


def _make_tables(
    corpus: Corpus, objective: Objective, packing: Packing, sequence_length: int
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Returns the tables of a TablePlan, by name, and its statistics."""
    for name in (ENDS, PARTS, NOTES, NOTE_ENDS):  # a plan is kept: it must not be made of a damaged file
        corpus.check(name)
    lengths_of = [objective.lengths(length) for length in (*getattr(packing, "buckets", ()), sequence_length)]
    capacity = lengths_of[-1]
    if objective.unit == "records":
        starts, lengths = cut_documents(corpus.document_ends, max(corpus.num_tokens, 1))
        found, inverse = np.unique(lengths, return_inverse=True)
        table = np.array([objective.measure(n)[1:] for n in found.tolist()]).reshape(-1, 2)
        sizes = np.minimum(table[inverse], capacity[1:])
        cut_short = sum(objective.is_cut(corpus.encoded(i)) for i in range(corpus.num_documents))
    elif objective.unit == "pairs":
        starts, lengths = cut_documents(corpus.document_ends, max(corpus.num_tokens, 1))
        whole = np.diff(corpus.part_ends, prepend=0).reshape(-1, 2)  # tokens of source and target
        cut = np.minimum(whole, objective.pair_room(capacity))
        sizes, cut_short = objective.measure_pairs(cut), int((cut < whole).any(axis=1).sum())
    else:
        if objective.unit == "sentences":
            starts, lengths = cut_sentences(corpus.document_ends, corpus.part_ends, capacity.raw)
        else:
            starts, lengths = cut_documents(corpus.document_ends, capacity.raw)
        table = np.array([(0, 0), *(objective.measure(n)[1:] for n in range(1, capacity.raw + 1))])
        sizes, cut_short = table[lengths], 0
    useful = sizes[:, 1] > 0  # a single token gives a decoder nothing to predict
    if objective.unit == "tokens":  # of a document that was cut just before its end, the end alone
        begins_document = np.isin(starts, corpus.document_ends) | (starts == 0)
        useful &= (lengths > 1) | begins_document
    starts, lengths, sizes = starts[useful], lengths[useful], sizes[useful]
    rows = packing.rows(sizes, capacity[1:])
    fits = [(sizes <= c[1:]).all(axis=1) for c in lengths_of]
    bucket = np.argmax(fits, axis=0)  # the first that holds it
    order = np.lexsort((rows, bucket))
    tables = {
        "starts": starts[order],
        "lengths": lengths[order],
        "ends": np.cumsum(np.bincount(rows)) if len(rows) else np.zeros(0, np.int64),
        "buckets": np.bincount(bucket, minlength=len(lengths_of)),
    }
    room = len(tables["ends"]) * capacity.inputs
    return tables, {
        "fill": float(sizes[:, 0].sum() / room) if room else 0.0,
        f"{'records' if objective.unit == 'records' else 'pairs'} cut short": cut_short,
        "pieces without a target": int((~useful).sum()),
    }


def _find_or_write(directory: str, make: Callable) -> str:
    """Returns the directory of a plan, written by `make` where there is none that is whole.

    Where the corpus may only be read, it is in a folder of this user's own among the temporary files.
    """
    private = os.path.join(tempfile.gettempdir(), f"pretrainax-{os.getuid()}")
    places = {directory: os.path.dirname(directory), os.path.join(private, os.path.basename(directory)): private}
    for place, folder in places.items():
        if os.path.isdir(place) and (folder != private or _is_private(folder)):
            if _is_whole(place):
                return place
            logging.warning("%s is damaged: it is made anew", place)
            shutil.rmtree(place, ignore_errors=True)
    (tables, statistics), reasons = make(), []
    for place, folder in places.items():
        try:
            if folder == private:
                _make_private(folder)
            with replacing_folder(place) as temporary:
                _write(temporary, tables, statistics)
        except OSError as e:  # cannot be written, or is full
            reasons.append(f"{place}: {e.strerror}")
            continue
        return place
    raise UserError(f"cannot write {'; '.join(reasons)}: set TMPDIR to a folder that can be written")


def _make_private(folder: str) -> None:
    """Makes a folder that nobody else can write to; PermissionError where somebody else made one of its name."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not _is_private(folder):
        raise PermissionError(errno.EPERM, "it is a folder of another user, or one that others can write to", folder)


def _is_private(folder: str) -> bool:
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _write(directory: str, tables: dict[str, np.ndarray], statistics: dict[str, float]) -> None:
    for name, table in tables.items():
        np.save(_file(directory, name), table, allow_pickle=False)
    sums = {name: checksums.of_file(_file(directory, name)) for name in tables}
    checksums.write_json(os.path.join(directory, _STATISTICS), {"statistics": statistics, "checksums": sums})


def _is_whole(directory: str) -> bool:
    """Says whether the files of a plan are as they were written."""
    try:
        figures = checksums.read_json(os.path.join(directory, _STATISTICS))
        return figures is not None and all(
            checksums.of_file(_file(directory, name)) == wanted for name, wanted in figures["checksums"].items()
        )
    except (OSError, UserError, KeyError, AttributeError):
        return False


def _file(directory: str, name: str) -> str:
    return path_below(directory, f"{name}.npy")


def _load(directory: str, name: str) -> np.ndarray:
    path = _file(directory, name)
    array = np.load(path, mmap_mode="r" if os.path.getsize(path) > 1 << 16 else None, allow_pickle=False)
    return array.view(np.ndarray)
