"""The ways to fill rows with a corpus: windows across documents, or document by document, several to a row or one.

`pretrainax.data.row_plan` makes the rows of an epoch of them.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np

from pretrainax.config import Experiment, kinds

_BLOCK = 1 << 20  # pieces that are fitted together: bounds memory
_OPEN = 512  # rows that first-fit looks at


class Packing(kinds.Packing):
    """Base of the ways to fill rows."""

    cuts: ClassVar[bool] = True  # rows hold pieces of single documents
    one_piece: ClassVar[bool] = False  # a row is of one piece

    def problems(self, experiment: Experiment) -> Iterator[str]:
        for pairs in {False, experiment.data.source.pairs}:
            for _, objective in experiment.objective.components(pairs):
                name, kind = type(objective).__name__, type(self).__name__
                if not self.cuts and objective.unit != "tokens":
                    yield f"config.data.packing is {kind}, {name} needs {objective.unit}: FirstFit, BestFit or OneEach"
                elif self.cuts and not objective.packs and not isinstance(self, OneEach):
                    yield f"config.data.packing is {kind}, {name} has one example a row: OneEach or None"

    def rows(self, sizes: np.ndarray, capacity: tuple[int, int]) -> np.ndarray:
        """Returns the row of each piece, [n] int64, from 0 without gaps.

        Args:
          sizes: [n, 2], how many inputs and targets each has; none exceeds `capacity`, what a row has room for.
        """
        raise NotImplementedError


@dataclasses.dataclass
class Windows(Packing):
    """Documents laid end to end and cut into rows: no padding, and rows begin and end inside of documents."""

    cuts: ClassVar[bool] = False
    one_piece: ClassVar[bool] = True


@dataclasses.dataclass
class FirstFit(Packing):
    """Pieces of documents in their order, each into the oldest of the open rows where it fits (Johnson 1974)."""

    def rows(self, sizes, capacity):
        return _in_blocks(first_fit, sizes, capacity)


@dataclasses.dataclass
class BestFit(Packing):
    """Pieces of documents, long ones first, each into the row that it fills best: hardly any padding (Johnson 1974)."""

    def rows(self, sizes, capacity):
        return _in_blocks(best_fit, sizes, capacity)


@dataclasses.dataclass
class OneEach(Packing):
    """A piece of a document a row, padded. With `buckets`, a batch is as long as the shortest of them that holds it."""

    one_piece: ClassVar[bool] = True

    buckets: tuple[int, ...] = ()  # lengths below config.data.sequence_length; each compiles its own step

    def rows(self, sizes, capacity):
        return np.arange(len(sizes))

    def problems(self, experiment):
        yield from super().problems(experiment)
        length = experiment.data.sequence_length
        if list(self.buckets) != sorted(set(self.buckets)) or any(not 0 < b < length for b in self.buckets):
            yield (
                f"config.data.packing.buckets is {self.buckets}, they must rise from at least 1 to below "
                f"config.data.sequence_length {length}"
            )


# --- pieces --------------------------------------------------------------------------------------------------------


def cut_documents(ends: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents that end at `ends` in pieces of at most `longest` tokens: starts int64 [n], lengths int64 [n]."""
    lengths = np.diff(ends, prepend=0)
    counts = -(-lengths // longest)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    inside = (np.arange(counts.sum()) - first) * longest  # where a piece begins in its document
    return np.repeat(ends - lengths, counts) + inside, np.minimum(np.repeat(lengths, counts) - inside, longest)


def cut_sentences(ends: np.ndarray, sentence_ends: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts as `cut_documents` does, but pieces end where sentences do; a sentence that is too long by itself is cut."""
    starts, lengths = [], []
    stop = np.searchsorted(sentence_ends, ends)  # a document's last sentence
    begin, sentence = 0, 0
    sentences = sentence_ends.tolist() if len(sentence_ends) < 1 << 24 else sentence_ends
    for last in stop.tolist():
        document_end = int(sentence_ends[last])
        while begin < document_end:
            end = begin
            while sentence <= last and sentences[sentence] - begin <= longest:
                end = int(sentences[sentence])
                sentence += 1
            if end == begin:  # inside of a sentence
                end = begin + longest
            starts.append(begin)
            lengths.append(end - begin)
            begin = end
    return np.array(starts, np.int64), np.array(lengths, np.int64)


# --- fitting -------------------------------------------------------------------------------------------------------


def _in_blocks(fit: Callable, sizes: np.ndarray, capacity: tuple[int, int]) -> np.ndarray:
    blocks, used = [np.zeros(0, np.int64)], 0
    for start in range(0, len(sizes), _BLOCK):
        blocks.append(fit(sizes[start : start + _BLOCK], capacity) + used)
        used = int(blocks[-1].max()) + 1
    return np.concatenate(blocks)


def first_fit(sizes: np.ndarray, capacity: tuple[int, int]) -> np.ndarray:
    """Returns `Packing.rows`, in the order of the pieces."""
    rows = np.empty(len(sizes), np.int64)
    left, numbers, used = np.zeros((0, 2), np.int64), np.zeros(0, np.int64), 0
    for i, size in enumerate(sizes):
        fits = (left >= size).all(axis=1)
        place = int(fits.argmax()) if len(fits) else 0
        if not len(fits) or not fits[place]:
            if len(left) == _OPEN:  # the fullest is closed
                fullest = int(left[:, 0].argmin())
                left, numbers = np.delete(left, fullest, axis=0), np.delete(numbers, fullest)
            left, numbers = np.vstack([left, [capacity]]), np.append(numbers, used)
            place, used = len(left) - 1, used + 1
        left[place] -= size
        rows[i] = numbers[place]
    return rows


def best_fit(sizes: np.ndarray, capacity: tuple[int, int]) -> np.ndarray:
    """Returns `Packing.rows`: longest first, equal ones in random order, each where the fewest inputs stay free."""
    rows = np.empty(len(sizes), np.int64)
    open_rows: list[list] = [[] for _ in range(capacity[0] + 1)]  # by inputs left: (row, targets left)
    some = 0  # bit n: there is a row with n inputs left
    used = 0
    inputs, targets = sizes[:, 0].tolist(), sizes[:, 1].tolist()
    for i in np.lexsort((np.random.default_rng(0).random(len(sizes)), -sizes[:, 0])).tolist():
        candidates = some >> inputs[i] << inputs[i]
        while candidates:
            left = (candidates & -candidates).bit_length() - 1
            if open_rows[left][-1][1] >= targets[i]:
                break
            candidates &= candidates - 1
        if candidates:
            row, targets_left = open_rows[left].pop()
            if not open_rows[left]:
                some ^= 1 << left
        else:
            row, left, targets_left = used, *capacity
            used += 1
        rows[i] = row
        left -= inputs[i]
        open_rows[left].append((row, targets_left - targets[i]))
        some |= 1 << left
    return rows
