"""Plans the rows of an epoch: each row is a list of pieces of the corpus.

A plan is built once per corpus, objective, packing and sequence length, and saved in the folder of the corpus. Reading
a row is then a lookup in the plan, so packed rows are a function of (seed, index), just as windows are.
"""

import contextlib
import errno
import functools
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
from pretrainax.data.packing import OneEach, Packing, Windows, cut_documents, cut_sentences
from pretrainax.data.permutation import permute
from pretrainax.data.preparation.shards import ENDS, NOTE_ENDS, NOTES, PARTS
from pretrainax.files.atomic_files import replacing_folder
from pretrainax.files.object_names import path_below

_FORMAT = 5  # version of the files, and of the rules for cutting, dropping and counting pieces
_STATISTICS = "figures.json"

PermutationKeys = Optional[tuple[int, ...]]  # keys of permutation.permute for an epoch; None: rows in order


class Row(NamedTuple):
    """The pieces of one row in a plan, and the row's bucket."""

    pieces: list[tuple[int, int]]  # (token offset in the corpus, number of tokens)
    bucket: int = 0  # index of the row length, for OneEach with buckets


class RowPlan:
    """Base class of row plans, which return the rows of an epoch by number, in an order defined by permutation keys."""

    rows_per_epoch: int
    pieces_per_row: float = 1.0  # mean over the rows
    offsets: int = 1  # number of token offsets at which an epoch may start
    statistics: dict[str, float]  # counts of cut and dropped pieces

    def row(self, number: int, keys: PermutationKeys, offset: int) -> Row:
        """Returns row `number` of an epoch.

        Args:
          keys: keys of the epoch's permutation. If None, the rows are in corpus order.
          offset: token offset of the epoch's first window, less than `offsets`; only window plans use it.
        """
        raise NotImplementedError


