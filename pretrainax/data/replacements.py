"""Distinguishes what a masked objective has put in place of a target: [MASK], another token, or the target itself."""

from typing import Optional

import numpy as np

from pretrainax.data.batch import HostBatch, is_gathered


def with_replacements(batch: HostBatch, mask: Optional[int]) -> HostBatch:
    """Adds the array "replacements", [B, N] int32, to a batch with masked positions; returns other batches unchanged.

    The array has the kind of each target, numbered as in REPLACEMENTS, and 0 for unused slots. A random token that
    equals the target counts as unchanged, and a similar word of MacBERT as random.

    Args:
      mask: the id of [MASK], or None if the vocabulary has none.
    """
    if not is_gathered(batch):
        return batch
    inputs = np.take_along_axis(batch["tokens"], batch["masked_positions"], axis=1)  # [B, N]
    kinds = np.where(inputs == mask, 1, np.where(inputs == batch["targets"], 3, 2))
    return {**batch, "replacements": np.where(batch["loss_weights"] > 0, kinds, 0).astype(np.int32)}
