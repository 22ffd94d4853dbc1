"""The score of a model that knows nothing but how often each token occurs, on the same targets."""

from collections.abc import Iterable

import numpy as np

from pretrainax.data.batch import HostBatch


def unigram_baseline(
    train_batches: Iterable[HostBatch], valid_batches: Iterable[HostBatch], vocab_size: int
) -> dict[str, float]:
    """Scores the frequencies of the training targets (add-one smoothed) on the validation targets.

    Returns:
      "loss": nats per target, "accuracy": of always saying the most frequent target; both weighted by loss_weights.
    """
    seen = _counts(train_batches, vocab_size)
    asked = _counts(valid_batches, vocab_size)
    log_probability = np.log(seen + 1) - np.log(seen.sum() + vocab_size)
    return {
        "loss": float(-(asked * log_probability).sum() / asked.sum()),
        "accuracy": float(asked[seen.argmax()] / asked.sum()),
    }


def _counts(batches: Iterable[HostBatch], vocab_size: int) -> np.ndarray:
    """Sums the loss weights of each target, [V] float64."""
    counts = np.zeros(vocab_size)
    for batch in batches:
        counts += np.bincount(batch["targets"].ravel(), weights=batch["loss_weights"].ravel(), minlength=vocab_size)
    return counts
