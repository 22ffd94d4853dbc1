"""Measures the spread of hidden states and of predictions, which is 0 in a collapsed model.

Self-attention pulls the states of all tokens of a sequence towards one vector ("rank collapse", Dong et al. 2021, arXiv
2103.03404); a learning rate that is too high for a post-norm model has the same effect. A classifier may also give one
answer to all texts. Both have a finite loss, close to that of the label or token frequencies.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pretrainax.config.metric import FRACTION, Metric, declare
from pretrainax.data.batch import Batch
from pretrainax.layers.sums import Sums
from pretrainax.models.heads.base import HEADS
from pretrainax.sharding.param_paths import PyTree

HIDDEN_SPREAD, PREDICTION_SPREAD, TARGET_SPREAD = "hidden_spread", "prediction_spread", "target_spread"
_MEANING = "1 - mean cosine similarity of the last hidden states of two tokens of a row{}; 0: all states are equal"
declare(
    Metric(HIDDEN_SPREAD, _MEANING.format(""), larger_is_better=True),
    Metric(f"encoder_{HIDDEN_SPREAD}", _MEANING.format(", in the encoder"), larger_is_better=True),
    Metric(f"generator_{HIDDEN_SPREAD}", _MEANING.format(", in the generator"), larger_is_better=True),
    Metric(
        PREDICTION_SPREAD,
        "predictions other than the batch's most frequent one; 0: the same prediction everywhere",
        larger_is_better=True,
        unit=FRACTION,
    ),
    Metric(TARGET_SPREAD, "targets other than the batch's most frequent one, for `prediction_spread`", unit=FRACTION),
)


def spread_sums(x: jax.Array, outputs: Mapping[str, PyTree], batch: Batch) -> Sums:
    """Computes the spread of the last hidden states, and of the predictions, as {metric: (sum, count)}.

    Returns {} for a batch without targets, and no spread of predictions for heads without `answers`.

    Args:
      x: the last hidden states, [B, T, D].
      outputs: head name -> output of the head.
    """
    with_targets = [name for name in outputs if HEADS[name].count(batch) is not None]
    sums = hidden_spread(HIDDEN_SPREAD, x, batch["segment_ids"]) if with_targets else {}
    for name in with_targets:
        if (answers := HEADS[name].answers(outputs[name], batch)) is not None:
            weights = answers.is_asked.astype(jnp.float32)
            sums[PREDICTION_SPREAD] = _variation(answers.predictions, weights), weights.sum()
            sums[TARGET_SPREAD] = _variation(answers.targets, weights), weights.sum()
            break
    return sums


def hidden_spread(name: str, x: jax.Array, segment_ids: jax.Array) -> Sums:
    """Computes 1 - mean cosine similarity between the states of two tokens of a row, summed over rows.

    A low value is the anisotropy of Ethayarajh 2019 (arXiv 1909.00512), here within a row.

    Args:
      name: the metric of the result, {name: (sum, number of rows with at least two tokens)}.
      x: hidden states, [B, T, D].
      segment_ids: [B, T], 0 for padding.
    """
    real = (segment_ids > 0).astype(jnp.float32)
    x = x.astype(jnp.float32)
    unit = x * (real * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1), 1e-24)))[..., None]
    n = real.sum(1)  # [B]
    similarities = jnp.square(unit.sum(1)).sum(-1) - n  # the sum over all ordered pairs of different tokens
    is_pair = n > 1
    spread = jnp.where(is_pair, 1.0 - similarities / jnp.maximum(n * (n - 1), 1.0), 0.0)
    return {name: (jnp.maximum(spread, 0.0).sum(), is_pair.sum().astype(jnp.float32))}


def _variation(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Counts the values [n, …] that differ from the most frequent one (n times Freeman's variation ratio).

    weights: [n], 0 for values to ignore, otherwise 1.
    """
    values = values.reshape(values.shape[0], -1)
    is_equal = (values[:, None] == values[None]).all(-1).astype(weights.dtype)  # [n, n]
    return weights.sum() - jnp.max((is_equal @ weights) * weights)
