"""The rematerialization policy: which residuals a block saves, and which residuals the backward recomputes.

The forward saves the outputs of matrix products and of kernels, and the arrays that are marked with `saved_residual`.
With the marked arrays, the saved arrays are sufficient to recompute everything else without another matrix product:
normalized streams, activations, dropout masks, rotated or converted arrays. On an accelerator, memory traffic limits
the speed of a step, so arithmetic on data that is read anyway costs no time.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Primitive

from pretrainax.sharding.mesh import platform

_KEPT, _CONVERTED = "kept", "converted"
# The primitives whose outputs are saved: matrix products; attention kernels, and the squeeze that takes one of the 128
# columns of their normalisers; loops, as in ring attention; communication between devices.
PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}
_KERNELS = {"pallas_call", "squeeze", "dot_product_attention_fwd_wrapper", "dot_product_attention_fwd"}
_OTHERS = {"scan", "while", "all_gather", "all_to_all", "ppermute", "psum", "psum_invariant", "reduce_scatter"}
_SAVED = PRODUCTS | _KERNELS | _OTHERS


def saved_residual(x: jax.Array) -> jax.Array:
    """Marks x as a residual that the forward saves for the backward, and returns x."""
    return checkpoint_name(x, _KEPT)


def cast_kernel(kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the kernel of a linear layer in the dtype of its product, marked for `converted_saveable`.

    Where layers are unrolled, saving the cast kernel avoids a copy. Otherwise, the recomputation would slice the
    float32 kernel of a layer out of the stacked parameters once more. In a loop over layers, the saved kernels would be
    stacked again, in addition to the parameters, and are not saved. On a CPU, blocks are not rematerialized, and this
    function returns the kernel unchanged.
    """
    return kernel if platform() == "cpu" else checkpoint_name(kernel.astype(dtype), _CONVERTED)


def products_saveable(primitive: Primitive, *_: object, **params: object) -> bool:
    """Returns True if a block saves the output of a primitive; a policy for `jax.checkpoint`."""
    return primitive.name in _SAVED or (primitive.name == "name" and params["name"] == _KEPT)


def is_cast_kernel(eqn: JaxprEqn) -> bool:
    """Returns True if an equation of a jaxpr is the mark that `cast_kernel` put on a kernel."""
    return eqn.primitive.name == "name" and eqn.params["name"] == _CONVERTED


converted_saveable = jax.checkpoint_policies.save_only_these_names(_CONVERTED)


def recompute(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `function` with a backward that saves only the input arrays and recomputes everything else from them."""
    run = jax.custom_vjp(function)

    def backward(inputs, gradient):
        first, *others = inputs
        # On a CPU, blocks are not rematerialized, so the barrier is necessary. On other platforms, rematerialization
        # already separates the forward from the backward. There, a barrier would write a single input to memory that
        # may be the sum of a product and a bias. With several inputs (a gate), the inputs are saved products.
        first = barrier(first) if others or platform() == "cpu" else first
        return jax.vjp(function, first, *others)[1](gradient)

    # The forward calls `function`, not `run`, so that gradients can be differentiated again.
    run.defvjp(lambda *inputs: (function(*inputs), inputs), backward)
    return functools.wraps(function)(run)


def barrier(x: jax.Array) -> jax.Array:
    """Returns x behind an optimization barrier, for use in the backward.

    Unrolled layers are one program. Without the barrier, the compiler would merge recomputed values with the equal
    values of the forward, and would store the values of the forward.
    """
    return jax.lax.optimization_barrier(x)
