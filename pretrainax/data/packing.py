"""Packs documents into rows: windows that cross documents, or pieces of documents, several or one per row.

`pretrainax.data.row_plan` builds the rows of an epoch with a packing.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np

from pretrainax.config import Experiment, kinds

_BLOCK = 1 << 20  # pieces packed together; bounds memory
_MAX_OPEN_ROWS = 512  # rows that first-fit searches


class Packing(kinds.Packing):
    """Base class of packings, which fill rows with documents or with pieces of documents."""

    cuts: ClassVar[bool] = True  # cuts documents into pieces; a piece never spans documents
    one_piece: ClassVar[bool] = False  # a row has one piece

    def problems(self, experiment: Experiment) -> Iterator[str]:
        for pairs in {False, experiment.data.source.pairs}:
            for _, objective in experiment.objective.components(pairs):
                name, kind = type(objective).__name__, type(self).__name__
                if not self.cuts and objective.unit != "tokens":
                    yield (
                        f"config.data.packing is {kind}, {name} needs {objective.unit}: "
                        "set FirstFit, BestFit or OneEach"
                    )
                elif self.cuts and not objective.packs and not isinstance(self, OneEach):
                    yield f"config.data.packing is {kind}, {name} has one example per row: set OneEach or None"

    def rows(self, sizes: np.ndarray, capacity: tuple[int, int]) -> np.ndarray:
        """Returns the number of the row of each piece, int64 [n]. Row numbers begin at 0 and have no gaps.

        Args:
          sizes: [n, 2], the numbers of inputs and of targets of each piece; each is at most `capacity`.
          capacity: the numbers of inputs and of targets that fit in a row.
        """
        raise NotImplementedError


@dataclasses.dataclass
class Windows(Packing):
    """Concatenates documents and cuts them into rows of equal length, without padding.

    A row may start or end inside a document.
    """

    cuts: ClassVar[bool] = False
    one_piece: ClassVar[bool] = True


@dataclasses.dataclass
class FirstFit(Packing):
    """Puts document pieces, in their order, into the oldest open row with room for the piece (Johnson 1974)."""

    def rows(self, sizes, capacity):
        return _in_blocks(first_fit, sizes, capacity)


@dataclasses.dataclass
class BestFit(Packing):
    """Puts document pieces, longest first, into the row that they fill best (Johnson 1974).

    There is hardly any padding.
    """

    def rows(self, sizes, capacity):
        return _in_blocks(best_fit, sizes, capacity)


@dataclasses.dataclass
class OneEach(Packing):
    """Puts one document piece into each row, and pads the row.

    With `buckets`, all rows of a batch have the same length: the shortest bucket that fits them.
    """

    one_piece: ClassVar[bool] = True

    buckets: tuple[int, ...] = ()  # row lengths below config.data.sequence_length; a step is compiled for each

    def rows(self, sizes, capacity):
        return np.arange(len(sizes))

    def problems(self, experiment):
        yield from super().problems(experiment)
        length = experiment.data.sequence_length
        if list(self.buckets) != sorted(set(self.buckets)) or any(not 0 < b < length for b in self.buckets):
            yield (
                f"config.data.packing.buckets is {self.buckets}, they must increase, from at least 1 to below "
                f"config.data.sequence_length {length}"
            )


# --- pieces --------------------------------------------------------------------------------------------------------


def cut_documents(ends: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns starts and lengths, both int64 [n], of document pieces of at most `longest` tokens.

    ends: the offset after the last token of each document.
    """
    lengths = np.diff(ends, prepend=0)
    counts = -(-lengths // longest)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(counts.sum()) - first) * longest  # offset of a piece in its document
    return np.repeat(ends - lengths, counts) + offsets, np.minimum(np.repeat(lengths, counts) - offsets, longest)


def cut_sentences(ends: np.ndarray, sentence_ends: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns pieces like `cut_documents`, but cuts documents at sentence ends.

    sentence_ends: the offset after the last token of each sentence. A sentence of more than `longest` tokens is cut
    inside.
    """
    starts, lengths = [], []
    stop = np.searchsorted(sentence_ends, ends)  # last sentence of each document
    begin, sentence = 0, 0
    sentences = sentence_ends.tolist() if len(sentence_ends) < 1 << 24 else sentence_ends
    for last in stop.tolist():
        document_end = int(sentence_ends[last])
        while begin < document_end:
            end = begin
            while sentence <= last and sentences[sentence] - begin <= longest:
                end = int(sentences[sentence])
                sentence += 1
            if end == begin:  # inside a sentence
                end = begin + longest
            starts.append(begin)
            lengths.append(end - begin)
            begin = end
    return np.array(starts, np.int64), np.array(lengths, np.int64)


# --- fitting -------------------------------------------------------------------------------------------------------


def _in_blocks(fit: Callable, sizes: np.ndarray, capacity: tuple[int, int]) -> np.ndarray:
    """Returns the row of each piece, as `fit` computes them for each block of _BLOCK pieces separately."""
    blocks, used = [np.zeros(0, np.int64)], 0
    for start in range(0, len(sizes), _BLOCK):
        blocks.append(fit(sizes[start : start + _BLOCK], capacity) + used)
        used = int(blocks[-1].max()) + 1
    return np.concatenate(blocks)


def first_fit(sizes: np.ndarray, capacity: tuple[int, int]) -> np.ndarray:
    """Implements `Packing.rows` for `FirstFit`: places the pieces in the order of `sizes`."""
    rows = np.empty(len(sizes), np.int64)
    left, numbers, used = np.zeros((0, 2), np.int64), np.zeros(0, np.int64), 0
    for i, size in enumerate(sizes):
        fits = (left >= size).all(axis=1)
        place = int(fits.argmax()) if len(fits) else 0
        if not len(fits) or not fits[place]:
            if len(left) == _MAX_OPEN_ROWS:  # close the fullest row
                fullest = int(left[:, 0].argmin())
                left, numbers = np.delete(left, fullest, axis=0), np.delete(numbers, fullest)
            left, numbers = np.vstack([left, [capacity]]), np.append(numbers, used)
            place, used = len(left) - 1, used + 1
        left[place] -= size
        rows[i] = numbers[place]
    return rows


def best_fit(sizes: np.ndarray, capacity: tuple[int, int]) -> np.ndarray:
    """Implements `Packing.rows`: the longest pieces first, each into the row with the least free space that fits it.

    Pieces of equal length are placed in a random order.
    """
    rows = np.empty(len(sizes), np.int64)
    open_rows: list[list] = [[] for _ in range(capacity[0] + 1)]  # per number of free inputs: (row, free targets)
    free_bits = 0  # bit n: a row with n free inputs exists
    used = 0
    inputs, targets = sizes[:, 0].tolist(), sizes[:, 1].tolist()
    for i in np.lexsort((np.random.default_rng(0).random(len(sizes)), -sizes[:, 0])).tolist():
        candidates = free_bits >> inputs[i] << inputs[i]
        while candidates:
            left = (candidates & -candidates).bit_length() - 1
            if open_rows[left][-1][1] >= targets[i]:
                break
            candidates &= candidates - 1
        if candidates:
            row, targets_left = open_rows[left].pop()
            if not open_rows[left]:
                free_bits ^= 1 << left
        else:
            row, left, targets_left = used, *capacity
            used += 1
        rows[i] = row
        left -= inputs[i]
        open_rows[left].append((row, targets_left - targets[i]))
        free_bits |= 1 << left
    return rows
