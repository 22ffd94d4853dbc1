"""Applies layers whose kinds, local and global, follow a periodic pattern, so that the kind of each layer is static.

A loop over all layers traces a single block. If its kind is an array, the block contains the attention of both kinds
and selects one at run time, which stalls a GPU and saves the residuals of both. Here, a loop runs over the periods of
the pattern. In each period, an inner loop runs over each sequence of layers of the same kind: for Gemma 3, over five
local layers and then over one global layer. The parameters of all layers stay stacked as [L, …].
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Optional, TypeAlias

import jax
import jax.numpy as jnp

from pretrainax.layers.block import AuxOutputs, Context
from pretrainax.sharding.param_paths import PyTree

# Applies l consecutive layers of one kind: (x [B, T, D], context, arrays [l, …] of these layers, blocks per iteration
# as in `stack.scan_blocks`) -> (x, auxiliary outputs [l, …])
LayerLoop: TypeAlias = Callable[[jax.Array, Context, PyTree, Optional[int]], tuple[jax.Array, AuxOutputs]]


def apply_by_kind(
    loop: LayerLoop, pattern: Sequence[str], unroll: Optional[int], x: jax.Array, context: Context, arrays: PyTree
) -> tuple[jax.Array, AuxOutputs]:
    """Applies L layers with static kinds, and returns the hidden states and the auxiliary outputs [L, …].

    Args:
      loop: applies consecutive layers of one kind. Its context states the kind.
      pattern: kinds of the first layers, "local" or "global", which repeat.
      unroll: number of layers per iteration of the loop over periods. If None, there is no loop.
      x: hidden states, [B, T, D].
      arrays: parameters and other arrays of the layers, [L, …] each.
    """
    count, size = len(jax.tree.leaves(arrays)[0]), len(pattern)
    num_periods, rest = divmod(count, size)
    in_periods = count - rest

    def period(x, runs, unroll):
        outputs = []
        for (is_local, _), run_arrays in zip(_runs(pattern), runs, strict=False):
            x, aux = loop(x, context.replace(is_local=is_local), run_arrays, unroll)
            outputs.append(aux)
        return x, outputs

    parts = []
    if num_periods:
        # [L, …] -> [n, p, …] -> [n, l, …] for each run. The loop saves its inputs for the backward without a copy, but
        # not slices that it makes itself.
        periods = jax.tree.map(lambda a: a[:in_periods].reshape(num_periods, size, *a.shape[1:]), arrays)
        runs = [jax.tree.map(lambda a, s=layers: a[:, s], periods) for _, layers in _runs(pattern)]
        periods_per_iteration = num_periods if unroll is None else max(1, unroll // size)
        x, outputs = jax.lax.scan(functools.partial(period, unroll=unroll), x, runs, unroll=periods_per_iteration)
        # [n, l, …] of each run -> [n · p, …]
        parts.append(jax.tree.map(lambda *a: jnp.concatenate(a, axis=1).reshape(in_periods, *a[0].shape[2:]), *outputs))
    if rest:  # the layers after the last whole period are not in a loop
        runs = [jax.tree.map(lambda a, s=layers: a[in_periods:][s], arrays) for _, layers in _runs(pattern[:rest])]
        x, outputs = period(x, runs, None)
        parts += outputs
    return x, jax.tree.map(lambda *a: jnp.concatenate(a), *parts)


def _runs(pattern: Sequence[str]) -> list[tuple[bool, slice]]:
    """Splits a pattern into sequences of equal kinds; returns (is it local, its layers) for each."""
    runs, start = [], 0
    for kind, layers in itertools.groupby(pattern):
        stop = start + len(list(layers))
        runs.append((kind == "local", slice(start, stop)))
        start = stop
    return runs
