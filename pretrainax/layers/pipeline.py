"""GPipe: the layers of a stack are divided among stages, and microbatches pass through the stages one after the other.

Source: Huang et al. 2018, arXiv 1811.06965, section 2.

There are P stages, one for each index of the mesh axis `pipeline`. Each stage has L/P layers. The rows of all stages
are split into M microbatches. At tick t, stage s computes microbatch t - s from the output that the previous stage sent
at the previous tick. The last microbatch is done after M + P - 1 ticks. In P - 1 of these ticks, a stage computes a
result that no stage reads. This bubble is the fraction (P - 1) / (M + P - 1) of the time. The backward is the backward
of the scan over ticks: microbatches pass through the stages in reverse order.

Outside the stack, this axis shards rows like `data`, so embeddings and the loss are computed once, not once per stage.
The stack first gathers the rows of all stages. At the end, it scatters the output of the last stage to the stages.

Parameters that are sharded along `fsdp` are all-gathered once per step, not at each tick, and their gradients are
reduce-scattered once. Llama 3 does the same in pipelines (arXiv 2407.21783, section 3.3.2). One `jax.shard_map`
therefore covers all mesh axes that shard rows. The compiler handles `sequence` and `tensor`, the axes that shard within
a row.

The forward of all microbatches finishes before the first backward starts, so layers save residuals for all M
microbatches. In contrast, `layers/one_forward_one_backward.py` starts the backward of each microbatch as soon as
the microbatch reaches the last stage.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias, Union

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.layers.block import Context, Layer
from pretrainax.sharding.axes import BATCH_AXES, FSDP_AXIS, PIPELINE_AXIS, axes_of_entry
from pretrainax.sharding.mesh import axis_size, platform
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import param_specs
from pretrainax.sharding.stages import count_parts

Keys: TypeAlias = dict[str, jax.Array]  # use ("dropout") -> random key; empty without dropout
# Applies a stage's layers: (parameters [L/P, …], x [b, T, D], layers, context of b rows, keys) -> y [b, T, D]
Stage: TypeAlias = Callable[[PyTree, jax.Array, Layer, Context, Keys], jax.Array]


def run_pipeline(
    stage: Stage, params: PyTree, x: jax.Array, layers: Layer, context: Context, keys: Keys, parts: int
) -> jax.Array:
    """Computes the hidden states [B, T, D] after all layers with a pipeline, under the current mesh (`jax.set_mesh`).

    The number of devices along BATCH_AXES must divide B.

    Args:
      stage: the function that applies the layers of a stage to a microbatch.
      params: parameters of all blocks, [L, …].
      x: the hidden states before the first layer, [B, T, D].
      layers: per-layer flags, [L] each.
      context: the blocks' shared inputs; each array is [B, …], or shared by all rows.
      keys: random keys, from which each microbatch and device derives its own keys, so that dropout masks differ.
      parts: requested number of microbatches. M is its greatest common divisor with the number of rows that pass
        through one pipeline. If 0, there is one microbatch per row.
    """
    specs = param_specs({"blocks": params})["blocks"]
    shards = jax.tree.map(shard_spec, specs)
    rows, has_rows = P(BATCH_AXES), jax.tree.map(lambda a: a.ndim > 1 and a.shape[0] == len(x), context)

    def on_stage(params, x, layers, context, keys):
        gathered = jax.tree.map(gather_param, params, specs)
        run = functools.partial(_run_ticks, lambda *args: stage(gathered, *args), layers, keys, has_rows)
        microbatch_context = jax.tree.map(
            lambda a, by_row: split_microbatches(a, parts) if by_row else a, context, has_rows
        )
        return run(split_microbatches(x, parts), microbatch_context)

    contexts = jax.tree.map(lambda by_row: rows if by_row else P(), has_rows)
    run = jax.shard_map(
        on_stage,
        in_specs=(shards, rows, P(PIPELINE_AXIS), contexts, P()),
        out_specs=rows,
        axis_names=set(BATCH_AXES),
        check_vma=False,  # a stage cannot declare that data from a neighbouring stage varies along the axis
    )
    return run(params, x, layers, context, keys)


def shard_spec(spec: P) -> P:
    """Restricts a parameter's spec to the mesh axes that shard rows, for a `jax.shard_map` over these axes."""
    return P(*(entry if _splits_rows(entry) else None for entry in spec))


