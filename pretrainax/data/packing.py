"""Defines packings, which fill rows either with windows that cross documents or with one or more document pieces.

`pretrainax.data.row_plan` uses a packing to plan the rows of an epoch.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np

from pretrainax.config import Experiment, kinds
from pretrainax.config.choice import optional_in_json

_BLOCK = 1 << 20  # pieces that are packed at a time, to limit memory
_MAX_OPEN_ROWS = 512  # maximum number of rows that first-fit searches


class Packing(kinds.Packing):
    """Base class of packings, which decide how documents, or pieces of documents, fill rows."""

    cuts: ClassVar[bool] = True  # rows have pieces of documents; False: windows across documents
    one_piece: ClassVar[bool] = False  # each row has a single piece

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
        """Assigns each piece to a row, and returns the row numbers, int64 [n], which start at 0 and have no gaps.

        Args:
          sizes: [n, 2], the numbers of input tokens and targets of each piece; each is at most `capacity`.
          capacity: the numbers of input tokens and targets that fit in a row.
        """
        raise NotImplementedError


@dataclasses.dataclass
class Windows(Packing):
    """Concatenates documents and cuts them into rows of equal length, without padding.

    A row may start or end inside a document. Each training epoch has its own order of rows and its own offset of the
    first row. With `shuffle_documents`, each training epoch also concatenates the documents in its own order.
    """

    cuts: ClassVar[bool] = False
    one_piece: ClassVar[bool] = True

    # a new order of documents in each epoch, so that rows combine other documents: for several epochs of little text.
    # Costs 16 bytes of memory per document and epoch in each loader, and reads documents one by one, also from a store.
    shuffle_documents: bool = optional_in_json(False, is_free=False)

    def problems(self, experiment):
        yield from super().problems(experiment)
        if self.shuffle_documents and any(part.static for _, part in experiment.objective.components()):
            yield (
                "config.data.packing.shuffle_documents is True, but config.objective.static needs the same rows in "
                "each epoch: set one of them to False"
            )


@dataclasses.dataclass
class FirstFit(Packing):
    """Puts each document piece, in corpus order, into the oldest open row with enough free space (Johnson 1974)."""

    def rows(self, sizes, capacity):
        return _fit_in_blocks(first_fit, sizes, capacity)


@dataclasses.dataclass
class BestFit(Packing):
    """Puts each document piece, longest first, into the row that it fills best (Johnson 1974).

    The rows have hardly any padding.
    """

    def rows(self, sizes, capacity):
        return _fit_in_blocks(best_fit, sizes, capacity)


@dataclasses.dataclass
class OneEach(Packing):
    """Puts one document piece into each row, and pads the row.

    With `buckets` (a list of row lengths), each row has the length of the shortest bucket in which its piece fits, and
    all rows of a batch come from the same bucket.
    """

    one_piece: ClassVar[bool] = True

    buckets: tuple[int, ...] = ()  # row lengths below config.data.sequence_length; each is compiled separately

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
    """Splits documents into pieces of at most `longest` tokens, and returns their starts and lengths, both int64 [n].

    ends: the token offset after the last token of each document.
    """
    lengths = np.diff(ends, prepend=0)
    counts = -(-lengths // longest)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(counts.sum()) - first) * longest  # offset of a piece in its document
    return np.repeat(ends - lengths, counts) + offsets, np.minimum(np.repeat(lengths, counts) - offsets, longest)


def cut_sentences(ends: np.ndarray, sentence_ends: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits documents into pieces as `cut_documents` does, but at sentence ends.

    sentence_ends: the token offset after the last token of each sentence. A sentence of more than `longest` tokens is
    split within the sentence.
    """
    starts, lengths = [], []
    last_sentences = np.searchsorted(sentence_ends, ends)  # last sentence of each document
    begin, sentence = 0, 0
    sentences = sentence_ends.tolist() if len(sentence_ends) < 1 << 24 else sentence_ends
    for last in last_sentences.tolist():
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


def _fit_in_blocks(fit: Callable, sizes: np.ndarray, capacity: tuple[int, int]) -> np.ndarray:
    """Computes the row number of each piece, applying `fit` to each block of _BLOCK pieces separately."""
    blocks, num_rows = [np.zeros(0, np.int64)], 0
    for start in range(0, len(sizes), _BLOCK):
        blocks.append(fit(sizes[start : start + _BLOCK], capacity) + num_rows)
        num_rows = int(blocks[-1].max()) + 1
    return np.concatenate(blocks)


def first_fit(sizes: np.ndarray, capacity: tuple[int, int]) -> np.ndarray:
    """Implements `Packing.rows` for `FirstFit`: places the pieces in the order of `sizes`."""
    rows = np.empty(len(sizes), np.int64)
    free, row_numbers, num_rows = np.zeros((0, 2), np.int64), np.zeros(0, np.int64), 0
    for i, size in enumerate(sizes):
        fits = (free >= size).all(axis=1)
        index = int(fits.argmax()) if len(fits) else 0
        if not len(fits) or not fits[index]:
            if len(free) == _MAX_OPEN_ROWS:  # close the fullest row
                fullest = int(free[:, 0].argmin())
                free, row_numbers = np.delete(free, fullest, axis=0), np.delete(row_numbers, fullest)
            free, row_numbers = np.vstack([free, [capacity]]), np.append(row_numbers, num_rows)
            index, num_rows = len(free) - 1, num_rows + 1
        free[index] -= size
        rows[i] = row_numbers[index]
    return rows


def best_fit(sizes: np.ndarray, capacity: tuple[int, int]) -> np.ndarray:
    """Implements `Packing.rows` for `BestFit`: places the longest pieces first.

    Each piece goes into the row with the least free space among those that it fits in. Pieces of equal length are
    placed in random order.
    """
    rows = np.empty(len(sizes), np.int64)
    open_rows: list[list] = [[] for _ in range(capacity[0] + 1)]  # per number of free inputs: (row, free targets)
    free_bits = 0  # bit n: a row with n free inputs exists
    num_rows = 0
    inputs, targets = sizes[:, 0].tolist(), sizes[:, 1].tolist()
    for i in np.lexsort((np.random.default_rng(0).random(len(sizes)), -sizes[:, 0])).tolist():
        candidates = free_bits >> inputs[i] << inputs[i]
        while candidates:
            free_inputs = (candidates & -candidates).bit_length() - 1
            if open_rows[free_inputs][-1][1] >= targets[i]:
                break
            candidates &= candidates - 1
        if candidates:
            row, free_targets = open_rows[free_inputs].pop()
            if not open_rows[free_inputs]:
                free_bits ^= 1 << free_inputs
        else:
            row, free_inputs, free_targets = num_rows, *capacity
            num_rows += 1
        rows[i] = row
        free_inputs -= inputs[i]
        open_rows[free_inputs].append((row, free_targets - targets[i]))
        free_bits |= 1 << free_inputs
    return rows