class WindowPlan(RowPlan):
    """Plans non-overlapping windows of `raw` tokens, each used once per epoch.

    With `shuffle`, the first window of an epoch may start at any offset below the window length, and an epoch leaves
    less than two windows of tokens unused. Without `shuffle`, the first window starts at offset 0, and an epoch leaves
    less than one window unused.
    """

    def __init__(self, num_tokens: int, raw: int, shuffle: bool):
        spare = raw - 1 if shuffle else 0  # all windows must be inside the corpus at any offset
        self._raw, self.statistics = raw, {}
        self.rows_per_epoch = max(1, (num_tokens - spare) // raw)
        self.offsets = min(spare, num_tokens - self.rows_per_epoch * raw) + 1

    def row(self, number, keys, offset):
        position = number if keys is None else permute(number, self.rows_per_epoch, keys)
        return Row([(offset + position * self._raw, self._raw)])


class ShuffledWindowPlan(WindowPlan):
    """Plans windows of a concatenation of the documents that has a new order in each epoch.

    The order is a function of the epoch's permutation keys. A row has one piece per document.
    """

    def __init__(self, corpus: Corpus, raw: int):
        super().__init__(corpus.num_tokens, raw, shuffle=True)
        self._corpus = corpus
        # Rows of a mixture's loader may be in two epochs by turns, so that two orders are in memory.
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)

    def __reduce__(self):
        return type(self), (self._corpus, self._raw)

    def row(self, number, keys, offset):
        [(start, length)], _ = super().row(number, keys, offset)
        order, ends = self._order(keys)
        first, last = ends.searchsorted((start, start + length - 1), "right").tolist()
        documents, window_ends = order[first : last + 1], np.minimum(ends[first : last + 1], start + length)
        lengths = np.diff(window_ends, prepend=start)
        # A piece ends where its document does, except the last piece, which may end before.
        starts = self._corpus.document_ends[documents] - (ends[first : last + 1] - window_ends) - lengths
        return Row(list(zip(starts.tolist(), lengths.tolist(), strict=True)))

    def _draw_order(self, keys: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Returns an epoch's order of documents and the end offset of each in their concatenation, both int64 [n]."""
        ends = self._corpus.document_ends
        order = np.random.default_rng(keys).integers(2**64, size=len(ends), dtype=np.uint64).argsort(kind="stable")
        return order, np.diff(ends, prepend=0)[order].cumsum()


class TablePlan(RowPlan):
    """A plan stored in files: the pieces of the corpus, sorted by row, and where each row's pieces end.

    The files are memory-mapped. Pickling an instance stores only its path.
    """

    def __init__(self, directory: str):
        self.directory = directory
        self._starts, self._lengths, self._ends = (_load(directory, name) for name in ("starts", "lengths", "ends"))
        metadata = checksums.read_json(os.path.join(directory, _STATISTICS))
        assert metadata is not None  # the plan is intact
        self.statistics = metadata["statistics"]
        self.rows_per_epoch = len(self._ends)
        self.pieces_per_row = len(self._starts) / max(len(self._ends), 1)

    def __reduce__(self):
        return type(self), (self.directory,)

    def row(self, number, keys, offset):
        return self._row(number if keys is None else permute(number, self.rows_per_epoch, keys))

    def _row(self, position: int) -> Row:
        first, last = int(self._ends[position - 1]) if position else 0, int(self._ends[position])
        return Row(list(zip(self._starts[first:last].tolist(), self._lengths[first:last].tolist(), strict=True)))


class BucketPlan(TablePlan):
    """A plan with one piece per row, sorted by bucket; all rows of a global batch come from the same bucket.

    Each epoch drops a bucket's leftover rows that do not fill a batch. With shuffling, these are different rows in each
    epoch.
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
        batch, position = divmod(number, self._batch_size)
        if keys is not None:
            batch = permute(batch, int(self._first_batch[-1]), keys)
        bucket = int(np.searchsorted(self._first_batch, batch, "right")) - 1
        position += (batch - int(self._first_batch[bucket])) * self._batch_size
        if keys is not None:
            position = permute(position, self._sizes[bucket], keys)
        return self._row(self._first_piece[bucket] + position)._replace(bucket=bucket)


def make_row_plan(
    corpus: Corpus, objective: Objective, packing: Packing, sequence_length: int, batch_size: int, shuffle: bool
) -> RowPlan:
    """Loads the row plan of a corpus from disk, or builds and saves it if no intact plan exists.

    Window plans are cheap to compute and never saved.

    Raises:
      UserError: the corpus does not fill a single row.
    """
    longest, is_valid = objective.lengths(sequence_length).raw, os.path.basename(corpus.directory) == "valid"
    name, advice = ("the validation text", ", or set a larger valid_fraction") if is_valid else ("the corpus", "")
    if not packing.cuts:
        if corpus.num_tokens < longest:
            raise UserError(
                f"{name} has {corpus.num_tokens} tokens, but one row of config.data.sequence_length {sequence_length} "
                f"takes {longest}: set a smaller length, or add text in config.data.source{advice}"
            )
        if shuffle and isinstance(packing, Windows) and packing.shuffle_documents:
            return ShuffledWindowPlan(corpus, longest)
        return WindowPlan(corpus.num_tokens, longest, shuffle)
    sizes = [objective.measure(1)] if objective.has_own_sizes else []
    key = digest(_FORMAT, corpus.fingerprint, to_json(objective), to_json(packing), sequence_length, *sizes)
    directory = _find_or_write(
        os.path.join(corpus.directory, f"rows-{key}"), lambda: _make_tables(corpus, objective, packing, sequence_length)
    )
    buckets = isinstance(packing, OneEach) and packing.buckets
    plan = BucketPlan(directory, batch_size) if buckets else TablePlan(directory)
    if not plan.rows_per_epoch:
        counts = {reason: n for reason, n in plan.statistics.items() if n and reason != "fill"}
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
        batch_advice = ", or set a smaller batch size or fewer buckets" if buckets else ""
        raise UserError(
            f"{name} has no row for {type(objective).__name__} with {type(packing).__name__} and "
            f"config.train.global_batch_size {batch_size}: {dropped or 'it has no document'}; add text in "
            f"config.data.source{advice}{batch_advice}"
        )
    return plan


def _make_tables(
    corpus: Corpus, objective: Objective, packing: Packing, sequence_length: int
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Builds the tables of a TablePlan, by name, and the plan's statistics."""
    for name in (ENDS, PARTS, NOTES, NOTE_ENDS):  # a plan is reused, so it must not be built from a damaged file
        corpus.check(name)
    lengths_of = [objective.lengths(length) for length in (*getattr(packing, "buckets", ()), sequence_length)]
    capacity = lengths_of[-1]
    if objective.unit == "records":
        starts, lengths = cut_documents(corpus.document_ends, max(corpus.num_tokens, 1))
        unique_lengths, inverse = np.unique(lengths, return_inverse=True)
        piece_sizes = np.array([objective.measure(n)[1:] for n in unique_lengths.tolist()]).reshape(-1, 2)
        sizes = np.minimum(piece_sizes[inverse], capacity[1:])
        num_truncated = sum(objective.is_cut(corpus.encoded(i)) for i in range(corpus.num_documents))
    elif objective.unit == "pairs":
        starts, lengths = cut_documents(corpus.document_ends, max(corpus.num_tokens, 1))
        pair_lengths = np.diff(corpus.part_ends, prepend=0).reshape(-1, 2)  # source and target tokens
        truncated = np.minimum(pair_lengths, objective.max_pair_lengths(capacity))
        sizes, num_truncated = objective.measure_pairs(truncated), int((truncated < pair_lengths).any(axis=1).sum())
    else:
        if objective.unit == "sentences":
            starts, lengths = cut_sentences(corpus.document_ends, corpus.part_ends, capacity.raw)
        else:
            starts, lengths = cut_documents(corpus.document_ends, capacity.raw)
        piece_sizes = np.array([(0, 0), *(objective.measure(n)[1:] for n in range(1, capacity.raw + 1))])
        sizes, num_truncated = piece_sizes[lengths], 0
    # A single token gives a decoder nothing to predict. Pieces that are only the last token of a cut document, usually
    # the separator, are dropped too.
    begins_document = np.isin(starts, corpus.document_ends) | (starts == 0)
    has_target = (sizes[:, 1] > 0) & ((lengths > 1) | begins_document)
    starts, lengths, sizes = starts[has_target], lengths[has_target], sizes[has_target]
    rows = packing.rows(sizes, capacity[1:])
    fits = [(sizes <= c[1:]).all(axis=1) for c in lengths_of]
    bucket = np.argmax(fits, axis=0)  # the shortest bucket that fits the piece
    order = np.lexsort((rows, bucket))
    tables = {
        "starts": starts[order],
        "lengths": lengths[order],
        "ends": np.cumsum(np.bincount(rows)) if len(rows) else np.zeros(0, np.int64),
        "buckets": np.bincount(bucket, minlength=len(lengths_of)),
    }
    num_inputs = len(tables["ends"]) * capacity.inputs
    return tables, {
        "fill": float(sizes[:, 0].sum() / num_inputs) if num_inputs else 0.0,
        f"{'records' if objective.unit == 'records' else 'pairs'} cut short": num_truncated,
        "pieces without a target": int((~has_target).sum()),
    }


def _find_or_write(directory: str, make: Callable) -> str:
    """Returns the folder of an intact plan, after building and saving the plan if there is none.

    If the corpus is read-only, the plan is saved in a temporary folder that only this user can access.

    Args:
      directory: the folder of the plan in the corpus.
      make: builds the tables and statistics of the plan.

    Raises:
      UserError: neither folder can be written.
    """
    private_folder = os.path.join(tempfile.gettempdir(), f"pretrainax-{os.getuid()}")
    candidates = {
        directory: os.path.dirname(directory),
        os.path.join(private_folder, os.path.basename(directory)): private_folder,
    }
    for path, folder in candidates.items():
        if os.path.isdir(path) and (folder != private_folder or _is_private(folder)):
            if _is_intact(path):
                return path
            logging.warning("%s is damaged and will be rebuilt", path)
            shutil.rmtree(path, ignore_errors=True)
    (tables, statistics), reasons = make(), []
    for path, folder in candidates.items():
        try:
            if folder == private_folder:
                _make_private(folder)
            with replacing_folder(path) as temporary:
                _write(temporary, tables, statistics)
        except OSError as e:  # read-only or full
            reasons.append(f"{path}: {e.strerror}")
            continue
        return path
    raise UserError(f"cannot write {'; '.join(reasons)}: set TMPDIR to a writable folder")


def _make_private(folder: str) -> None:
    """Creates a folder that only this user can access.

    Raises:
      PermissionError: the path exists, but it belongs to another user or other users can access it.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not _is_private(folder):
        raise PermissionError(errno.EPERM, "the folder belongs to another user, or others can access it", folder)


def _is_private(folder: str) -> bool:
    """Returns True if the path is a folder that belongs to this user and that no other user can access."""
    info = os.lstat(folder)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def _write(directory: str, tables: dict[str, np.ndarray], statistics: dict[str, float]) -> None:
    """Writes the tables and statistics of a plan to a folder, with checksums."""
    for name, table in tables.items():
        np.save(_file(directory, name), table, allow_pickle=False)
    sums = {name: checksums.file_checksum(_file(directory, name)) for name in tables}
    checksums.write_json(os.path.join(directory, _STATISTICS), {"statistics": statistics, "checksums": sums})


def _is_intact(directory: str) -> bool:
    """Returns True if all files of a plan match their checksums."""
    try:
        metadata = checksums.read_json(os.path.join(directory, _STATISTICS))
        return metadata is not None and all(
            checksums.file_checksum(_file(directory, name)) == expected
            for name, expected in metadata["checksums"].items()
        )
    except (OSError, UserError, KeyError, AttributeError):
        return False


def _file(directory: str, name: str) -> str:
    return path_below(directory, f"{name}.npy")


def _load(directory: str, name: str) -> np.ndarray:
    """Loads a table of a plan; large tables are memory-mapped."""
    path = _file(directory, name)
    array = np.load(path, mmap_mode="r" if os.path.getsize(path) > 1 << 16 else None, allow_pickle=False)
    return array.view(np.ndarray)
