"""Computes the two passes over a chunk of logits [S, M, V]: the statistics for the loss, and the gradients.

S is the number of shards of tokens, M the number of tokens per shard, and V the size of the vocabulary. On an
accelerator, reading the logits takes longer than computing with them. Therefore the matmul returns the compute
dtype of the run (such as bfloat16), and one pass computes all statistics of the loss with float32 sums. Each pass
applies bias and cap again. On a CPU, the compiler vectorizes only reductions of one array, so logits are float32 and
each statistic takes a separate pass.
"""

import functools
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.sharding.axes import TENSOR_AXIS
from pretrainax.sharding.mesh import axis_size, platform

_COLUMNS = 128  # columns per tile of a matmul


class LogitStats(NamedTuple):
    """The statistics of each token's logits from which the loss is computed, [S, M] float32."""

    largest: jax.Array  # the largest logit
    normaliser: jax.Array  # sum of exp(logit - largest)
    target: jax.Array  # logit of the target
    # bool: the target has the largest logit. In one pass, only the first of several equal logits counts as the largest
    is_correct: jax.Array
    mean: Optional[jax.Array]  # mean logit; None unless requested


def in_one_pass() -> bool:
    """Checks whether one pass computes all statistics, as on accelerators; see the module docstring."""
    return platform() != "cpu"


def are_rounded(dtype: jnp.dtype) -> bool:
    """Checks whether a run with this compute dtype rounds logits below float32 precision."""
    return in_one_pass() and dtype != jnp.float32


def column_multiple() -> int:
    """Returns the multiple to which the loss pads the vocabulary of its matmuls, 1 for no padding.

    Accelerators compute tiles of 128 columns. With 50,257 columns (GPT-2), rows of bfloat16 logits would start at
    addresses that no vector load supports. If the mesh splits the vocabulary, padding would move columns to other
    devices.
    """
    return _COLUMNS if in_one_pass() and axis_size(TENSOR_AXIS) == 1 else 1


def logit_stats(
    products: jax.Array, bias: Optional[jax.Array], targets: jax.Array, cap: Optional[float], with_mean: bool
) -> LogitStats:
    """Computes the statistics of the logits that the loss needs.

    Args:
      products: the result of `logit_products`, [S, M, V].
      bias: [V], added to the products, or None.
      targets: [S, M].
      cap: a logit x is mapped to cap · tanh(x / cap). If None, logits are not capped.
      with_mean: whether to also compute the mean logit.
    """
    compute_stats = _stats_in_one_pass if in_one_pass() else _stats_in_separate_passes
    return compute_stats(cap, with_mean, products, bias, targets)


def recomputed_logits(
    products: jax.Array, vocabulary: int, bias: Optional[jax.Array], cap: Optional[float]
) -> jax.Array:
    """Recomputes the logits [S, M, V] in float32 for the second pass.

    Args:
      products: the result of `logit_products`, [S, M, V'].
      vocabulary: the number V of the first columns, whose logits are returned.
      bias, cap: as in `logit_stats`.
    """
    if cap is not None and in_one_pass():
        # Without the barrier, XLA would store the float32 logits of the first pass and reuse them, to save a tanh.
        products = jax.lax.optimization_barrier(products)
    return _logits(products[..., :vocabulary], bias, cap)


def sum_of_tokens(d_logits: jax.Array) -> jax.Array:
    """Computes the gradient of the bias, [S, V] float32, by summing the logits' gradient [S, M, V] over tokens."""
    if not in_one_pass():
        return d_logits.sum(1, dtype=jnp.float32)
    # A matmul, because XLA would store the logits in column-major order for a reduction, and the passes read rows. It
    # has 8 equal rows, because XLA would compute a single row without the matmul library, from a float32 copy.
    shards, tokens = d_logits.shape[:2]
    ones = jnp.ones((shards, 8, tokens), d_logits.dtype)
    return jnp.einsum("SRM,SMV->SRV", ones, d_logits, preferred_element_type=jnp.float32)[:, 0]


def _logits(products, bias, cap):
    logits = products.astype(jnp.float32)
    if bias is not None:
        logits += bias.astype(jnp.float32)[None, None]
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _vocabulary_ids(logits, targets):
    return jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None]


def _stats_in_separate_passes(cap, with_mean, products, bias, targets) -> LogitStats:
    logits = _logits(products, bias, cap)
    largest = jax.lax.stop_gradient(logits.max(-1))  # the loss does not depend on it
    normaliser = jnp.exp(logits - largest[..., None]).sum(-1)
    if axis_size(TENSOR_AXIS) == 1:
        target = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    else:  # not a gather, which would collect the logits of all devices along the vocabulary
        target = jnp.where(_vocabulary_ids(logits, targets) == targets[..., None], logits, 0.0).sum(-1)
    return LogitStats(largest, normaliser, target, target >= largest, logits.mean(-1) if with_mean else None)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _stats_in_one_pass(cap, with_mean, products, bias, targets) -> LogitStats:
    """Computes the statistics of `_stats_in_separate_passes` in one reduction (Milakov and Gimelshein 2018, section 3).

    Sums are relative to the largest logit so far, and are rescaled whenever a larger logit is found.
    """
    logits, ids = _logits(products, bias, cap), _vocabulary_ids(products, targets)
    # The target logit is uncapped here, so that it is not the same array as the reduced logits: XLA writes an operand
    # that occurs twice in a reduction to memory.
    target_logit = jnp.where(ids == targets[..., None], _logits(products, bias, None), 0.0)
    ones, zeros = jnp.ones_like(logits), jnp.zeros_like(logits)
    # The reduced values: largest logit, its vocabulary index, sum of exponentials, target logit. For the mean also the
    # number of logits, and the sum of their distances to the largest logit.
    operands = [logits, jnp.broadcast_to(ids, logits.shape), ones, target_logit, ones, zeros][: 6 if with_mean else 4]
    init_values = [jnp.float32(jnp.finfo(jnp.float32).min), jnp.array(ids.size, ids.dtype), *map(jnp.float32, (0,) * 4)]

    def combine(stats, other_stats):
        (m, i, s, x, *mean_stats), (n, j, t, y, *other_mean_stats) = stats, other_stats
        largest = jnp.maximum(m, n)
        first = jnp.where(m > n, i, jnp.where(m < n, j, jnp.minimum(i, j)))
        combined = largest, first, s * jnp.exp(m - largest) + t * jnp.exp(n - largest), x + y
        if with_mean:
            (count, distance), (other_count, other_distance) = mean_stats, other_mean_stats
            combined += (
                count + other_count,
                distance + count * (m - largest) + other_distance + other_count * (n - largest),
            )
        return combined

    largest, first, normaliser, target, *mean_stats = jax.lax.reduce(
        operands, init_values[: len(operands)], combine, (2,)
    )
    target = target if cap is None else cap * jnp.tanh(target / cap)
    return LogitStats(
        largest, normaliser, target, first == targets, largest + mean_stats[1] / mean_stats[0] if with_mean else None
    )


@_stats_in_one_pass.defjvp
def _(cap, with_mean, primals, tangents):
    # JAX has no efficient derivative for a reduction of several arrays. Only Sophia's second derivatives use this rule.
    return jax.jvp(functools.partial(_stats_in_separate_passes, cap, with_mean), primals, tangents)
