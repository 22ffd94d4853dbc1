"""The two passes over a chunk of logits [S, M, V]: statistics for the loss, and gradients.

On an accelerator, reading the logits takes longer than the computation on them. There the output of the matrix product
stays in the dtype of the run, and one pass computes all statistics of the loss with float32 sums. Each pass applies
bias and cap again. A CPU compiler vectorizes only plain reductions, so on a CPU logits are float32 and each statistic
is a separate pass.
"""

import functools
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.sharding.axes import TENSOR_AXIS
from pretrainax.sharding.mesh import axis_size, platform


class LogitStats(NamedTuple):
    """Statistics of the logits of each token for the loss, [S, M] float32."""

    largest: jax.Array
    normaliser: jax.Array  # sum of exp(logit - largest)
    target: jax.Array  # logit of the target
    right: jax.Array  # bool: the target has the largest logit; with rounded logits, it is the first largest
    mean: Optional[jax.Array]  # None unless requested


def in_one_pass() -> bool:
    """Returns True if one pass reads the logits in the dtype of the run; see the module docstring."""
    return platform() != "cpu"


def are_rounded(dtype: jnp.dtype) -> bool:
    """Returns True if logits are rounded in a run of this dtype."""
    return in_one_pass() and dtype != jnp.float32


def products_of(features: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns features [S, M, D] · matrix [D, V] as [S, M, V], in the features' dtype, or in float32 on a CPU."""
    dtype = features.dtype if in_one_pass() else jnp.float32
    return jnp.einsum("SMD,DV->SMV", features, matrix, preferred_element_type=dtype)


def logit_stats(
    products: jax.Array, bias: Optional[jax.Array], targets: jax.Array, cap: Optional[float], with_mean: bool
) -> LogitStats:
    """Computes the statistics of the logits from products [S, M, V], bias [V] and targets [S, M]."""
    form = _read_at_once if in_one_pass() else _read_in_turn
    return form(cap, with_mean, products, bias, targets)


def recomputed_logits(products: jax.Array, bias: Optional[jax.Array], cap: Optional[float]) -> jax.Array:
    """Returns the logits in float32 for the pass after `logit_stats`."""
    if cap is not None and in_one_pass():
        # Without the barrier, XLA would reuse the logits of the first pass in float32, to save a tanh.
        products = jax.lax.optimization_barrier(products)
    return _logits(products, bias, cap)


def sum_of_tokens(d_logits: jax.Array) -> jax.Array:
    """Returns the gradient of the bias, [S, V] float32, from the gradient of the logits [S, M, V]."""
    if not in_one_pass():
        return d_logits.sum(1, dtype=jnp.float32)
    # A product: for a reduction XLA would lay out the logits by columns, which breaks the single passes over rows.
    ones = jnp.ones(d_logits.shape[:2], d_logits.dtype)
    return jnp.einsum("SM,SMV->SV", ones, d_logits, preferred_element_type=jnp.float32)


def _logits(products, bias, cap):
    logits = products.astype(jnp.float32)
    if bias is not None:
        logits += bias.astype(jnp.float32)[None, None]
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _words(logits, targets):
    return jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None]


def _read_in_turn(cap, with_mean, products, bias, targets) -> LogitStats:
    logits = _logits(products, bias, cap)
    largest = jax.lax.stop_gradient(logits.max(-1))  # the loss does not depend on it
    normaliser = jnp.exp(logits - largest[..., None]).sum(-1)
    if axis_size(TENSOR_AXIS) == 1:
        target = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    else:  # not a gather, which would collect the logits of all devices along the vocabulary
        target = jnp.where(_words(logits, targets) == targets[..., None], logits, 0.0).sum(-1)
    return LogitStats(largest, normaliser, target, target >= largest, logits.mean(-1) if with_mean else None)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _read_at_once(cap, with_mean, products, bias, targets) -> LogitStats:
    """Computes the same as `_read_in_turn` in one reduction (Milakov and Gimelshein 2018, section 3).

    Sums are relative to the largest logit so far, and are rescaled for a larger logit.
    """
    logits, words = _logits(products, bias, cap), _words(products, targets)
    # The target logit is uncapped here, so that it is not the same array as the reduced logits: XLA writes an operand
    # that occurs twice in a reduction to memory.
    target_logit = jnp.where(words == targets[..., None], _logits(products, bias, None), 0.0)
    ones, zeros = jnp.ones_like(logits), jnp.zeros_like(logits)
    # largest logit, its word, sum of exponentials, target logit; number of logits, sum of distances to the largest
    parts = [logits, jnp.broadcast_to(words, logits.shape), ones, target_logit, ones, zeros][: 6 if with_mean else 4]
    empty = [jnp.float32(jnp.finfo(jnp.float32).min), jnp.array(words.size, words.dtype), *map(jnp.float32, (0,) * 4)]

    def merged(one, other):
        (m, i, s, x, *far), (n, j, t, y, *away) = one, other
        largest = jnp.maximum(m, n)
        first = jnp.where(m > n, i, jnp.where(m < n, j, jnp.minimum(i, j)))
        both = largest, first, s * jnp.exp(m - largest) + t * jnp.exp(n - largest), x + y
        if with_mean:
            (many, below), (others, under) = far, away
            both += many + others, below + many * (m - largest) + under + others * (n - largest)
        return both

    largest, first, normaliser, target, *far = jax.lax.reduce(parts, empty[: len(parts)], merged, (2,))
    target = target if cap is None else cap * jnp.tanh(target / cap)
    return LogitStats(largest, normaliser, target, first == targets, largest + far[1] / far[0] if with_mean else None)


@_read_at_once.defjvp
def _(cap, with_mean, primals, tangents):
    # JAX has no short derivative for a reduction of several arrays. Only Sophia's second derivatives use this rule.
    return jax.jvp(functools.partial(_read_in_turn, cap, with_mean), primals, tangents)
