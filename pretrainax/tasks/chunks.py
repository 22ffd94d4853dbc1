"""Windows of texts that are longer than a row, and one answer of those to all windows of a record."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, Optional

import numpy as np

from pretrainax.config import Choice, Experiment, UserError
from pretrainax.config.heads import Kind
from pretrainax.data.framing import longest_first
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note

WINDOW, LOST = "window", "lost"  # in a note: the number of a window; of the first, that some of the text is in none


@dataclasses.dataclass
class Chunks(Choice):
    """Reads a text that is longer than a row in windows, each with the label of its record (Pappagari et al. 2019).

    With rows of 128 tokens and stride=64, a BERT reads of a text of 250 tokens [CLS] 0 … 125 [SEP], [CLS] 64 … 189
    [SEP] and [CLS] 124 … 249 [SEP]: the last one ends where the text does. Of a pair, the longer text is read in
    windows, each beside the other text, which takes at most half of the row.

    Each window is an example of the training, and counts as one: long records count more. In the figures, and in what
    is predicted, a record is one: the answers to its windows are joined.
    """

    stride: Optional[int] = None  # tokens from the begin of a window to that of the next; None: half a window
    most: Optional[int] = None  # windows of a record, the first ones; None: all
    # of the answers to a record's windows: mean of what the head gives, mean of the probabilities, the largest of each
    # label, that of the first window
    join: Literal["mean", "probabilities", "max", "first"] = "mean"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        for field in ("stride", "most"):
            value = getattr(self, field)
            if value is not None and value < 1:
                yield f"config.objective.chunks.{field} is {value}, it must be at least 1"
        if experiment.data.drop_duplicates:
            yield "config.data.drop_duplicates is of whole texts, config.objective.chunks of parts: set one to None"

    def windows(self, whole: Encoded, room: int) -> Iterator[Encoded]:
        """Yields a record, of whose texts a row has room for so many tokens, as windows.

        Raises:
          UserError: a stride that leaves out tokens.
        """
        sizes = [len(ids) for ids in whole.parts]
        long = int(np.argmax(sizes))
        kept = longest_first([0 if i == long else size for i, size in enumerate(sizes)], room // 2)
        width = room - sum(kept)
        stride = max(width // 2, 1) if self.stride is None else self.stride
        if stride > width:
            raise UserError(
                f"config.objective.chunks.stride is {stride}, and a window has {width} tokens: what is between two "
                "would not be read; set a smaller one, or a larger config.data.sequence_length"
            )
        last = max(sizes[long] - width, 0)
        starts = [*range(0, last, stride), last]
        read = starts[: self.most]
        is_lost = len(read) < len(starts) or sum(kept) < sum(sizes) - sizes[long]
        for number, start in enumerate(read):
            parts = [ids if i == long else ids[:n] for i, (ids, n) in enumerate(zip(whole.parts, kept, strict=True))]
            parts[long] = whole.parts[long][start : start + width]
            yield Encoded(parts, whole.note | {WINDOW: number} | ({LOST: True} if is_lost and not number else {}))

    def joined(self, answers: np.ndarray, notes: Sequence[Note], kind: Kind) -> tuple[np.ndarray, list[Note]]:
        """Returns one answer of each record, [records, L], of those to its windows, [n, L], and a note of each."""
        starts = [one.start for one in records_of(notes)]
        of_records = [notes[i] for i in starts]
        if self.join == "first":
            return answers[starts], of_records
        if self.join == "max":
            return np.maximum.reduceat(answers, starts), of_records
        counts = np.diff([*starts, len(notes)])[:, None]
        of_labels = _PROBABILITIES[kind] if self.join == "probabilities" and kind in _PROBABILITIES else None
        if of_labels is None:
            return np.add.reduceat(answers, starts) / counts, of_records
        mean = np.add.reduceat(of_labels(answers.astype(np.float64)), starts) / counts
        return (np.log(mean) if kind == "single" else np.log(mean) - np.log1p(-mean)), of_records


def records_of(notes: Sequence[Note]) -> list[slice]:
    """Returns which documents are of each record, in their order: those of one are numbered from 0 as its windows."""
    starts = [i for i, note in enumerate(notes) if note[WINDOW] == 0]
    return [slice(*ends) for ends in itertools.pairwise([*starts, len(notes)])]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the probabilities of classes [n, L], of which each row has one."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Returns the probability of each label, [n, L], by itself."""
    return 0.5 * (1.0 + np.tanh(0.5 * logits))


_PROBABILITIES = {"single": softmax, "multi": sigmoid}
