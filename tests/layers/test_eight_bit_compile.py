"""Compiles a linear layer and the loss with 8-bit products for accelerators that this machine lacks."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import MeshConfig, UserError
from pretrainax.layers.linear import project
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.heads.vocabulary_loss import loss_sums
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


def compiled(topology, function, *arguments):
    """Compiles a function of arrays, {shape: dtype}, for one device; returns the dtypes of its products' operands."""
    try:
        devices = Topology.parse(topology).devices()[:1]
    except UserError as e:
        pytest.skip(str(e))
    with jax.set_mesh(mesh := make_mesh(MeshConfig(), devices)):
        sharding = NamedSharding(mesh, P())
        arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in arguments]
        program = Program(jax.jit(function).lower(*arrays).compile().as_text())
    return [
        [values[name].shapes[0].dtype for name in instruction.operands[:2]]
        for values in program.computations.values()
        for instruction in values.values()
        if instruction.opcode in ("dot", "convolution") or "matmul" in instruction.target
    ]


@pytest.mark.parametrize("topology, products", few(CASES, CASES[:1]))
def test_all_products_of_a_layer_have_8_bit_operands(topology, products):
    """Tests a layer 768 -> 3,072 on 1,024 tokens, with both gradients."""

    def run(x, kernel, gradient):
        y, backward = jax.vjp(lambda x, kernel: project(x, kernel, 1, products), x, kernel)
        return y, backward(gradient)

    arguments = ((4, 256, 768), jnp.bfloat16), ((768, 3072), jnp.float32), ((4, 256, 3072), jnp.bfloat16)
    assert compiled(topology, run, *arguments) == 3 * [2 * [DTYPES[products]]]


@pytest.mark.parametrize("topology, products", few(CASES, CASES[:1]))
def test_all_products_of_the_loss_have_8_bit_operands(topology, products):
    """Tests the logits of 1,024 tokens over 5,001 columns, and the gradients of the features and of the matrix."""

    def loss(x, matrix, targets, weights):
        output = LanguageModelOutput(x, matrix)
        return loss_sums(output, targets, weights, products=products, chunk=512)["objective"][0]

    tokens = (4, 256)
    arguments = (((*tokens, 256), jnp.bfloat16), ((256, 5001), jnp.float32), (tokens, jnp.int32), (tokens, jnp.float32))
    operands = compiled(topology, jax.grad(loss, (0, 1)), *arguments)
    of_gradient = {"fp8": "f8e5m2", "int8": "s8"}[products]
    expected = [2 * [DTYPES[products]], *2 * [[DTYPES[products], of_gradient]]]
    assert sorted(map(sorted, operands)) == sorted(map(sorted, expected))
