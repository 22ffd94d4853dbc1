"""The rematerialization policy: which residuals a block saves, and which residuals the backward recomputes.

The forward saves the outputs of matmuls and kernels, and the arrays marked with `saved_residual`. From these arrays,
the backward recomputes everything else without another matmul: normalized hidden states, activations, dropout masks,
rotated or converted arrays. On an accelerator, memory traffic limits the speed of a step, so arithmetic on data that is
read anyway costs no time.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Primitive

from pretrainax.sharding.mesh import platform

_RESIDUAL, _CONVERTED = "kept", "converted"
# The primitives whose outputs are saved: matmuls; attention kernels, and the squeeze that selects one of the 128
# columns of their normalisers; loops, as in ring attention; communication between devices.
PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}
_KERNELS = {"pallas_call", "squeeze", "dot_product_attention_fwd_wrapper", "dot_product_attention_fwd"}
_LOOPS_AND_COLLECTIVES = {
    "scan",
    "while",
    "all_gather",
    "all_to_all",
    "ppermute",
    "psum",
    "psum_invariant",
    "reduce_scatter",
}
_SAVED = PRODUCTS | _KERNELS | _LOOPS_AND_COLLECTIVES


def saved_residual(x: jax.Array) -> jax.Array:
    """Marks x as a residual that the forward saves for the backward, and returns x."""
    return checkpoint_name(x, _RESIDUAL)


def cast_kernel(kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Casts the kernel of a linear layer to the dtype of its matmul, and marks it for `converted_saveable`.

    If layers are unrolled, saving the cast kernel avoids a copy: the recomputation would otherwise slice the float32
    kernel of a layer out of the stacked parameters again. In a loop over layers, saved kernels would be stacked in
    addition to the parameters, so they are not saved. On a CPU, blocks are not rematerialized, and this function
    returns the kernel unchanged.
    """
    return kernel if platform() == "cpu" else checkpoint_name(kernel.astype(dtype), _CONVERTED)


def products_saveable(primitive: Primitive, *_: object, **params: object) -> bool:
    """Returns True if a block saves the output of `primitive`; this function is a policy for `jax.checkpoint`.

    The int32 output of a product of int8 operands is not saved, because its smaller scaled result is marked.
    """
    if primitive.name in PRODUCTS and params.get("preferred_element_type") == jnp.int32:
        return False
    if any(output.dtype == jnp.int32 for output in params.get("out_avals", ())):  # a grouped product of `pallas_call`
        return False
    return primitive.name in _SAVED or (primitive.name == "name" and params["name"] == _RESIDUAL)


def is_cast_kernel(eqn: JaxprEqn) -> bool:
    """Returns whether a jaxpr equation is the marker that `cast_kernel` adds to a kernel."""
    return eqn.primitive.name == "name" and eqn.params["name"] == _CONVERTED


converted_saveable = jax.checkpoint_policies.save_only_these_names(_CONVERTED)


def recompute(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wraps `function` so that only its inputs are saved, and the backward recomputes everything else from them."""
    wrapped = jax.custom_vjp(function)

    def backward(inputs, gradient):
        first, *others = inputs
        # On a CPU, blocks are not rematerialized, so the barrier is necessary. On other platforms, rematerialization
        # already separates the forward from the backward. There, a single input may be the sum of a matmul and a bias,
        # and a barrier would write this sum to memory. With several inputs (a gate), the inputs are saved matmul
        # outputs.
        first = barrier(first) if others or platform() == "cpu" else first
        return jax.vjp(function, first, *others)[1](gradient)

    # The forward calls `function`, not `wrapped`, so that gradients can be differentiated again.
    wrapped.defvjp(lambda *inputs: (function(*inputs), inputs), backward)
    return functools.wraps(function)(wrapped)


def barrier(x: jax.Array) -> jax.Array:
    """Puts x behind an optimization barrier, for use in the backward.

    Unrolled layers are one program. Without the barrier, the compiler would merge recomputed values with the equal
    values of the forward, and would store the values of the forward.
    """
    return jax.lax.optimization_barrier(x)


@jax.custom_vjp
def fan_out(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x twice, for a matmul and for further uses; the matmul of the backward adds the gradient of the others.

    A matmul on a GPU can add one array to its result. Of a sum (a + b) + c of three matmuls, XLA merges b into a, but
    not c, because a already adds b. The backward of this function computes c + (a + b), of which it merges both.
    """
    return x, x


fan_out.defvjp(lambda x: ((x, x), None), lambda _, gradients: (gradients[0] + gradients[1],))
