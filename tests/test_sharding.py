import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tables
from jax.sharding import PartitionSpec as P

from pretrainax import sharding
from pretrainax.config import Experiment, MeshConfig, TrainConfig, UserError
from pretrainax.optim import AdamW, WarmupConstant


def mesh(**sizes):
    return sharding.make_mesh(MeshConfig(**sizes))


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def experiment(**train):
    parts = dict.fromkeys(("model", "tokenizer", "data", "objective", "optimizer", "schedule"))
    return Experiment(**parts, train=TrainConfig(**train))


# --- the mesh (8 CPU devices) --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ({}, (8, 1, 1, 1)),
        ({"fsdp": 4}, (2, 4, 1, 1)),
        ({"data": 1, "fsdp": -1, "tensor": 2}, (1, 4, 1, 2)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 1, 2)),
    ],
)
def test_minus_one_takes_the_devices_that_are_left(sizes, expected):
    assert tuple(mesh(**sizes).shape.values()) == expected


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"data": 3}, "config.mesh.data=3, .* the product must be the number of devices, which is 8"),
        ({"tensor": 3}, "config.mesh.tensor=3: the product must be the number of devices, which is 8"),
        ({"tensor": 16}, "config.mesh.tensor=16: the product must be the number of devices, which is 8"),
        ({"fsdp": -1}, "config.mesh.data=-1, config.mesh.fsdp=-1, .* at most one of them is -1"),
        ({"fsdp": 0}, "config.mesh.fsdp=0, .* sizes are at least 1"),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_named(sizes, message):
    with pytest.raises(UserError, match=message):
        mesh(**sizes)


# --- the table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", tables.PRESETS)
def test_spec_of_every_parameter_is_the_golden_one(preset):
    assert tables.specs(preset) == tables.path("sharding", preset).read_text()


def test_moments_lie_where_their_parameter_lies_and_counters_are_copied():
    params = {"decoder": {"blocks": {"mlp": {"up": {"kernel": shape(2, 8, 16)}}}}}
    optimizer = AdamW().build(WarmupConstant().build(1.0, 10), params)
    specs = jax.tree.leaves(sharding.param_specs(jax.eval_shape(optimizer.init, params)))
    assert specs == [P(), P(None, "fsdp", "tensor"), P(None, "fsdp", "tensor")]  # count, mu, nu


def test_a_parameter_the_table_does_not_know_is_an_error():
    with pytest.raises(ValueError, match="no row of sharding.TABLE matches blocks/gate/alpha"):
        sharding.param_specs({"blocks": {"gate": {"alpha": shape(2)}}})


def test_a_parameter_of_another_rank_than_its_row_is_an_error():
    with pytest.raises(
        ValueError,
        match=r"blocks/mlp/up/kernel has shape \(8, 16\), its row of sharding.TABLE says 'layers d_model d_ff'",
    ):
        sharding.param_specs({"blocks": {"mlp": {"up": {"kernel": shape(8, 16)}}}})


@pytest.mark.parametrize(
    "path, sizes, message",
    [
        (
            ("blocks", "self_attention", "key", "kernel"),
            (2, 8, 2, 4),
            r"config.model.num_kv_heads 2 is not a multiple of config.mesh.tensor 4",
        ),
        (
            ("blocks", "self_attention", "query", "kernel"),
            (2, 8, 6, 4),
            r"config.model.num_heads 6 is not a multiple of config.mesh.tensor 4",
        ),
        (
            ("blocks", "mlp", "up", "kernel"),
            (2, 7, 16),
            r"config.model.d_model 7 is not a multiple of config.mesh.fsdp 2",
        ),
        (
            ("blocks", "mlp", "down", "kernel"),
            (2, 18, 8),
            r"config.model.d_ff 18 is not a multiple of config.mesh.tensor 4",
        ),
        (
            ("token_embedding", "embedding"),
            (50_257, 8),
            r"config.model.vocab_size 50257 is not a multiple of config.mesh.tensor 4 \(pad it to 50260\)",
        ),
    ],
)
def test_an_axis_that_the_mesh_does_not_divide_names_the_field(path, sizes, message):
    tree = shape(*sizes)
    for name in reversed(path):
        tree = {name: tree}
    with pytest.raises(UserError, match=message):
        sharding.shardings(mesh(data=1, fsdp=2, tensor=4), tree)


# --- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, accumulate", [(12, 1), (8, 2)])
def test_a_batch_that_the_mesh_does_not_divide_is_named(rows, accumulate):
    message = f"config.train.global_batch_size {rows} is not a multiple of {8 * accumulate}: .*accumulate {accumulate} "
    with pytest.raises(UserError, match=message):
        sharding.check_batch_divides(experiment(global_batch_size=rows, accumulate=accumulate), mesh(data=4, fsdp=2))


def test_a_batch_need_not_divide_by_the_tensor_axis():
    sharding.check_batch_divides(experiment(global_batch_size=2), mesh(data=2, tensor=4))


def test_rows_of_a_batch_are_spread_over_data_and_fsdp():
    rows = np.arange(16, dtype=np.int32).reshape(8, 2)
    array = sharding.put_batch({"tokens": rows}, mesh(data=2, fsdp=2, tensor=2))["tokens"]
    assert {s.data.shape for s in array.addressable_shards} == {(2, 2)}
    np.testing.assert_array_equal(array, rows)
