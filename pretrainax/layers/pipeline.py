"""GPipe: the layers of a stack lie on stages, through which parts of the rows pass one after the other (Huang et al.
2018, arXiv 1811.06965, section 2).

P stages, the devices along the axis `pipeline`, have L/P layers each. The rows that they share are cut into M parts. At
tick t stage s computes part t - s, of what the stage before it has sent at the tick before; so the last part is done
after M + P - 1 ticks, in P - 1 of which a stage computes what nobody reads. That is the bubble, (P - 1) / (M + P - 1)
of the time. The backward is that of the scan over ticks: the same way back.

Around the stack the axis splits rows like `data`: embeddings and the loss are computed once, not once a stage. The
stack gathers the rows of its stages, and scatters what the last stage makes of them.

Of each parameter what `fsdp` splits is gathered once, not at each tick, and so are gradients summed and scattered, as
Llama 3 does under pipelines (arXiv 2407.21783, section 3.3.2). So all axes that split rows are those of one
`jax.shard_map`; what splits the inside of a row, `sequence` and `tensor`, is left to the compiler.

All parts pass forward before the first goes back, so what layers keep for the backward is of all M.
`layers/one_forward_one_backward.py` turns each part round at the last stage.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.layers.block import Context, Layer
from pretrainax.sharding.axes import BATCH_AXES, FSDP_AXIS, PIPELINE_AXIS
from pretrainax.sharding.mesh import axis_size, platform
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import param_specs
from pretrainax.sharding.stages import count_parts

Keys: TypeAlias = dict[str, jax.Array]  # a random key for each use
# (parameters [L/P, …], stream [b, T, D], layers, context of b rows, keys) -> stream [b, T, D]
Stage: TypeAlias = Callable[[PyTree, jax.Array, Layer, Context, Keys], jax.Array]


def pipelined(
    stage: Stage, params: PyTree, x: jax.Array, layers: Layer, context: Context, keys: Keys, parts: int
) -> jax.Array:
    """Returns the stream [B, T, D] after all layers, under the mesh of `jax.set_mesh`, whose BATCH_AXES divide B.

    Args:
      params: of all blocks, [L, …].
      layers: [L] each.
      context: arrays [B, …], or others that all rows share.
      keys: another one is made of each for each part and device, so that dropout is not that of one device.
      parts: M, at most; 0: one of each row.
    """
    specs = param_specs({"blocks": params})["blocks"]
    own = jax.tree.map(own_spec, specs)
    rows, of_rows = P(BATCH_AXES), jax.tree.map(lambda a: a.ndim > 1 and a.shape[0] == len(x), context)

    def on_stage(params, x, layers, context, keys):
        whole = jax.tree.map(gathered, params, specs)
        run = functools.partial(_ticks, lambda *part: stage(whole, *part), layers, keys, of_rows)
        in_parts = jax.tree.map(lambda a, by_row: cut(a, parts) if by_row else a, context, of_rows)
        return run(cut(x, parts), in_parts)

    contexts = jax.tree.map(lambda by_row: rows if by_row else P(), of_rows)
    run = jax.shard_map(
        on_stage,
        in_specs=(own, rows, P(PIPELINE_AXIS), contexts, P()),
        out_specs=rows,
        axis_names=set(BATCH_AXES),
        check_vma=False,  # a stage cannot say that what it got from its neighbour varies along the axis
    )
    return run(params, x, layers, context, keys)


def own_spec(spec: P) -> P:
    """Returns what a `jax.shard_map` of the axes that split rows has of a parameter that lies so."""
    return P(*(name if name in BATCH_AXES else None for name in spec))


def gathered(x: jax.Array, spec: P) -> jax.Array:
    """Returns a parameter whole along `fsdp`; its gradient is scattered along it."""
    if FSDP_AXIS not in spec:
        return x
    gather = functools.partial(jax.lax.all_gather, axis_name=FSDP_AXIS, axis=spec.index(FSDP_AXIS), tiled=True)
    # of what each device has: the compiler would gather along `tensor` first
    split = P(*(None if name in BATCH_AXES else name for name in spec))
    return jax.shard_map(gather, in_specs=split, out_specs=split, check_vma=False)(x)


def between_stages(collective: Callable[..., jax.Array], x: jax.Array, **how: bool) -> jax.Array:
    """Returns what a collective along `pipeline` makes of `x`: of bfloat16 on a CPU in float32, and its gradient too.

    NOTE XLA for CPUs aborts at a sum of bfloat16 under a `jax.shard_map` of some axes: AllReducePromotion, which makes
    one in float32 of it, takes its reduction, which there ends in a copy, for a single operation (jaxlib 0.10.2).
    """
    wide = x.astype(jnp.float32) if platform() == "cpu" and x.dtype == jnp.bfloat16 else x
    return collective(wide, PIPELINE_AXIS, **how).astype(x.dtype)


def cut(x: jax.Array, parts: int) -> jax.Array:
    """Returns the rows of all stages in parts, [n, …] -> [M, P · n / M, …]."""
    x = between_stages(jax.lax.all_gather, x, tiled=True)  # [n, …] -> [P · n, …]
    return x.reshape(count_parts(parts, len(x)), -1, *x.shape[1:])


def of_part(keys: Keys, number: jax.Array) -> Keys:
    """Returns keys that no other part and no other device has."""
    device = jax.lax.axis_index(BATCH_AXES)
    return {use: jax.random.fold_in(jax.random.fold_in(key, device), number) for use, key in keys.items()}


def _ticks(stage: Callable, layers: Layer, keys: Keys, of_rows: PyTree, x: jax.Array, context: Context) -> jax.Array:
    """Returns the rows [n, T, D] of this device after all stages, of parts [M, b, T, D]."""
    stages, place, parts = axis_size(PIPELINE_AXIS), jax.lax.axis_index(PIPELINE_AXIS), len(x)

    def tick(received: jax.Array, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        number = jnp.clip(turn - place, 0, parts - 1)  # of this part; in the bubble of any, as nobody reads the result
        own = jax.tree.map(lambda a, by_row: a[number] if by_row else a, context, of_rows)
        y = stage(jnp.where(place == 0, x[number], received), layers, own, of_part(keys, number))
        return jax.lax.ppermute(y, PIPELINE_AXIS, [(i, i + 1) for i in range(stages - 1)]), y

    _, made = jax.lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(parts + stages - 1))
    done = jnp.where(place == stages - 1, made[stages - 1 :], 0)
    # [M, b, T, D] -> [P · n, T, D] -> [n, T, D]
    return between_stages(jax.lax.psum_scatter, done.reshape(-1, *x.shape[2:]), tiled=True)
