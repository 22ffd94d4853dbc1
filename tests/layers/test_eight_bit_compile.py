"""Compiles a linear layer with 8-bit products for accelerators that are not there."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import MeshConfig, UserError
from pretrainax.layers.linear import project
from pretrainax.planning.hlo import Program
from pretrainax.planning.topologies import Topology
from pretrainax.sharding.mesh import make_mesh
from tests.support.tiers import few

pytestmark = pytest.mark.aot
DTYPES = {"fp8": "f8e4m3fn", "int8": "s8"}
CASES = [
    ("h100:1", "fp8"),
    ("h100:1", "int8"),
    ("b200:1", "fp8"),
    ("v5e:1x1", "int8"),
    ("v6e:1x1", "int8"),
    ("tpu7x:1x1x1", "fp8"),
]


def compiled(topology, products):
    """Compiles a layer 768 -> 3,072 on 1,024 tokens with both gradients; returns the HLO text."""
    try:
        devices = Topology.parse(topology).devices()[:1]
    except UserError as e:
        pytest.skip(str(e))
    with jax.set_mesh(mesh := make_mesh(MeshConfig(), devices)):
        sharding = NamedSharding(mesh, P())
        x, gradient = (jax.ShapeDtypeStruct((4, 256, n), jnp.bfloat16, sharding=sharding) for n in (768, 3072))
        kernel = jax.ShapeDtypeStruct((768, 3072), jnp.float32, sharding=sharding)

        def run(x, kernel, gradient):
            y, backward = jax.vjp(lambda x, kernel: project(x, kernel, 1, products), x, kernel)
            return y, backward(gradient)

        return jax.jit(run).lower(x, kernel, gradient).compile().as_text()


@pytest.mark.parametrize("topology, products", few(CASES, CASES[:1]))
def test_all_products_of_a_layer_have_8_bit_operands(topology, products):
    program = Program(compiled(topology, products))
    operands = [
        [values[name].shapes[0].dtype for name in instruction.operands[:2]]
        for values in program.computations.values()
        for instruction in values.values()
        if instruction.opcode in ("dot", "convolution") or "matmul" in instruction.target
    ]
    assert operands == 3 * [2 * [DTYPES[products]]]
