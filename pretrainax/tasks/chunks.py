"""Splits a long text into windows, and combines the head outputs of all windows of a record."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Optional

import numpy as np

from pretrainax.config import Choice, Experiment, UserError
from pretrainax.config.heads import Kind
from pretrainax.data.framing import truncate_longest_first
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note

# Keys in the note of a window. WINDOW: the number of the window within the record, from 0. TRUNCATED: True if some
# tokens of the record are in no window; only in the note of the first window.
WINDOW, TRUNCATED = "window", "lost"


@dataclasses.dataclass
class Chunks(Choice):
    """Splits a text that is longer than a row into windows, each with the record's label (Pappagari et al. 2019).

    With rows of 128 tokens and stride=64, a BERT reads a text of 250 tokens as [CLS] 0 … 125 [SEP], [CLS] 64 … 189
    [SEP] and [CLS] 124 … 249 [SEP] (token indices). The last window ends at the end of the text. For a text pair,
    only the longer text is split. Each window also contains the shorter text, truncated to half of the row.

    In training, each window counts as one example, so long records have more weight. In metrics and predictions, each
    record counts once, and `join` selects how the head outputs of its windows are combined.
    """

    stride: Optional[int] = None  # tokens from the start of one window to the start of the next; None: half a window
    max_windows: Optional[int] = None  # maximum number of windows per record, from the start; None: no limit
    # how the head outputs of a record's windows are combined: "mean" (of the logits), "probabilities" (mean of the
    # probabilities), "max" (maximum of each label), or "first" (output of the first window)
    join: Literal["mean", "probabilities", "max", "first"] = "mean"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        for field in ("stride", "max_windows"):
            value = getattr(self, field)
            if value is not None and value < 1:
                yield f"config.objective.chunks.{field} is {value}, it must be at least 1"
        if experiment.data.drop_duplicates:
            yield (
                "config.data.drop_duplicates compares whole documents, but config.objective.chunks makes windows: set "
                "drop_duplicates to False or chunks to None"
            )

    def windows(self, whole: Encoded, room: int) -> Iterator[Encoded]:
        """Splits a record into windows, and yields each window as a document.

        Args:
          whole: the record as a single document with all its tokens.
          room: maximum number of text tokens (without special tokens) in a row.

        Raises:
          UserError: the stride is longer than a window, so tokens between two windows would be skipped.
        """
        sizes = [len(ids) for ids in whole.parts]
        longest = int(np.argmax(sizes))
        limits = truncate_longest_first([0 if i == longest else size for i, size in enumerate(sizes)], room // 2)
        width = room - sum(limits)
        stride = max(width // 2, 1) if self.stride is None else self.stride
        if stride > width:
            raise UserError(
                f"config.objective.chunks.stride is {stride}, but a window has {width} tokens: the model would not "
                "read the tokens between two windows; set a smaller stride, or a larger config.data.sequence_length"
            )
        last = max(sizes[longest] - width, 0)
        starts = [*range(0, last, stride), last]
        selected_starts = starts[: self.max_windows]
        is_lost = len(selected_starts) < len(starts) or sum(limits) < sum(sizes) - sizes[longest]
        for number, start in enumerate(selected_starts):
            parts = [
                ids if i == longest else ids[:n] for i, (ids, n) in enumerate(zip(whole.parts, limits, strict=True))
            ]
            parts[longest] = whole.parts[longest][start : start + width]
            yield Encoded(parts, whole.note | {WINDOW: number} | ({TRUNCATED: True} if is_lost and not number else {}))

    def combine(self, answers: np.ndarray, notes: Sequence[Note], kind: Kind) -> tuple[np.ndarray, list[Note]]:
        """Combines the head outputs of n windows, [n, L], into one output per record, [records, L].

        Also returns the note of the first window of each record.

        Args:
          answers: head outputs of the windows, [n, L].
          notes: notes of the n windows.
          kind: kind of the head, which determines how "probabilities" are computed.
        """
        starts = [record.start for record in records_of(notes)]
        first_notes = [notes[i] for i in starts]
        if self.join == "first":
            return answers[starts], first_notes
        if self.join == "max":
            return np.maximum.reduceat(answers, starts), first_notes
        counts = np.diff([*starts, len(notes)])[:, None]
        to_probabilities = _PROBABILITIES[kind] if self.join == "probabilities" and kind in _PROBABILITIES else None
        if to_probabilities is None:
            return np.add.reduceat(answers, starts) / counts, first_notes
        mean = np.add.reduceat(to_probabilities(answers.astype(np.float64)), starts) / counts
        return (np.log(mean) if kind == "single" else np.log(mean) - np.log1p(-mean)), first_notes


def records_of(notes: Sequence[Note]) -> list[slice]:
    """Groups documents by record, based on their notes; returns a slice of documents for each record.

    A document with window number 0 begins a new record, and so does a document without windows.
    """
    starts = np.flatnonzero(_begins_record(notes)).tolist()
    return [slice(*bounds) for bounds in itertools.pairwise([*starts, len(notes)])]


def record_indices(notes: Sequence[Note]) -> np.ndarray:
    """Returns the index of the record of each document, [documents]; `notes` are the notes of the documents."""
    return np.cumsum(_begins_record(notes)) - 1


def group_numbers(groups: Iterable[str]) -> np.ndarray:
    """Numbers the groups of records in order of appearance; returns the number of each record's group, [records].

    Args:
      groups: the group of each record, from `Task.group`.
    """
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups], np.int64)


def _begins_record(notes: Sequence[Note]) -> np.ndarray:
    return np.array([note.get(WINDOW, 0) == 0 for note in notes], bool)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Converts logits to the probabilities of mutually exclusive classes, [n, L] -> [n, L]."""
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Converts logits to the probabilities of independent labels, [n, L] -> [n, L]."""
    return 0.5 * (1.0 + np.tanh(0.5 * logits))


_PROBABILITIES = {"single": softmax, "multi": sigmoid}
