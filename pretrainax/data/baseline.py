"""Scores a unigram baseline on the validation targets.

The baseline first predicts the kind of each target, then the token itself. The kind is "text" or one of the special
tokens, for example a sentinel or EOS. The kind is predicted from three facts: the last special token that the decoder
has read, whether the decoder has read text since, and whether the target is at the last position of its row. The
baseline therefore also learns whatever follows from the format alone: the first sentinel of span corruption, the order
of the sentinels, and the end of a full row. If the target is text, the baseline uses the token frequencies of the whole
corpus. Data preparation has already counted these frequencies, so the baseline does not read the corpus again.
"""

import collections
import math
from collections.abc import Iterable, Iterator

import numpy as np

from pretrainax.data.batch import HostBatch, is_gathered
from pretrainax.data.corpus import Corpus
from pretrainax.tokenization.base import Vocabulary

_WINDOW = 1 << 22  # tokens per chunk when counting a corpus of pairs; a chunk takes 0.1 s


def target_counts(corpus: Corpus) -> Iterator[np.ndarray]:
    """Yields, for each chunk of a corpus, how often each token id occurs among the predicted tokens, [V].

    The sum over the chunks is the count for the whole corpus. In a corpus of pairs, only the tokens of the targets are
    predicted; they are read from disk in chunks. In all other corpora, every token is predicted, and the stored counts
    are the only chunk.
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
    """Computes the loss and accuracy of the unigram baseline on the validation targets.

    Args:
      counts: occurrences of each token id in the text of the targets, [V].
      train_batches: batches from which the baseline estimates the probability of each kind of target.
      valid_batches: the batches whose targets are scored.
      vocabulary: the vocabulary of the batches; it determines which ids are special tokens.

    Returns:
      "loss" in nats per target and "accuracy" of the most likely token, both weighted by loss_weights. "text_loss" and
      "text_accuracy" cover the text targets only and take it as known that they are text, so they measure the token
      frequencies alone. "bits_per_byte" is present if the batches have target_bytes.
    """
    special_ids = np.array(sorted(vocabulary.special_ids - {vocabulary.unk}), np.int64)
    special_index = np.zeros(vocabulary.size, np.int64)  # [V], index of a special token, from 1; 0: text
    special_index[special_ids] = np.arange(1, len(special_ids) + 1)
    frequencies = _smoothed(np.where(special_index, 0.0, counts), special_index == 0)  # [V]
    kind_counts = np.zeros((4 * (len(special_ids) + 1), len(special_ids) + 1))  # [contexts, kinds]
    for batch in train_batches:
        context, kind = _contexts_and_kinds(batch, special_index)
        np.add.at(kind_counts, (context, kind), batch["loss_weights"])
    kind_probabilities = _smoothed(kind_counts, np.ones_like(kind_counts, bool))
    top_id = int(frequencies.argmax())
    # Column 0 is the most likely text id.
    scores = np.concatenate([kind_probabilities[:, :1] * frequencies[top_id], kind_probabilities[:, 1:]], axis=1)
    predictions = np.concatenate([[top_id], special_ids])[scores.argmax(axis=1)]  # [contexts]

    text_nats = -np.log(np.where(special_index, 1.0, frequencies))  # [V]; 0 for special tokens, whose kind is the token
    totals = collections.defaultdict(lambda: np.zeros(2))
    for batch in valid_batches:
        (context, kind), targets, weights = (
            _contexts_and_kinds(batch, special_index),
            batch["targets"],
            batch["loss_weights"],
        )
        loss, text_weights = text_nats[targets] - np.log(kind_probabilities[context, kind]), weights * (kind == 0)
        for name, values, value_weights in (
            ("loss", loss, weights),
            ("accuracy", predictions[context] == targets, weights),
            ("text_loss", text_nats[targets], text_weights),
            ("text_accuracy", targets == top_id, text_weights),
        ):
            totals[name] += (value_weights * values).sum(), value_weights.sum()
        if "target_bytes" in batch:
            totals["bits_per_byte"] += (weights * loss).sum() / math.log(2), batch["target_bytes"].sum()
    return {name: float(total / max(count, 1e-9)) for name, (total, count) in totals.items()}


def _contexts_and_kinds(batch: HostBatch, special_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the context and the kind of each target, both int [B, N].

    The kind is 0 for text, or the 1-based index of the special token. The context is an integer that encodes the three
    facts listed in the module docstring. In a gathered batch, all contexts are 0.
    """
    kind = special_index[batch["targets"]]
    if is_gathered(batch):
        return np.zeros_like(kind), kind
    read_index, segments = special_index[batch["tokens"]], batch["segment_ids"]
    positions = np.arange(read_index.shape[1])
    starts_segment = np.ones(read_index.shape, bool)
    starts_segment[:, 1:] = segments[:, 1:] != segments[:, :-1]
    # Position of the last special token, or of the start of the segment.
    last_position = np.maximum.accumulate(np.where(starts_segment | (read_index > 0), positions, 0), axis=1)
    is_last = positions == positions[-1]
    return 4 * np.take_along_axis(read_index, last_position, axis=1) + 2 * (read_index == 0) + is_last, kind


def _smoothed(counts: np.ndarray, possible: np.ndarray) -> np.ndarray:
    """Converts counts to probabilities over the last axis.

    One extra count is split evenly among the `possible` outcomes.
    """
    return (counts + possible / possible.sum(-1, keepdims=True)) / (counts.sum(-1, keepdims=True) + 1)
