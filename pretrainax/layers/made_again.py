"""Says what the backward of a block makes again, and what is kept for it.

Products and kernels are kept, with `kept` arrays that close the way between them; all else is made of these again
where the backward needs it: normed streams, activations, masks of dropout, rotated or converted arrays. Memory is
what bounds a step on an accelerator, and arithmetic on what is read anyway is free.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Primitive

from pretrainax.sharding.mesh import platform

_KEPT, _CONVERTED = "kept", "converted"
# Primitives: products; attention's kernels, of whose normalisers a column of 128 is taken (squeeze); loops, as of a
# ring; what goes between devices.
PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}
_KERNELS = {"pallas_call", "squeeze", "dot_product_attention_fwd_wrapper", "dot_product_attention_fwd"}
_OTHERS = {"scan", "while", "all_gather", "all_to_all", "ppermute", "psum", "psum_invariant", "reduce_scatter"}
_SAVED = PRODUCTS | _KERNELS | _OTHERS


def kept(x: jax.Array) -> jax.Array:
    """Returns x, which the backward need not make again."""
    return checkpoint_name(x, _KEPT)


def converted(kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns a kernel as the backward has it: in the dtype of its product, which `converted_saveable` lets it keep.

    Where layers are no loop that saves a copy: the float32 kernel of a layer would be cut out of the stack once more,
    to be set apart for what is made again. In a loop what is kept is a stack beside the parameters; so a CPU, where
    blocks are not rematerialised, keeps the kernel as it is.
    """
    return kernel if platform() == "cpu" else checkpoint_name(kernel.astype(dtype), _CONVERTED)


def products_saveable(primitive: Primitive, *_: object, **params: object) -> bool:
    """Tells jax.checkpoint what it may save of a block."""
    return primitive.name in _SAVED or (primitive.name == "name" and params["name"] == _KEPT)


def is_converted(eqn: JaxprEqn) -> bool:
    """Returns True if an equation is what `converted` returns."""
    return eqn.primitive.name == "name" and eqn.params["name"] == _CONVERTED


converted_saveable = jax.checkpoint_policies.save_only_these_names(_CONVERTED)


def made_again(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `function` of arrays with a backward that keeps nothing but these arrays."""
    run = jax.custom_vjp(function)

    def backward(inputs, gradient):
        first, *others = inputs
        # But on a CPU blocks are rematerialised, which sets their inputs apart: a single one, which may be a sum with a
        # bias, is not written for this. Those of a gate are there, as products are.
        first = apart(first) if others or platform() == "cpu" else first
        return jax.vjp(function, first, *others)[1](gradient)

    # not run, of which a gradient could not be differentiated again
    run.defvjp(lambda *inputs: (function(*inputs), inputs), backward)
    return functools.wraps(function)(run)


def apart(x: jax.Array) -> jax.Array:
    """Returns x as the backward has it: what is made of it is not merged with what the forward made.

    Layers that are unrolled are one program, whose compiler would otherwise keep the forward's.
    """
    return jax.lax.optimization_barrier(x)
