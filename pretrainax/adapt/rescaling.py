"""IA3: rescales keys, values and inner activations of feed-forward layers (Liu et al. 2022, arXiv 2205.05638)."""

import dataclasses
import re

import jax
import jax.numpy as jnp

from pretrainax.adapt.matrices import matrices_of
from pretrainax.adapt.tuning import Tuning, broadcast_to_rows
from pretrainax.layers.linear import Linear
from pretrainax.sharding.param_paths import Flat

# Path patterns of the linear layers whose inputs or outputs are rescaled.
_INPUT_RESCALED = re.compile(r"/mlp(_after)?/down$")
_OUTPUT_RESCALED = re.compile(r"_attention/(key|value)$")


@dataclasses.dataclass
class IA3(Tuning):
    """Trains three vectors per block, which multiply the keys, the values and the input of `down` elementwise.

    `down` is the second linear layer of the feed-forward layer. The vectors are initialized to ones (section 3.3).
    """

    def added(self, params, key):
        del key
        matrices = [
            matrix
            for matrix in matrices_of(params)
            if _INPUT_RESCALED.search(matrix.path) or _OUTPUT_RESCALED.search(matrix.path)
        ]
        sizes = {m.path: m.inputs if _INPUT_RESCALED.search(m.path) else m.outputs for m in matrices}
        layers = {matrix.path: matrix.layers for matrix in matrices}
        return {f"{path}/ia3": jnp.ones((layers[path], *size), jnp.float32) for path, size in sizes.items()}

    def apply_linear(self, linear: Linear, call, x, training):
        del training
        if not linear.has_variable("params", "ia3"):
            return call(x)
        vector = linear.get_variable("params", "ia3")
        return (
            call(x * broadcast_to_rows(vector, x))
            if linear.name == "down"
            else (y := call(x)) * broadcast_to_rows(vector, y)
        )

    def merged(self, params: Flat) -> Flat:
        params = dict(params)
        for path in [name.removesuffix("/ia3") for name in params if name.endswith("/ia3")]:
            vector, kernel = params.pop(f"{path}/ia3"), params[f"{path}/kernel"]
            if _INPUT_RESCALED.search(path):
                params[f"{path}/kernel"] = kernel * vector[:, :, None]  # [L, F, D]
                continue
            params[f"{path}/kernel"] = jax.vmap(lambda kernel, vector: kernel * broadcast_to_rows(vector, kernel))(
                kernel, vector
            )
            if f"{path}/bias" in params:
                params[f"{path}/bias"] = params[f"{path}/bias"] * vector
        return params
