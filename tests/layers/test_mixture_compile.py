"""Compiles mixtures of experts for other TPUs and GPUs, and tests their communication and their kernels."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from pretrainax.config import MeshConfig, MixtureOfExperts, ModelConfig, UserError
from pretrainax.layers.feed_forward import Mixture
from pretrainax.planning.topologies import Topology
from pretrainax.sharding.arrays import batch_sharding
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.rules import tree_shardings

pytestmark = [pytest.mark.aot, pytest.mark.slow]

EXPERTS, WIDTH, INSIDE, TOKENS = 16, 512, 1024, 256  # TOKENS: tokens of each device


def compiled(topology: str, mesh: dict[str, int], capacity: float | None) -> str:
    """Returns the compiled program of a layer and its gradients."""
    try:
        devices = Topology.parse(topology).devices()
    except UserError as e:
        pytest.skip(str(e))
    settings = MixtureOfExperts(num_experts=EXPERTS, top_k=2, capacity=capacity)
    config = ModelConfig(d_model=WIDTH, d_ff=INSIDE, activation="silu", gated=True, experts=settings)
    mesh = make_mesh(MeshConfig(**{"data": 1} | mesh), devices)
    rows = math.prod(mesh.shape[axis] for axis in ("data", "fsdp", "expert"))
    x = jax.ShapeDtypeStruct((rows, TOKENS, WIDTH), jnp.bfloat16, sharding=batch_sharding(mesh, (rows, TOKENS, WIDTH)))

    def loss(params, x):
        y, sums = Mixture(config, name="mlp").apply({"params": params}, x)
        return jnp.sum(y.astype(jnp.float32) ** 2) + sums["balance_loss"][0]

    shapes = jax.eval_shape(lambda: Mixture(config).init(jax.random.key(0), jnp.zeros(x.shape, x.dtype)))["params"]
    stacked = {
        "decoder": {"blocks": {"mlp": jax.tree.map(lambda p: jax.ShapeDtypeStruct((1, *p.shape), p.dtype), shapes)}}
    }
    of_stack = tree_shardings(mesh, stacked)["decoder"]["blocks"]["mlp"]
    params = jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(
            p.shape, p.dtype, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*tuple(s.spec)[1:]))
        ),
        shapes,
        of_stack,
    )
    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile().as_text()


def count(program: str, kind: str) -> int:
    return len(re.findall(rf" {kind}(?:-start)?\(", program))


SMALL = (("v5e:4x4", {"expert": 16}), ("v6e:4x4", {"fsdp": 4, "expert": 4}))
# libtpu 0.0.42 cannot compile a ragged all-to-all for these topologies. For the first, it reports that its routing is
# limited; for the second, its message does not help. On these topologies, experts need a capacity.
LARGE = (("v5e:16x16", {"fsdp": 16, "expert": 16}), ("v5p:8x8x4", {"fsdp": 32, "expert": 8}))
ROOM, DROPLESS = (1.25, "all-to-all"), (None, "ragged-all-to-all")


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, mesh, capacity, kind",
    [(*of_slice, *way) for way in (ROOM, DROPLESS) for of_slice in SMALL] + [(*x, *ROOM) for x in LARGE],
    ids=str,
)
def test_tokens_go_there_and_back_by_two_all_to_alls_each_way_and_experts_stay(topology, mesh, capacity, kind):
    program = compiled(topology, mesh, capacity)
    assert count(program, kind) == 4
    assert count(program, "all-to-all") + count(program, "ragged-all-to-all") == 4
    of_all = rf"\[{EXPERTS},({WIDTH},{INSIDE}|{INSIDE},{WIDTH})\]"
    assert not re.search(of_all, program), "the matrices of all experts are on one device"


@pytest.mark.parametrize(
    "topology, mesh", [("h100:1", {}), ("h100:8", {"fsdp": 2, "tensor": 2, "expert": 2})], ids=["one", "eight"]
)
def test_a_gpu_multiplies_by_all_experts_in_one_kernel(topology, mesh):
    """Tests that the forward's three products and their gradients for rows and matrices are kernels and not loops."""
    program = compiled(topology, mesh, capacity=None)
    kernels = re.findall(r'custom-call\(.*custom_call_target="__gpu\$xla.gpu.triton".*op_name="([^"]*)"', program)
    names = [re.search(r"(grouped_matmul\w*)", name)[1] for name in kernels]
    assert sorted(names) == ["grouped_matmul"] * 6 + ["grouped_matmul_of_rows"] * 3
    loops = re.findall(r" while\(.*", program)
    assert all("known_trip_count" in loop for loop in loops), "a loop over blocks of rows"
