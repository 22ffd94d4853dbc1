"""Optimizers of whole matrices on 8 fake CPU devices, compared with one device, and their communication."""

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from pretrainax import models  # noqa: F401 (adds rows to PARTITION_RULES)
from pretrainax.config import MeshConfig
from pretrainax.optim import Muon, WarmupConstant
from pretrainax.planning.hlo import Program, collectives_of
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import tree_shardings
from tests.support.tiers import few

D, H, K, F = 16, 8, 2, 32
MESHES = {
    "data": {"data": 8},
    "fsdp": {"data": 1, "fsdp": 8},
    "tensor": {"data": 1, "fsdp": 2, "tensor": 4},
    "sequence": {"data": 2, "fsdp": 2, "sequence": 2},
    "pipeline": {"data": 1, "pipeline": 2, "fsdp": 4},
    "expert": {"data": 1, "expert": 2, "fsdp": 2, "tensor": 2},
}


def tree(layers: int) -> PyTree:
    rng = np.random.default_rng(0)
    kernel = lambda *shape: {"kernel": rng.normal(size=(layers, *shape)).astype(np.float32)}  # noqa: E731
    attention = {name: kernel(D, H, K) for name in ("query", "key", "value")} | {"out": kernel(H, K, D)}
    dense = {"up": kernel(D, F), "down": kernel(F, D)}
    experts = {"router": kernel(D, 2), "experts_up": kernel(2, D, F), "experts_down": kernel(2, F, D)}
    norm = {"scale": rng.normal(size=(layers, D)).astype(np.float32)}
    blocks = {"self_attention": attention, "mlp": experts, "mlp_norm": norm}
    return {"decoder": {"blocks": blocks, "dense": {"blocks": {"mlp": dense}}}}


def lowered(optimizer: Muon, params: PyTree, mesh_name: str):
    """Returns the mesh, the jitted update from gradients to updates, and the gradients on the mesh."""
    mesh = make_mesh(MeshConfig(**MESHES[mesh_name])) if mesh_name else make_mesh(MeshConfig(), jax.devices()[:1])
    built = optimizer.build(WarmupConstant(0).build(1.0, 10), params)
    shardings = tree_shardings(mesh, params)

    def update(gradients):
        return built.update(gradients, built.init(gradients), gradients, step=jnp.int32(0))[0]

    return mesh, jax.jit(update, out_shardings=shardings), jax.device_put(params, shardings)


@functools.cache
def updates(layers: int, split_heads: bool, mesh_name: str) -> PyTree:
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, tree(layers))
        mesh, update, gradients = lowered(Muon(split_heads=split_heads), params, mesh_name)
        with jax.set_mesh(mesh):
            return jax.device_get(update(gradients))


CASES = [
    (name, layers, split_heads)
    for name in MESHES
    for layers in ((4,) if name == "pipeline" else (3, 5))
    for split_heads in (False, True)
]


@pytest.mark.parametrize(
    "mesh_name, layers, split_heads",
    few(CASES, [("data", 3, False), ("fsdp", 5, False), ("tensor", 3, True), ("pipeline", 4, False)]),
)
def test_updates_on_eight_devices_are_those_of_one(mesh_name, layers, split_heads):
    """Compares the updates in float64.

    The iteration multiplies the rounding errors of a small singular value by up to 3.4445^5 = 485. XLA uses different
    orders for products of few and of many matrices. In float32, the RMS of the differences reaches 1.5e-6 of the RMS of
    the update.
    """
    alone, sharded = (updates(layers, split_heads, name) for name in ("", mesh_name))
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(sharded), strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-12 * np.sqrt(np.mean(np.square(one))))


def products(jaxpr) -> float:
    """Returns the FLOPs of the matrix multiplications in a jaxpr; in a `shard_map`, the FLOPs of one device."""
    total = 0.0
    for eqn in jaxpr.eqns:
        total += eqn.params.get("length", 1) * sum(map(products, jaxprs_in_params(eqn.params)))
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
    return total


@pytest.mark.parametrize("mesh_name", ["", *MESHES])
def test_the_work_of_a_device_is_that_of_the_traced_update(mesh_name):
    params = tree(4 if mesh_name == "pipeline" else 3)
    mesh, update, gradients = lowered(Muon(), params, mesh_name)
    with jax.set_mesh(mesh):
        traced = products(jax.make_jaxpr(update)(gradients).jaxpr)
    assert sum(work.flops for work in Muon().matrix_work(params, mesh.shape)) == traced


@pytest.mark.parametrize("mesh_name", few(MESHES, ["fsdp", "tensor"]))
def test_nothing_is_sent_but_shards_of_matrices_before_and_after_the_iteration(mesh_name):
    layers, optimizer = 4 if mesh_name == "pipeline" else 3, Muon()
    params = tree(layers)
    mesh, update, gradients = lowered(optimizer, params, mesh_name)
    with jax.set_mesh(mesh):
        found = collectives_of(Program(update.lower(gradients).compile().as_text()), mesh)
    expected: Counter = Counter()
    for work in optimizer.matrix_work(params, mesh.shape):
        for transfer in work.stack.transfers(mesh.shape):
            devices = math.prod(mesh.shape[axis] for axis in transfer.axes)
            sent = 4 * transfer.elements * (devices - 1) // devices
            expected["+".join(transfer.axes), transfer.kind] += transfer.count * sent
    sent = Counter()
    for one in found:
        sent[one.axis, one.kind] += one.total
    assert sent == expected
