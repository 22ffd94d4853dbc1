"""The score of a model that knows how often each token occurs and how targets are built, on the same targets.

What is free is free for it too. Whether a target is text or a mark (a sentinel, an end), and which mark, it says from
the last mark that the decoder has read, whether text came after that, and whether the row has no room for more: so the
first sentinel of span corruption costs nothing, nor which one comes next, nor the end of a full row. Of the text itself
it knows the frequencies in the whole corpus, which are counted when that is prepared and cost nothing to read.
"""

import collections
import math
from collections.abc import Iterable, Iterator

import numpy as np

from pretrainax.data.batch import HostBatch, is_gathered
from pretrainax.data.corpus import Corpus
from pretrainax.tokenization.base import Vocabulary

_WINDOW = 1 << 22  # tokens of a corpus of pairs that are counted at a time, in a tenth of a second


def target_counts(corpus: Corpus) -> Iterator[np.ndarray]:
    """Yields counts of each id, [V], whose sum is how often it occurs in what is predicted of a corpus.

    Of text that is all of it; of pairs the targets, whose tokens are read for it.
    """
    if corpus.parts != "pairs":
        yield corpus.token_counts
        return
    for start in range(0, corpus.num_tokens, _WINDOW):
        tokens = corpus.tokens(start, min(_WINDOW, corpus.num_tokens - start))
        first, last = corpus.part_ends.searchsorted((start, start + len(tokens) - 1), "right")
        ends = corpus.part_ends[first:last] - start
        parts = np.arange(first, last + 1).repeat(np.diff(ends, prepend=0, append=len(tokens)))
        yield np.bincount(tokens[parts % 2 == 1], minlength=len(corpus.token_counts))


def unigram_baseline(
    counts: np.ndarray, train_batches: Iterable[HostBatch], valid_batches: Iterable[HostBatch], vocabulary: Vocabulary
) -> dict[str, float]:
    """Scores token frequencies, and the form of the training targets, on the validation targets.

    Args:
      counts: how often each id occurs in the text of the targets, [V].

    Returns:
      "loss", nats a target, and "accuracy" of its likeliest token, both weighted by loss_weights; "text_loss" and
      "text_accuracy", of the frequencies alone, where it is told that a target is text; "bits_per_byte" where the
      batches have target_bytes.
    """
    marks = np.array(sorted(vocabulary.special_ids - {vocabulary.unk}), np.int64)
    number = np.zeros(vocabulary.size, np.int64)  # of a mark, from 1; 0: text
    number[marks] = np.arange(1, len(marks) + 1)
    frequency = _smoothed(np.where(number, 0.0, counts), number == 0)  # [V]
    table = np.zeros((4 * (len(marks) + 1), len(marks) + 1))  # [contexts, outcomes]
    for batch in train_batches:
        context, outcome = _form(batch, number)
        np.add.at(table, (context, outcome), batch["loss_weights"])
    form = _smoothed(table, np.ones_like(table, bool))
    text = int(frequency.argmax())
    each = np.concatenate([form[:, :1] * frequency[text], form[:, 1:]], axis=1)  # of the likeliest text, and each mark
    guesses = np.concatenate([[text], marks])[each.argmax(axis=1)]  # [contexts]

    nats = -np.log(np.where(number, 1.0, frequency))  # [V]; that it is a mark, and which one, the form says
    totals = collections.defaultdict(lambda: np.zeros(2))
    for batch in valid_batches:
        (context, outcome), targets, weights = _form(batch, number), batch["targets"], batch["loss_weights"]
        loss, of_text = nats[targets] - np.log(form[context, outcome]), weights * (outcome == 0)
        for name, values, of in (
            ("loss", loss, weights),
            ("accuracy", guesses[context] == targets, weights),
            ("text_loss", nats[targets], of_text),
            ("text_accuracy", targets == text, of_text),
        ):
            totals[name] += (of * values).sum(), of.sum()
        if "target_bytes" in batch:
            totals["bits_per_byte"] += (weights * loss).sum() / math.log(2), batch["target_bytes"].sum()
    return {name: float(total / max(count, 1e-9)) for name, (total, count) in totals.items()}


def _form(batch: HostBatch, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns what the decoder has read before each target, as a number, and which mark the target is, [B, N] both."""
    outcome = number[batch["targets"]]
    if is_gathered(batch):
        return np.zeros_like(outcome), outcome
    read, segments = number[batch["tokens"]], batch["segment_ids"]
    places = np.arange(read.shape[1])
    begins = np.ones(read.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    last = np.maximum.accumulate(np.where(begins | (read > 0), places, 0), axis=1)  # a mark, or the segment's start
    is_full = places == places[-1]
    return 4 * np.take_along_axis(read, last, axis=1) + 2 * (read == 0) + is_full, outcome


def _smoothed(counts: np.ndarray, possible: np.ndarray) -> np.ndarray:
    """Returns the probabilities of the last axis, after one more count that all `possible` ones share."""
    return (counts + possible / possible.sum(-1, keepdims=True)) / (counts.sum(-1, keepdims=True) + 1)
