"""Scores a unigram baseline on validation targets: the frequency of each token and the form of the targets.

The form of a target is either text or one of the special tokens (for example a sentinel or EOS). The baseline predicts
the form from three facts: the last special token that the decoder has read, whether the decoder has read text after
that token, and whether the target is at the last position of its row. The baseline therefore also knows what the format
determines: the first sentinel of span corruption, the order of sentinels, and the end of a full row. For text, the
baseline uses the token frequencies of the whole corpus. Preparation counts them, so reading them costs nothing.
"""

import collections
import math
from collections.abc import Iterable, Iterator

import numpy as np

from pretrainax.data.batch import HostBatch, is_gathered
from pretrainax.data.corpus import Corpus
from pretrainax.tokenization.base import Vocabulary

_WINDOW = 1 << 22  # tokens per chunk while counting a corpus of pairs; a chunk takes 0.1 s


def target_counts(corpus: Corpus) -> Iterator[np.ndarray]:
    """Yields the number of occurrences of each token id [V] among the predicted tokens, for each chunk of a corpus.

    The sum of the chunks is the count for the whole corpus. All tokens of the corpus count, except in a corpus of
    pairs. There only the tokens of the targets count, which are read from disk.
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
    """Returns the loss and accuracy of the unigram baseline on the validation targets.

    Args:
      counts: occurrences of each id in the text of the targets, [V].
      train_batches: the form of targets is learned from these batches.
      valid_batches: the batches whose targets are scored.

    Returns:
      "loss" in nats per target and "accuracy" of the most likely token, both weighted by loss_weights; "text_loss" and
      "text_accuracy" of the token frequencies alone, given that the target is text; "bits_per_byte" if the batches have
      target_bytes.
    """
    special_ids = np.array(sorted(vocabulary.special_ids - {vocabulary.unk}), np.int64)
    special_index = np.zeros(vocabulary.size, np.int64)  # [V], number of a special token, from 1; 0: text
    special_index[special_ids] = np.arange(1, len(special_ids) + 1)
    frequency = _smoothed(np.where(special_index, 0.0, counts), special_index == 0)  # [V]
    table = np.zeros((4 * (len(special_ids) + 1), len(special_ids) + 1))  # [contexts, outcomes]
    for batch in train_batches:
        context, outcome = _form(batch, special_index)
        np.add.at(table, (context, outcome), batch["loss_weights"])
    form = _smoothed(table, np.ones_like(table, bool))
    top_id = int(frequency.argmax())
    scores = np.concatenate([form[:, :1] * frequency[top_id], form[:, 1:]], axis=1)  # text column: its likeliest id
    guesses = np.concatenate([[top_id], special_ids])[scores.argmax(axis=1)]  # [contexts]

    text_nats = -np.log(np.where(special_index, 1.0, frequency))  # [V]; 0 for special tokens, which the form predicts
    totals = collections.defaultdict(lambda: np.zeros(2))
    for batch in valid_batches:
        (context, outcome), targets, weights = _form(batch, special_index), batch["targets"], batch["loss_weights"]
        loss, text_weights = text_nats[targets] - np.log(form[context, outcome]), weights * (outcome == 0)
        for name, values, value_weights in (
            ("loss", loss, weights),
            ("accuracy", guesses[context] == targets, weights),
            ("text_loss", text_nats[targets], text_weights),
            ("text_accuracy", targets == top_id, text_weights),
        ):
            totals[name] += (value_weights * values).sum(), value_weights.sum()
        if "target_bytes" in batch:
            totals["bits_per_byte"] += (weights * loss).sum() / math.log(2), batch["target_bytes"].sum()
    return {name: float(total / max(count, 1e-9)) for name, (total, count) in totals.items()}


def _form(batch: HostBatch, special_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the context and the outcome (0: text, else the number of the special token) of each target, both [B, N].

    The context is an integer that encodes the three facts that the module describes. If the batch is gathered, it is 0.
    """
    outcome = special_index[batch["targets"]]
    if is_gathered(batch):
        return np.zeros_like(outcome), outcome
    read_index, segments = special_index[batch["tokens"]], batch["segment_ids"]
    positions = np.arange(read_index.shape[1])
    begins = np.ones(read_index.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    last = np.maximum.accumulate(np.where(begins | (read_index > 0), positions, 0), axis=1)  # special, or segment start
    is_full = positions == positions[-1]
    return 4 * np.take_along_axis(read_index, last, axis=1) + 2 * (read_index == 0) + is_full, outcome


def _smoothed(counts: np.ndarray, possible: np.ndarray) -> np.ndarray:
    """Returns probabilities over the last axis, from counts; all `possible` outcomes share one additional count."""
    return (counts + possible / possible.sum(-1, keepdims=True)) / (counts.sum(-1, keepdims=True) + 1)
