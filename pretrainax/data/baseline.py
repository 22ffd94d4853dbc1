"""Defines a baseline for the targets of pretraining: token frequencies, the form of the targets, and copying.

The baseline first predicts the kind of each target, then the token itself. The kind is "text" or one of the special
tokens, for example a sentinel or EOS. The kind is predicted from three facts: the last special token that the decoder
has read, whether the decoder has read text since, and whether the target is at the last position of its row. The
baseline therefore also learns whatever follows from the format alone: the first sentinel of span corruption, the order
of the sentinels, and the end of a full row. If the target is text, the baseline uses the token frequencies of the whole
corpus. Data preparation has already counted these frequencies, so the baseline does not read the corpus again.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np

from pretrainax.data.batch import REPLACEMENTS, HostBatch, has_pairs, is_gathered
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


class Baseline:
    """Predicts targets without their context, except for what the input shows at the place of a target.

    At a masked position whose input is not [MASK], the target equals the input with the frequency of this event in
    training; otherwise, the target has the distribution of all targets. The labels of sentence pairs have their
    frequencies in training.

    Args:
      counts: occurrences of each token id in the text of the targets, [V].
      train_batches: batches from which the baseline estimates the probability of each kind of target.
      vocabulary: the vocabulary of the batches; it determines which ids are special tokens.
    """

    def __init__(self, counts: np.ndarray, train_batches: Iterable[HostBatch], vocabulary: Vocabulary):
        self._mask = vocabulary.mask
        self._special_ids = np.array(sorted(vocabulary.special_ids - {vocabulary.unk}), np.int64)
        self._special_index = np.zeros(vocabulary.size, np.int64)  # [V], index of a special token, from 1; 0: text
        self._special_index[self._special_ids] = np.arange(1, len(self._special_ids) + 1)
        is_text = self._special_index == 0
        self._frequencies = _smoothed(np.where(is_text, counts, 0.0), is_text)  # [V]
        num_kinds = len(self._special_ids) + 1
        kind_counts = np.zeros((4 * num_kinds, num_kinds))  # [contexts, kinds]
        copy_counts, label_counts = np.zeros(2), np.zeros(2)  # of visible targets: not equal to the input, equal
        for batch in train_batches:
            context, kind = _contexts_and_kinds(batch, self._special_index)
            np.add.at(kind_counts, (context, kind), batch["loss_weights"])
            if is_gathered(batch):
                inputs, is_visible = self._visible_inputs(batch)
                is_equal = (inputs == batch["targets"]).astype(np.int64)
                np.add.at(copy_counts, is_equal, batch["loss_weights"] * is_visible)
            if has_pairs(batch):
                np.add.at(label_counts, batch["pair_labels"], batch["segment_ids"][:, 0] > 0)
        self._kind_probabilities = _smoothed(kind_counts, np.ones_like(kind_counts, bool))
        self._copy_probability = float(_smoothed(copy_counts, np.ones(2, bool))[1])
        self._label_probabilities = _smoothed(label_counts, np.ones(2, bool))

    def values(self, batch: HostBatch) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Computes the baseline's metrics on a batch: {metric: (value of each prediction, its weight)}, both [B, …].

        "loss" is in nats, "accuracy" is 1 for the most likely token. "text_loss" and "text_accuracy" cover the text
        targets only and take it as known that they are text, so they measure the token frequencies alone. The loss
        also has the names "masked_loss", "random_loss" and "unchanged_loss" of `data.replacements`, and "bits_per_byte"
        if the batch has target_bytes. Sentence pairs have "pair_loss" and "pair_accuracy".
        """
        (context, kind), targets = _contexts_and_kinds(batch, self._special_index), batch["targets"]
        text_probability = np.where(kind == 0, self._frequencies[targets], 1.0)  # a special token is its kind
        probability = self._kind_probabilities[context, kind] * text_probability
        top_id = int(self._frequencies.argmax())
        kind_scores = self._kind_probabilities[:, :1] * self._frequencies[top_id], self._kind_probabilities[:, 1:]
        scores = np.concatenate(kind_scores, axis=1)  # [contexts, kinds]
        top_ids = np.concatenate([[top_id], self._special_ids])[scores.argmax(axis=1)][context]
        text_top_ids = np.full_like(top_ids, top_id)
        if is_gathered(batch):
            inputs, is_visible = self._visible_inputs(batch)
            copied = self._copy_probability * is_visible  # [B, N], probability that the target equals the input
            equals_input = inputs == targets
            probability = copied * equals_input + (1 - copied) * probability
            text_probability = copied * equals_input + (1 - copied) * text_probability
            is_copied = copied + (1 - copied) * self._frequencies[inputs] > (1 - copied) * self._frequencies[top_id]
            top_ids, text_top_ids = (np.where(is_copied, inputs, ids) for ids in (top_ids, text_top_ids))
        weights = batch.get("text_weights", batch["loss_weights"] * (kind == 0))
        values = {
            **values_of_targets(-np.log(probability), top_ids == targets, batch),
            "text_loss": (-np.log(text_probability), weights),
            "text_accuracy": (text_top_ids == targets, weights),
        }
        if has_pairs(batch):
            labels, weights = batch["pair_labels"], batch["segment_ids"][:, 0] > 0
            values["pair_loss"] = -np.log(self._label_probabilities)[labels], weights
            values["pair_accuracy"] = labels == self._label_probabilities.argmax(), weights
        return values

    def _visible_inputs(self, batch: HostBatch) -> tuple[np.ndarray, np.ndarray]:
        """Returns the inputs at the masked positions, [B, N], and which of them are not [MASK], [B, N] bool."""
        inputs = np.take_along_axis(batch["tokens"], batch["masked_positions"], axis=1)
        return inputs, inputs != self._mask


def values_of_targets(
    loss: np.ndarray, is_correct: np.ndarray, batch: HostBatch
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns {metric: (value of each target, its weight)}, [B, N] each, of all metrics of the loss and the accuracy.

    Args:
      loss: nats of each target, [B, N].
      is_correct: [B, N], 1 if the most likely token is the target.
    """
    weights = batch["loss_weights"]
    values = {"loss": (loss, weights), "accuracy": (is_correct, weights)}
    if "text_weights" in batch:
        values |= {"text_loss": (loss, batch["text_weights"]), "text_accuracy": (is_correct, batch["text_weights"])}
    if "replacements" in batch:
        for number, kind in enumerate(REPLACEMENTS, start=1):
            values[f"{kind}_loss"] = loss, weights * (batch["replacements"] == number)
    if "target_bytes" in batch:  # the bytes of a row, spread over its targets
        num_bytes = weights * (batch["target_bytes"] / np.maximum(weights.sum(1), 1e-9))[:, None]
        values["bits_per_byte"] = loss / math.log(2) * weights / np.maximum(num_bytes, 1e-9), num_bytes
    return values


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
