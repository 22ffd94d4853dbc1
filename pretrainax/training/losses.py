"""Computes the training objective: the sum of the mean losses of the model's heads and blocks."""

from collections.abc import Mapping
from typing import Unpack

import jax
import jax.numpy as jnp

from pretrainax.data.batch import Batch
from pretrainax.layers.sums import Sums
from pretrainax.models.heads import HEADS
from pretrainax.models.heads.vocabulary_loss import LossOptions
from pretrainax.models.outputs import TOKENS, Outputs, count_tokens, main_loss


def counts(batch: Batch) -> dict[str, jax.Array]:
    """Returns the number of predictions for each loss, and of tokens under TOKENS, as denominators for `objective`."""
    numbers = ((head.loss_name, head.count(batch)) for head in HEADS.values())
    numbers = {name: n for name, n in numbers if n is not None} | {TOKENS: count_tokens(batch)}
    return {name: jnp.maximum(n.astype(jnp.float32), 1e-9) for name, n in numbers.items()}


def objective(
    outputs: Outputs, batch: Batch, total_counts: Mapping[str, jax.Array], **options: Unpack[LossOptions]
) -> tuple[jax.Array, Sums]:
    """Computes the scalar training objective, and {metric: (sum, count)} for each loss and accuracy.

    Args:
      outputs: the objective is the sum of the mean losses of all heads with labels in the batch and of the entries of
        `outputs.sums` whose names end in "_loss". With a teacher, `combined_objective` adds the distillation loss.
      batch: the global batch, or a microbatch.
      total_counts: `counts` of the global batch, so that the objectives and gradients of microbatches add up to the
        objective of the global batch and its gradient.
      options: options of `vocabulary_loss.loss_sums`.

    Raises:
      UserError: the model is a discriminator without a generator, but the batch has no replaced tokens.
    """
    total, sums = jnp.zeros((), jnp.float32), {}
    for name, head in HEADS.items():  # this order is the same on all devices; the order of the outputs may differ
        if name in outputs.heads and head.loss_name in total_counts:
            loss, reported = head.sums(outputs.heads[name], batch, **options)
            total += loss / total_counts[head.loss_name]
            sums |= reported
    # A block's loss is weighted by the microbatch's fraction of all predictions; the fractions add up to 1.
    main = main_loss(total_counts)
    for name, (value, count) in outputs.sums.items():
        if name.endswith("_loss"):
            total += counts(batch)[main] / total_counts[main] * value / jnp.maximum(count, 1e-9)
        sums[name] = jax.lax.stop_gradient(value), count
    total, aux_sums = outputs.combined_objective(total, counts(batch), total_counts)
    return total, sums | aux_sums


def check_labels(outputs: Outputs, batch: Batch) -> None:
    """Raises UserError if the batch lacks labels for a head of the model, or has labels for a head that is missing."""
    for name, head in HEADS.items():
        head.check(outputs.heads.get(name), batch)
