"""Tests that the state of any optimizer is sharded like its parameters."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from pretrainax.config import MeshConfig
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.optimizer_state import Placed, opt_state_shardings, opt_state_specs, replicated_bytes
from tests.support import tables


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


UP = {"decoder": {"blocks": {"mlp": {"up": {"kernel": shape(2, 8, 16)}}}}}


def keeping(*sizes):
    """Returns an optimizer whose state is an array of this shape for each parameter."""

    def init(params):
        return {"kept": jax.tree.map(lambda _: jnp.zeros(sizes), params)}

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


@pytest.mark.parametrize("preset", tables.OPTIMIZED)
@pytest.mark.parametrize("name", tables.OPTIMIZERS)
def test_specs_of_a_state_are_the_golden_ones(name, preset):
    assert tables.state_specs(preset, name) == tables.path(name, preset).read_text()


@pytest.mark.parametrize(
    "sizes, spec",
    [
        ((2, 8, 16), P("pipeline", ("fsdp", "expert"), "tensor")),  # a moment
        ((2, 8), P("pipeline", ("fsdp", "expert"))),  # a mean over d_ff
        ((2, 16), P("pipeline", "tensor")),  # a mean over d_model
        ((2,), P("pipeline")),  # one number per layer
        ((), P()),
        ((1,), P()),
    ],
)
def test_an_array_is_split_like_the_axes_that_are_left(sizes, spec):
    assert jax.tree.leaves(opt_state_specs(keeping(*sizes), UP)) == [spec]


def test_of_axes_of_one_size_the_first_are_left():
    bias = {"blocks": {"self_attention": {"query": {"bias": shape(8, 8, 16)}}}}
    assert jax.tree.leaves(opt_state_specs(keeping(8, 16), bias)) == [P("pipeline", None)]


@pytest.mark.parametrize(
    "path, sizes, kept, spec",
    [
        ("query", (2, 8, 4, 16), (2, 64), P("pipeline", "tensor")),  # merged heads: a mean over d_model
        ("query", (2, 8, 4, 16), (2, 8, 64), P("pipeline", ("fsdp", "expert"), "tensor")),
        ("out", (2, 4, 16, 8), (2, 64), P("pipeline", "tensor")),
        ("out", (2, 4, 16, 8), (2, 1), P("pipeline", None)),  # one placeholder per layer
    ],
)
def test_heads_side_by_side_are_split_like_the_heads(path, sizes, kept, spec):
    kernel = {"decoder": {"blocks": {"self_attention": {path: {"kernel": shape(*sizes)}}}}}
    assert jax.tree.leaves(opt_state_specs(keeping(*kept), kernel)) == [spec]


def factors(placed):
    """Returns an optimizer that stores [L, D, D] for a matrix [L, D, F], as Shampoo does."""

    def factor(kernel):
        array = jnp.zeros((*kernel.shape[:2], kernel.shape[1]))
        return Placed(array, ("layers", "d_model", None)) if placed else array

    return optax.GradientTransformation(lambda params: jax.tree.map(factor, params), None)


def test_an_array_of_another_shape_is_replicated_unless_it_names_its_axes():
    square = {"decoder": {"blocks": {"mlp": {"up": {"kernel": shape(2, 8, 16)}}}}}
    assert jax.tree.leaves(opt_state_specs(factors(placed=False), square)) == [P()]
    assert jax.tree.leaves(opt_state_specs(factors(placed=True), square)) == [P("pipeline", ("fsdp", "expert"), None)]
    assert [replicated_bytes(factors(placed), square) for placed in (False, True)] == [4 * 2 * 8 * 8, 0]
    assert replicated_bytes(optax.adamw(1e-3), square) == 0


def test_a_masked_parameter_has_no_part():
    params = {"blocks": {"mlp": {"up": {"kernel": shape(2, 8, 16), "bias": shape(2, 16)}}}}
    masked = optax.masked(optax.scale_by_adam(), {"blocks": {"mlp": {"up": {"kernel": True, "bias": False}}}})
    assert jax.tree.leaves(opt_state_specs(masked, params)) == [P(), *2 * [P("pipeline", ("fsdp", "expert"), "tensor")]]


def test_axes_of_the_mesh_of_size_one_are_left_out():
    mesh = make_mesh(MeshConfig(data=4, fsdp=2))
    assert [s.spec for s in jax.tree.leaves(opt_state_shardings(mesh, keeping(2, 16), UP))] == [P()]
