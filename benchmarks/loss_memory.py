"""Measures the memory of the loss, forward and backward, with all logits at once and in chunks, as compiled.

`python benchmarks/loss_memory.py` compiles for this machine and runs nothing. `--topology=h100:1` or `v5e:1x1` compiles
for a chip without the hardware (`pip install 'pretrainax[cuda13]'`, `'pretrainax[tpu]'`).
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pretrainax.config import MeshConfig
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.heads.vocabulary_loss import loss_sums
from pretrainax.planning.topologies import Topology
from pretrainax.sharding.mesh import make_mesh

# (name, rows, loss tokens per row, width, vocabulary)
SHAPES = (
    ("quickstart, V 8,192", 16, 114, 256, 8192),
    ("T5-base, 128 rows", 128, 114, 768, 32128),
    ("GPT-2 124M, 16 x 1,024", 16, 1024, 768, 50304),
    ("GPT-2 124M, 64 x 1,024", 64, 1024, 768, 50304),
    ("LLaMA 3 8B, 2 x 8,192", 2, 8192, 4096, 128256),
)
CHUNKS = (1024, 4096)
GB = 1e9


def plain(outputs: Any, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the summed loss with all logits at once and automatic gradients."""
    logits = (outputs.features @ outputs.unembedding.astype(outputs.features.dtype)).astype(jnp.float32)
    return (optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights).sum()


def chunked(chunk: int):
    return lambda *arguments: loss_sums(*arguments, chunk=chunk)["objective"][0]


def temporary_gigabytes(loss, shape, sharding) -> str:
    """Returns the temporary memory of value and gradients as compiled, without arguments and results."""
    _, rows, length, width, vocab = shape

    def step(features, unembedding, targets, weights):
        def of_parameters(features, unembedding):
            outputs = LanguageModelOutput(features, unembedding)
            return loss(outputs, targets, weights)

        return jax.value_and_grad(of_parameters, (0, 1))(features, unembedding)

    arguments = (
        jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)
        for sizes, dtype in (
            ((rows, length, width), jnp.bfloat16),
            ((width, vocab), jnp.float32),
            ((rows, length), jnp.int32),
            ((rows, length), jnp.float32),
        )
    )
    try:
        compiled = jax.jit(step).lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return "does not fit"
    return f"{compiled.memory_analysis().temp_size_in_bytes / GB:.2f} GB"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", type=Topology.parse, help="compile for one device of this topology, e.g. h100:1")
    topology = parser.parse_args().topology
    device = topology.devices()[0] if topology else jax.devices()[0]
    jax.set_mesh(mesh := make_mesh(MeshConfig(), [device]))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    print(f"temporary memory of the loss, forward and backward, bfloat16 features, {device.device_kind}\n")
    names = ["float32 logits", "all at once", *(f"chunks of {chunk:,}" for chunk in CHUNKS)]
    print("| model | " + " | ".join(names) + " |\n" + "| --- " * (1 + len(names)) + "|")
    for shape in SHAPES:
        name, rows, length, _, vocab = shape
        cells = [f"{rows * length * vocab * 4 / GB:.2f} GB"]
        cells += [temporary_gigabytes(loss, shape, sharding) for loss in (plain, *map(chunked, CHUNKS))]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
