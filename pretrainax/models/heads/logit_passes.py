"""The passes over a chunk of logits [S, M, V]: one that reads what the loss needs of them, one that makes gradients.

On an accelerator a pass over logits takes longer than what is computed in it. There they stay as the matrix product
made them, in the dtype of the run, and all that the loss needs comes of one pass, with sums in float32; bias and cap
are applied again where logits are read. A CPU, whose compiler vectorises plain reductions alone, reads float32 logits
once for each.
"""

import functools
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.sharding.axes import TENSOR_AXIS
from pretrainax.sharding.mesh import axis_size, platform


class Reading(NamedTuple):
    """What the loss needs of the logits of each token, [S, M] float32."""

    largest: jax.Array
    normaliser: jax.Array  # sum of exp(logit - largest)
    target: jax.Array  # logit of the target
    right: jax.Array  # bool: no logit is larger than the target's; where logits are rounded, it is the first of these
    mean: Optional[jax.Array]  # None where nobody asks


def in_one_pass() -> bool:
    """Says whether logits are read in one pass and kept in the dtype of the run; see the head of this file."""
    return platform() != "cpu"


def are_rounded(dtype: jnp.dtype) -> bool:
    """Says whether logits lose digits in a run of this dtype."""
    return in_one_pass() and dtype != jnp.float32


def products_of(features: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns features [S, M, D] · matrix [D, V] as [S, M, V], rounded to the features' dtype but on a CPU."""
    dtype = features.dtype if in_one_pass() else jnp.float32
    return jnp.einsum("SMD,DV->SMV", features, matrix, preferred_element_type=dtype)


def read(
    products: jax.Array, bias: Optional[jax.Array], targets: jax.Array, cap: Optional[float], with_mean: bool
) -> Reading:
    """Reads the logits of products [S, M, V] and bias [V] against targets [S, M]."""
    form = _read_at_once if in_one_pass() else _read_in_turn
    return form(cap, with_mean, products, bias, targets)


def logits_again(products: jax.Array, bias: Optional[jax.Array], cap: Optional[float]) -> jax.Array:
    """Returns the logits in float32 for the pass after `read`."""
    if cap is not None and in_one_pass():
        # Or the compiler finds them equal to those read before, and keeps them in float32 to save a tanh.
        products = jax.lax.optimization_barrier(products)
    return _logits(products, bias, cap)


def sum_of_tokens(d_logits: jax.Array) -> jax.Array:
    """Returns the gradient of the bias, [S, V] float32, of that of the logits [S, M, V]."""
    if not in_one_pass():
        return d_logits.sum(1, dtype=jnp.float32)
    # A product: for a reduction the compiler lays the logits out by columns, and no pass by rows is one any more.
    ones = jnp.ones(d_logits.shape[:2], d_logits.dtype)
    return jnp.einsum("SM,SMV->SV", ones, d_logits, preferred_element_type=jnp.float32)


def _logits(products, bias, cap):
    logits = products.astype(jnp.float32)
    if bias is not None:
        logits += bias.astype(jnp.float32)[None, None]
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _words(logits, targets):
    return jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None]


def _read_in_turn(cap, with_mean, products, bias, targets) -> Reading:
    logits = _logits(products, bias, cap)
    largest = jax.lax.stop_gradient(logits.max(-1))  # whatever it is, the loss is the same
    normaliser = jnp.exp(logits - largest[..., None]).sum(-1)
    if axis_size(TENSOR_AXIS) == 1:
        target = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    else:  # Not a gather: that would collect the logits of all devices along the vocabulary.
        target = jnp.where(_words(logits, targets) == targets[..., None], logits, 0.0).sum(-1)
    return Reading(largest, normaliser, target, target >= largest, logits.mean(-1) if with_mean else None)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _read_at_once(cap, with_mean, products, bias, targets) -> Reading:
    """Reads as `_read_in_turn` in one reduction (Milakov and Gimelshein 2018, section 3): sums are taken from the
    largest logit so far, and change when a larger one comes."""
    logits, words = _logits(products, bias, cap), _words(products, targets)
    # Not capped yet, and no second array of logits: of what a reduction has twice, the compiler writes all of it down.
    of_target = jnp.where(words == targets[..., None], _logits(products, bias, None), 0.0)
    ones, zeros = jnp.ones_like(logits), jnp.zeros_like(logits)
    # the largest, its word, sum of exponentials, the target's; number of logits, sum of their distances to the largest
    parts = [logits, jnp.broadcast_to(words, logits.shape), ones, of_target, ones, zeros][: 6 if with_mean else 4]
    empty = [jnp.float32(jnp.finfo(jnp.float32).min), jnp.array(words.size, words.dtype), *map(jnp.float32, (0,) * 4)]

    def joined(one, other):
        (m, i, s, x, *far), (n, j, t, y, *away) = one, other
        largest = jnp.maximum(m, n)
        first = jnp.where(m > n, i, jnp.where(m < n, j, jnp.minimum(i, j)))
        both = largest, first, s * jnp.exp(m - largest) + t * jnp.exp(n - largest), x + y
        if with_mean:
            (many, below), (others, under) = far, away
            both += many + others, below + many * (m - largest) + under + others * (n - largest)
        return both

    largest, first, normaliser, target, *far = jax.lax.reduce(parts, empty[: len(parts)], joined, (2,))
    target = target if cap is None else cap * jnp.tanh(target / cap)
    return Reading(largest, normaliser, target, first == targets, largest + far[1] / far[0] if with_mean else None)


@_read_at_once.defjvp
def _(cap, with_mean, primals, tangents):
    # Of a reduction of several arrays JAX knows no derivative that is short; only second ones are asked for (Sophia).
    return jax.jvp(functools.partial(_read_in_turn, cap, with_mean), primals, tangents)
