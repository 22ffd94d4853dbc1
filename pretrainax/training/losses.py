"""Adds up what training minimises: the mean loss of each head that a model has, and of each that its blocks give."""

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
    """Returns what `objective` divides its sums by, float32: predictions that a batch asks for, by loss; tokens."""
    found = ((head.loss_name, head.count(batch)) for head in HEADS.values())
    found = {name: n for name, n in found if n is not None} | {TOKENS: count_tokens(batch)}
    return {name: jnp.maximum(n.astype(jnp.float32), 1e-9) for name, n in found.items()}


def objective(
    outputs: Outputs, batch: Batch, total_counts: Mapping[str, jax.Array], **options: Unpack[LossOptions]
) -> tuple[jax.Array, Sums]:
    """Returns what training minimises, and the sums of each loss and accuracy.

    Args:
      outputs: each head that the batch has labels for adds its mean loss, and so does each of `outputs.sums` whose name
        ends in "_loss"; beside a teacher, how far it is from that.
      batch: a batch, or a micro-batch of it.
      total_counts: `counts` of the whole global batch. So the objectives of micro-batches add up to the global one,
        and the gradient of each is its share.
      options: of `vocabulary_loss.loss_sums`.

    Raises:
      UserError: a discriminator without a generator, whose tokens nobody replaced.
    """
    total, sums = jnp.zeros((), jnp.float32), {}
    for name, head in HEADS.items():  # in this order on all devices, whatever that of the outputs
        if name in outputs.heads and head.loss_name in total_counts:
            loss, reported = head.sums(outputs.heads[name], batch, **options)
            total += loss / total_counts[head.loss_name]
            sums |= reported
    # What the blocks of a micro-batch give counts as much as its share of the predictions, which add up to 1.
    main = "loss" if "loss" in total_counts else "label_loss"  # of tokens, or of a task
    for name, (value, count) in outputs.sums.items():
        if name.endswith("_loss"):
            total += counts(batch)[main] / total_counts[main] * value / count
        sums[name] = jax.lax.stop_gradient(value), count
    total, beside = outputs.joined(total, counts(batch), total_counts)
    return total, sums | beside


def check_labels(outputs: Outputs, batch: Batch) -> None:
    """Raises UserError for a head that would not be trained, or labels that nothing would learn from."""
    for name, head in HEADS.items():
        head.check(outputs.heads.get(name), batch)