def gather_param(x: jax.Array, spec: P) -> jax.Array:
    """All-gathers a parameter along `fsdp`; the backward reduce-scatters its gradient.

    A parameter that is not sharded along `fsdp` is returned unchanged.
    """
    axis = next((i for i, entry in enumerate(spec) if FSDP_AXIS in axes_of_entry(entry)), None)
    if axis is None:
        return x
    gather = functools.partial(jax.lax.all_gather, axis_name=spec[axis], axis=axis, tiled=True)
    # The inner shard_map gathers only along `fsdp`. Without the inner shard_map, the compiler would gather along
    # `tensor` first.
    split = P(*(None if _splits_rows(entry) else entry for entry in spec))
    return jax.shard_map(gather, in_specs=split, out_specs=split, check_vma=False)(x)


def _splits_rows(entry: Union[None, str, tuple[str, ...]]) -> bool:
    """Returns True if the mesh axes in one entry of a PartitionSpec split the rows of a batch."""
    return bool(entry) and {*axes_of_entry(entry)} <= {*BATCH_AXES}


def between_stages(collective: Callable[..., jax.Array], x: jax.Array, **kwargs: bool) -> jax.Array:
    """Applies a collective along the mesh axis `pipeline` to `x`. On a CPU, bfloat16 arrays are converted to float32.

    NOTE XLA for CPUs aborts when bfloat16 is summed under a `jax.shard_map` over some of the mesh axes (jaxlib 0.10.2).
    Its pass AllReducePromotion converts the sum to float32 and assumes that the reduction is a single operation. Under
    such a `jax.shard_map`, the reduction ends in a copy.

    Args:
      kwargs: keyword arguments of the collective.
    """
    operand = x.astype(jnp.float32) if platform() == "cpu" and x.dtype == jnp.bfloat16 else x
    return collective(operand, PIPELINE_AXIS, **kwargs).astype(x.dtype)


def split_microbatches(x: jax.Array, parts: int) -> jax.Array:
    """Gathers the n rows of each of P stages and splits them into M microbatches: [n, …] -> [M, P · n / M, …].

    Args:
      parts: requested number of microbatches. M is its greatest common divisor with P · n. If 0, M = P · n.
    """
    x = between_stages(jax.lax.all_gather, x, tiled=True)  # [n, …] -> [P · n, …]
    return x.reshape(count_parts(parts, len(x)), -1, *x.shape[1:])


def microbatch_keys(keys: Keys, number: jax.Array) -> Keys:
    """Derives random keys that are unique to a microbatch and to this device.

    Args:
      number: index of the microbatch.
    """
    device = jax.lax.axis_index(BATCH_AXES)
    return {use: jax.random.fold_in(jax.random.fold_in(key, device), number) for use, key in keys.items()}


def _run_ticks(
    stage: Callable, layers: Layer, keys: Keys, has_rows: PyTree, x: jax.Array, context: Context
) -> jax.Array:
    """Computes the output [n, T, D] for this device's rows, from the microbatches [M, b, T, D] of all stages.

    Args:
      has_rows: for each array of `context`, whether the array has a microbatch axis [M, b, …].
    """
    stages, stage_index, num_microbatches = axis_size(PIPELINE_AXIS), jax.lax.axis_index(PIPELINE_AXIS), len(x)

    def tick(received: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Index of the microbatch. In the bubble, the index is any valid index, because no stage reads the result.
        microbatch = jnp.clip(t - stage_index, 0, num_microbatches - 1)
        microbatch_context = jax.tree.map(lambda a, by_row: a[microbatch] if by_row else a, context, has_rows)
        y = stage(
            jnp.where(stage_index == 0, x[microbatch], received),
            layers,
            microbatch_context,
            microbatch_keys(keys, microbatch),
        )
        return jax.lax.ppermute(y, PIPELINE_AXIS, [(i, i + 1) for i in range(stages - 1)]), y

    _, outputs = jax.lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(num_microbatches + stages - 1))
    final = jnp.where(stage_index == stages - 1, outputs[stages - 1 :], 0)
    # [M, b, T, D] -> [P · n, T, D] -> [n, T, D]
    return between_stages(jax.lax.psum_scatter, final.reshape(-1, *x.shape[2:]), tiled=True)
