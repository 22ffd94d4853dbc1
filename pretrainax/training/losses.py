"""The training objective: the sum of the mean losses of the model's heads and blocks."""

from collections.abc import Mapping
from typing import Unpack

import jax
import jax.numpy as jnp

from pretrainax.data.batch import Batch
from pretrainax.layers.sums import Sums
from pretrainax.models.heads import HEADS
from pretrainax.models.heads.vocabulary_loss import LossOptions
from pretrainax.models.outputs import TOKENS, Outputs, count_tokens


def counts(batch: Batch) -> dict[str, jax.Array]:
    """Returns the float32 denominators of `objective`: the number of predictions of each loss, and of tokens."""
    numbers = ((head.loss_name, head.count(batch)) for head in HEADS.values())
    numbers = {name: n for name, n in numbers if n is not None} | {TOKENS: count_tokens(batch)}
    return {name: jnp.maximum(n.astype(jnp.float32), 1e-9) for name, n in numbers.items()}


def objective(
    outputs: Outputs, batch: Batch, total_counts: Mapping[str, jax.Array], **options: Unpack[LossOptions]
) -> tuple[jax.Array, Sums]:
    """Returns the training objective, and the sums of each loss and accuracy.

    Args:
      outputs: each head with labels in the batch adds its mean loss, and so does each entry of `outputs.sums` whose
        name ends in "_loss". With a teacher, `outputs.combined_objective` adds the distillation loss.
      batch: a batch, or a micro-batch of it.
      total_counts: `counts` of the whole global batch, so that the objectives and gradients of micro-batches add up to
        the global objective and its gradient.
      options: options of `vocabulary_loss.loss_sums`.

    Raises:
      UserError: a discriminator has no generator that replaces tokens.
    """
    total, sums = jnp.zeros((), jnp.float32), {}
    for name, head in HEADS.items():  # the same order on all devices, whatever the order of the outputs
        if name in outputs.heads and head.loss_name in total_counts:
            loss, reported = head.sums(outputs.heads[name], batch, **options)
            total += loss / total_counts[head.loss_name]
            sums |= reported
    # A block loss of a micro-batch is weighted by its share of the predictions; the shares add up to 1.
    main = "loss" if "loss" in total_counts else "label_loss"  # the loss of tokens, or of a task
    for name, (value, count) in outputs.sums.items():
        if name.endswith("_loss"):
            total += counts(batch)[main] / total_counts[main] * value / count
        sums[name] = jax.lax.stop_gradient(value), count
    total, aux_sums = outputs.combined_objective(total, counts(batch), total_counts)
    return total, sums | aux_sums


def check_labels(outputs: Outputs, batch: Batch) -> None:
    """Raises UserError for a head without labels, or labels without a head."""
    for name, head in HEADS.items():
        head.check(outputs.heads.get(name), batch)
