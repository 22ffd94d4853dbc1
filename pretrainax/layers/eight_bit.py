"""Matmuls with 8-bit operands (`config.train.products`): float8 or int8 values, multiplied by float32 scales.

Each operand is divided by a scale, which is computed from the operand's current largest absolute value, and rounded to
8 bits. The product sums in float32 (float8) or int32 (int8), and is multiplied by the scales of its operands. All three
matmuls of a linear layer do this: the output, the gradient of the input and the gradient of the kernel. Experts and the
loss over the vocabulary (`models.heads.logit_products`) do the same. Parameters, sums and the gradients of kernels stay
float32.

- "fp8" is float8_e4m3fn for activations, kernels and gradients, with one scale per array (Micikevicius et al. 2022,
  arXiv 2209.05433). Scales are powers of two, so dividing and multiplying by them is exact, and a bfloat16 output is
  rounded once.
  NOTE The usual "hybrid" recipe has gradients in float8_e5m2, whose larger range serves scales of earlier steps. With
  a current scale, e4m3 covers 2^-18 to 1 of the largest gradient, and its rounding error is half of e5m2's.
- "int8" is symmetric, with one scale for each row and column that a matmul does not sum over (Dettmers et al. 2022,
  arXiv 2208.07339, section 2.1). Gradients are rounded stochastically, so that small gradients do not all become 0.

A NaN or an infinity makes the scale NaN, and with it the product, so that the check for finite gradients finds it.

On a CPU, the 8-bit values are multiplied in float32, so the values are those of an accelerator except for the order of
sums.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pretrainax.layers.hashed_keys import hashed_key
from pretrainax.layers.rematerialization import saved_residual
from pretrainax.sharding.mesh import platform


class Format(NamedTuple):
    """An 8-bit format of operands."""

    dtype: jax.typing.DTypeLike
    largest: float  # largest finite value
    by_array: bool  # one scale per array; otherwise one per row and column of the product

    @property
    def is_integer(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.integer)


FORMATS = {
    "fp8": Format(jnp.float8_e4m3fn, 448.0, by_array=True),
    "int8": Format(jnp.int8, 127.0, by_array=False),
}
# Formats of the gradient of logits (`models.heads.logit_products`)
LOGIT_GRADIENTS = {"fp8": Format(jnp.float8_e5m2, 57344.0, by_array=False), "int8": FORMATS["int8"]}
_SMALLEST_SCALE = 2.0**-100  # its inverse is finite, and an array of smaller values contributes nothing to float32 sums
_PRODUCTS: contextvars.ContextVar[str] = contextvars.ContextVar("products", default="")


class Quantized(NamedTuple):
    """An array in 8 bits, values · scale."""

    values: jax.Array
    scale: jax.Array  # float32, with size 1 in each axis that shares a scale


def current_products() -> str:
    """Returns the 8-bit format of linear layers in the current block: a key of FORMATS, or "" for the dtype of x."""
    return _PRODUCTS.get()


@contextlib.contextmanager
def products(name: str) -> Iterator[None]:
    """Sets `current_products` for the linear layers that are traced in this context."""
    token = _PRODUCTS.set(name)
    try:
        yield
    finally:
        _PRODUCTS.reset(token)


def with_products(call: Callable) -> Callable:
    """Wraps the `__call__` of a module so that its linear layers multiply as its `compute.products` selects."""

    @functools.wraps(call)
    def wrapped(self, *args, **kwargs):
        with products(self.compute.products):
            return call(self, *args, **kwargs)

    return wrapped


def quantize(x: jax.Array, name: str, summed: tuple[int, ...], is_gradient: bool = False) -> Quantized:
    """Rounds x to 8 bits.

    The scale is marked as a saved residual, so that a recomputation of x need not be complete before it is rounded.

    Args:
      name: a key of FORMATS.
      summed: axes over which the matmul will sum.
      is_gradient: whether x is a gradient, which "int8" rounds stochastically.
    """
    return quantize_with(x, name, saved_residual(scale_of(x, name, summed)), is_gradient)


def quantize_with(x: jax.Array, name: str, scale: jax.Array, is_gradient: bool = False) -> Quantized:
    """Rounds x / scale to 8 bits; arguments as in `quantize`."""
    return Quantized(round_to(FORMATS[name], x.astype(jnp.float32) / scale, is_gradient), scale)


def round_to(form: Format, scaled: jax.Array, stochastic: bool) -> jax.Array:
    """Rounds float32 values to 8 bits: to the nearest value, or stochastically if `stochastic` and to integers."""
    if form.is_integer:
        scaled = jnp.floor(scaled + _dither(scaled.shape)) if stochastic else jnp.round(scaled)
    return scaled.astype(form.dtype)


def scale_of(x: jax.Array, name: str, summed: tuple[int, ...]) -> jax.Array:
    """Computes the scale that maps the largest absolute value of x to the largest 8-bit value, float32.

    The scale of zeros is 1. If x contains a NaN or an infinity, the scale is NaN.
    """
    form = FORMATS[name]
    axes = None if form.by_array else summed
    largest = jnp.abs(x).max(axes, keepdims=True).astype(jnp.float32)
    if platform() == "cpu":  # XLA's vectorized maximum over rows drops NaNs: max(0) of [32, 1000] in jax 0.10.2
        largest = jnp.where(jnp.isnan(x).any(axes, keepdims=True), jnp.nan, largest)
    return scale_for(largest, form)


def scale_for(largest: jax.Array, form: Format) -> jax.Array:
    """Computes the scale for arrays whose absolute values are at most `largest`, float32; see `scale_of`.

    Scales of float8 are powers of two.
    """
    scale = largest / form.largest
    if not form.is_integer:
        # Adding the mantissa's bits carries into the exponent unless the scale already is a power of two.
        bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
        scale = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    scale = jnp.where(largest > 0, jnp.maximum(scale, _SMALLEST_SCALE), 1.0)
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def multiply(a: Quantized, b: Quantized, summed: tuple[tuple[int, ...], tuple[int, ...]], dtype) -> jax.Array:
    """Multiplies two arrays, summing over the axes `summed` of a and of b; the result has a's, then b's other axes.

    Args:
      dtype: dtype of the result.
    """
    values, total = operands((a.values, b.values), dtype)
    product = jax.lax.dot_general(*values, (summed, ((), ())), preferred_element_type=total)
    a_scale, b_scale = (jnp.squeeze(x.scale, axes) for x, axes in zip((a, b), summed, strict=True))
    # [M…, N…]
    a_scale, b_scale = (
        a_scale.reshape(a_scale.shape + (1,) * b_scale.ndim),
        b_scale.reshape((1,) * a_scale.ndim + b_scale.shape),
    )
    # Two factors, because the product of two small scales would be 0.
    result = (product.astype(jnp.float32) * a_scale * b_scale).astype(dtype)
    return saved_residual(result) if total == jnp.int32 else result


def operands(
    values: tuple[jax.Array, jax.Array], dtype: jax.typing.DTypeLike
) -> tuple[tuple[jax.Array, ...], jax.typing.DTypeLike]:
    """Returns the operands of a matmul of 8-bit values and the dtype of its sums, if the scaled result has `dtype`.

    On a CPU, both are float32. Elsewhere, the operands are `values`. The sums of integers are int32. The scales of
    float8 are powers of two, so `dtype` rounds the sums as it would round the result.
    """
    if platform() == "cpu":
        return tuple(x.astype(jnp.float32) for x in values), jnp.float32
    return values, jnp.int32 if jnp.issubdtype(values[0].dtype, jnp.integer) else dtype


def _dither(shape: tuple[int, ...]) -> jax.Array:
    """Returns uniform random numbers in [0, 1), float32, as hashes of the element's index.

    A fixed pattern suffices, because the gradients at an element differ between steps. It makes the result independent
    of the number of devices. Numbers have 16 bits, so that adding one to 127 cannot round to 128.
    """
    bits = jax.random.bits(hashed_key(jax.random.key(0)), shape, jnp.uint16)
    return bits.astype(jnp.float32) * 2.0**-16
