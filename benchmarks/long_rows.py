"""Counts what the attention of one layer costs in rows of any length, sparse and full: FLOPs and bytes, as compiled.

    python benchmarks/long_rows.py                        # base models at 1,024, 4,096 and 16,384 tokens
    python benchmarks/long_rows.py longformer_large --lengths=2048,8192

Forward and backward of one row in float32, with the maps to queries, keys and values, are compiled for a CPU, and XLA
counts; nothing is run, so that the logits of full attention need no memory.
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
    bytes: float  # that its kernels read and write


def cost_of(config: ModelConfig, length: int) -> Cost:
    """Returns what one row of so many tokens costs in the self-attention of one layer, forward and backward."""
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
    """Returns the same model with attention to all of a row."""
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
            figures = [f"{c.flops / 1e9:,.1f}" for c in costs] + [f"{c.bytes / 1e9:,.2f}" for c in costs]
            rows.append([name, f"{length:,}", *figures])
    print(markdown(["model", "tokens", "GFLOPs, sparse", "GFLOPs, full", "GB, sparse", "GB, full"], rows))


if __name__ == "__main__":
    main()
