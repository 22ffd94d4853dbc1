"""LoRA: low-rank updates of selected matrices (Hu et al. 2021, arXiv 2106.09685)."""

import dataclasses
import functools
import math
import zlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pretrainax.adapt.matrices import Matrix, matching, matrices_of, pattern_problem
from pretrainax.adapt.tuning import Tuning, abstract_params, broadcast_to_rows
from pretrainax.config import Experiment, nearest
from pretrainax.layers.dropout import apply_dropout
from pretrainax.layers.linear import Linear, project
from pretrainax.sharding.param_paths import Flat, flat


@dataclasses.dataclass
class LoRA(Tuning):
    """Replaces a matrix W [in, out] with W + alpha / rank · A B and trains A [in, rank] and B [rank, out].

    B is initialized to zero, so the initial model is unchanged. With `dora`, the update changes only the direction of
    each output, and a magnitude m per output is trained (Liu et al. 2024, arXiv 2402.09353, section 4.1):

        m · (W + alpha / rank · A B) / |W + alpha / rank · A B|

    The norm is taken over the inputs and is treated as a constant in the backward pass (section 4.3). m is initialized
    to |W|.
    """

    rank: int = 8  # rank of the update
    alpha: float = 16.0  # the update is scaled by alpha / rank
    dropout: float = 0.0  # dropout rate of the input of the update
    # regular expressions for the ends of paths of matrices, over whole names: "query", "decoder/.*/value", "mlp/.*".
    # Experts and routers of a mixture never match
    targets: tuple[str, ...] = ("query", "value")
    dora: bool = False  # trains magnitudes and directions of the outputs separately (DoRA)
    # modules or parameters that are also trained, in full, by a part of their path: "token_embedding", "unembedding",
    # "mlp_norm/scale", "bias"
    fully_trained: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def trains(self, path, heads):
        return any(f"/{part}/" in f"/{path}/" for part in self.fully_trained)

    def merged_elements(self, params):
        if not self.dora:
            return 0
        return sum(m.layers * math.prod(m.size) * self.rank for m in matching(matrices_of(params), self.targets))

    def added(self, params, key):
        kernels, added = flat(params), {}
        for matrix in matching(matrices_of(params), self.targets):
            path, layers = matrix.path, matrix.layers
            # NOTE The paper draws A from a Gaussian. Its released code uses this uniform distribution.
            bound = 1.0 / math.sqrt(math.prod(matrix.inputs))
            matrix_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
            a = jax.random.uniform(matrix_key, (layers, *matrix.inputs, self.rank), jnp.float32, -bound, bound)
            added[f"{path}/lora_a"] = a
            added[f"{path}/lora_b"] = jnp.zeros((layers, self.rank, *matrix.outputs), jnp.float32)
            if self.dora:
                norm = jax.vmap(functools.partial(_norm, outputs=len(matrix.outputs)))
                added[f"{path}/magnitude"] = norm(kernels[f"{path}/kernel"])
        return added

    def apply_linear(self, linear: Linear, call, x, training):
        y = call(x)
        if not linear.has_variable("params", "lora_a"):
            return y
        a, b = (linear.get_variable("params", name) for name in ("lora_a", "lora_b"))
        num_inputs = len(linear.axes) - len(linear.features)
        if training and self.dropout:
            x = apply_dropout(self.dropout, x, linear.make_rng("dropout"))
        update = self.scale * project(project(x, a, num_inputs), b, 1)
        if not self.dora:
            return y + update
        kernel, magnitude = (linear.get_variable("params", name) for name in ("kernel", "magnitude"))
        direction = jax.lax.stop_gradient(kernel + self._update(a, b))
        ratio = broadcast_to_rows(magnitude / _norm(direction, len(linear.features)), y)
        bias = (
            broadcast_to_rows(linear.get_variable("params", "bias"), y) if linear.use_bias else jnp.zeros((), y.dtype)
        )
        return (y - bias + update) * ratio + bias

    def merged(self, params: Flat) -> Flat:
        params = dict(params)
        for path in [name.removesuffix("/lora_a") for name in params if name.endswith("/lora_a")]:
            a, b = (params.pop(f"{path}/{name}") for name in ("lora_a", "lora_b"))
            magnitude = params.pop(f"{path}/magnitude", None)
            kernel = params[f"{path}/kernel"] + jax.vmap(self._update)(a, b)
            if magnitude is not None:
                rescale = lambda kernel, m: kernel * broadcast_to_rows(m / _norm(kernel, m.ndim), kernel)  # noqa: E731
                kernel = jax.vmap(rescale)(kernel, magnitude)
            params[f"{path}/kernel"] = kernel
        return params

    def _update(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Computes the update alpha / rank · A B of one layer, [in…, rank], [rank, out…] -> [in…, out…]."""
        return self.scale * jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if not self.targets:
            yield "config.tuning.targets is empty, it must name matrices, such as ('query', 'value')"
        if self.rank < 1:
            yield f"config.tuning.rank is {self.rank}, it must be at least 1"
        if not 0 <= self.dropout < 1:
            yield f"config.tuning.dropout is {self.dropout}, it must be in [0, 1)"
        if not self.alpha > 0:
            yield f"config.tuning.alpha is {self.alpha}, it must be above 0"
        params = abstract_params(experiment.model)
        names = {name for path in flat(params) for name in path.split("/")}
        for part in self.fully_trained:
            if not any(f"/{part}/" in f"/{path}/" for path in flat(params)):
                yield f"config.tuning.fully_trained has {part!r}, no parameter's path has it, {nearest(part, names)}"
        matrices = matrices_of(params)
        pattern_problems = {
            pattern: problem for pattern in self.targets if (problem := pattern_problem(pattern, matrices))
        }
        for pattern, problem in pattern_problems.items():
            yield f"config.tuning.targets has {pattern!r}, {problem}"
        if not pattern_problems:
            yield from self._rank_problems(matching(matrices, self.targets))

    def _rank_problems(self, matrices: list[Matrix]) -> Iterator[str]:
        if smaller_matrices := [matrix for matrix in matrices if matrix.rank < self.rank]:
            smallest = min(smaller_matrices, key=lambda matrix: matrix.rank)
            inputs, outputs = smallest.size
            yield (
                f"config.tuning.rank is {self.rank}, but {smallest.path} is a matrix of {inputs} × {outputs}: it must "
                f"be at most {smallest.rank}"
            )


def _norm(kernel: jax.Array, outputs: int) -> jax.Array:
    """Computes the Euclidean norm of a kernel over the input axes, [in…, out…] -> [out…].

    Args:
      outputs: number of output axes.
    """
    return jnp.sqrt(jnp.sum(jnp.square(kernel), axis=tuple(range(kernel.ndim - outputs))))
