"""Counts FLOPs and bytes of sparse and full attention in one layer, for rows of any length, as compiled.

    python benchmarks/long_rows.py                        # base models at 1,024, 4,096 and 16,384 tokens
    python benchmarks/long_rows.py longformer_large --lengths=2048,8192

The script compiles forward and backward of one row in float32 for a CPU, including the projections to queries, keys and
values, and prints XLA's counts. Nothing runs, so the logits of full attention need no memory.
"""

import argparse
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pretrainax import zoo
from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask
from pretrainax.layers.compute import Compute
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.self_attention import self_attention_of
from pretrainax.reporting.tables import markdown


class Cost(NamedTuple):
    flops: float
    bytes: float  # read and written by the kernels


def cost_of(config: ModelConfig, length: int) -> Cost:
    """Returns the cost of one row of `length` tokens in the self-attention of one layer, forward and backward."""
    layer = self_attention_of(config)(config, Compute())

    def arguments(x):
        ids = jnp.ones(x.shape[:2], jnp.int32)
        return x, x, Mask(False, ids, ids, window=config.window, layer=jnp.zeros((), jnp.int32)), PositionTerms()

    def result(params, x):
        return layer.apply(params, *arguments(x))[0].sum()

    x = jax.ShapeDtypeStruct((1, length, config.d_model), jnp.float32)
    params = jax.eval_shape(lambda x: layer.init(jax.random.key(0), *arguments(x)), x)
    found = jax.jit(jax.grad(result)).lower(params, x).compile().cost_analysis()
    return Cost(found["flops"], found["bytes accessed"])


def full(config: ModelConfig) -> ModelConfig:
    """Returns the same model with full attention."""
    return dataclasses.replace(config, sparse_attention=None, layer_pattern=("global",), window=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", default=["longformer_base", "bigbird_base"])
    parser.add_argument("--lengths", default="1024,4096,16384")
    options = parser.parse_args()
    rows = []
    for name in options.model:
        for length in map(int, options.lengths.split(",")):
            config = zoo.preset(name)
            costs = [cost_of(config, length), cost_of(full(config), length)]
            values = [f"{c.flops / 1e9:,.1f}" for c in costs] + [f"{c.bytes / 1e9:,.2f}" for c in costs]
            rows.append([name, f"{length:,}", *values])
    print(markdown(["model", "tokens", "GFLOPs, sparse", "GFLOPs, full", "GB, sparse", "GB, full"], rows))


if __name__ == "__main__":
    main()
