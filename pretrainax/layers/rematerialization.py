"""The rematerialization policy: which residuals a block saves, and which the backward recomputes.

The forward saves the outputs of products and kernels, and arrays marked with `saved_residual`, which close the gaps
between these outputs. The backward recomputes everything else from them: normalized streams, activations, dropout
masks, rotated or converted arrays. Memory traffic bounds a step on an accelerator, so arithmetic on data
that is read anyway is free.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Primitive

from pretrainax.sharding.mesh import platform

_KEPT, _CONVERTED = "kept", "converted"
# Primitives: products; attention kernels, with the squeeze that takes one of 128 columns of their normalisers; loops,
# as in a ring; communication between devices.
PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}
_KERNELS = {"pallas_call", "squeeze", "dot_product_attention_fwd_wrapper", "dot_product_attention_fwd"}
_OTHERS = {"scan", "while", "all_gather", "all_to_all", "ppermute", "psum", "psum_invariant", "reduce_scatter"}
_SAVED = PRODUCTS | _KERNELS | _OTHERS


def saved_residual(x: jax.Array) -> jax.Array:
    """Marks x as a residual that is saved for the backward, and returns it."""
    return checkpoint_name(x, _KEPT)


def cast_kernel(kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns a kernel in the dtype of its product, marked so that `converted_saveable` can save it.

    This saves a copy where layers are unrolled. Otherwise the recomputation would slice the float32 kernel of a layer
    out of the stack once more. In a loop, saved kernels would be a stack in addition to the parameters. A CPU, where
    blocks are not rematerialized, therefore returns the kernel unchanged.
    """
    return kernel if platform() == "cpu" else checkpoint_name(kernel.astype(dtype), _CONVERTED)


def products_saveable(primitive: Primitive, *_: object, **params: object) -> bool:
    """Returns True if `jax.checkpoint` may save the output of a primitive in a block."""
    return primitive.name in _SAVED or (primitive.name == "name" and params["name"] == _KEPT)


def is_cast_kernel(eqn: JaxprEqn) -> bool:
    """Returns True if an equation marks a kernel of `cast_kernel`."""
    return eqn.primitive.name == "name" and eqn.params["name"] == _CONVERTED


converted_saveable = jax.checkpoint_policies.save_only_these_names(_CONVERTED)


def recompute(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `function` of arrays with a backward that saves only these arrays and recomputes the rest."""
    run = jax.custom_vjp(function)

    def backward(inputs, gradient):
        first, *others = inputs
        # On a CPU, blocks are not rematerialized and need the barrier. Elsewhere, rematerialization already separates
        # their inputs, and a barrier would write a single input, which may be a sum with a bias, to memory. The inputs
        # of a gate are saved products.
        first = barrier(first) if others or platform() == "cpu" else first
        return jax.vjp(function, first, *others)[1](gradient)

    # The forward calls `function`, not `run`, so that gradients can be differentiated again.
    run.defvjp(lambda *inputs: (function(*inputs), inputs), backward)
    return functools.wraps(function)(run)


def barrier(x: jax.Array) -> jax.Array:
    """Returns x behind an optimization barrier, for use in the backward.

    Unrolled layers are one program. Without the barrier, the compiler would merge recomputed values with the values of
    the forward, and would store those.
    """
    return jax.lax.optimization_barrier(x)
