import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pretrainax.config import Experiment, MeshConfig, ModelConfig, TrainConfig, UserError
from pretrainax.optim.optimizers import AdamW
from pretrainax.optim.schedules import WarmupConstant
from pretrainax.sharding.arrays import check_mesh, put_batch
from pretrainax.sharding.mesh import batch_share, make_mesh, mesh_sizes
from pretrainax.sharding.optimizer_state import opt_state_specs
from pretrainax.sharding.rules import param_specs, tree_shardings
from tests.support import tables


def mesh(**sizes):
    return make_mesh(MeshConfig(**sizes))


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def experiment(**train):
    parts = dict.fromkeys(("tokenizer", "data", "objective", "optimizer", "schedule"))
    return Experiment(**parts, model=ModelConfig(), train=TrainConfig(**train))


# --- the mesh (8 CPU devices) --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ({}, (8, 1, 1, 1, 1, 1)),
        ({"fsdp": 4}, (2, 1, 4, 1, 1, 1)),
        ({"data": 1, "fsdp": -1, "tensor": 2}, (1, 1, 4, 1, 1, 2)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 1, 2, 1, 1, 2)),
        ({"expert": 4, "tensor": 2}, (1, 1, 1, 4, 1, 2)),
        ({"sequence": 4}, (2, 1, 1, 1, 4, 1)),
        ({"pipeline": 4}, (2, 4, 1, 1, 1, 1)),
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
        (
            {"fsdp": -1},
            "config.mesh.data=-1, .* config.mesh.fsdp=-1, .* at most one of them is -1",
        ),
        ({"fsdp": 0}, "config.mesh.fsdp=0, .* sizes are at least 1"),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_named(sizes, message):
    with pytest.raises(UserError, match=message):
        mesh(**sizes)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device with the fields that the mesh reads."""

    id: int
    process_index: int
    slice_index: int = 0
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "a chip"


def chips(count, in_a_process, in_a_slice):
    """Returns the chips of slices, in which the chips form a row."""
    return [Chip(i, i // in_a_process, i // in_a_slice, (i % in_a_slice, 0, 0)) for i in range(count)]


def test_data_alone_crosses_slices():
    devices = chips(16, in_a_process=4, in_a_slice=8)
    devices = devices[1::2] + devices[::2]  # The order of devices does not matter.
    array = make_mesh(MeshConfig(fsdp=2, tensor=2, slices=2), devices).devices
    assert array.shape == (4, 1, 2, 1, 1, 2)
    assert [{chip.slice_index for chip in part.flat} for part in array] == [{0}, {0}, {1}, {1}]


def test_devices_that_know_no_slices_are_cut_in_ranges():
    devices = [dataclasses.replace(chip, platform="gpu") for chip in chips(8, in_a_process=4, in_a_slice=1)]
    array = make_mesh(MeshConfig(fsdp=4, slices=2), devices).devices
    assert [sorted(chip.id for chip in part.flat) for part in array] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"slices": 1}, "config.mesh.slices is 1, and the devices are of 2 slices"),
        ({"slices": 2, "data": 1, "fsdp": 8}, "config.mesh.data must be a multiple of config.mesh.slices 2"),
    ],
)
def test_slices_that_do_not_fit_the_devices_are_named(sizes, message):
    with pytest.raises(UserError, match=message):
        make_mesh(MeshConfig(**sizes), chips(8, in_a_process=4, in_a_slice=4))


def test_no_row_is_of_two_processes():
    # Neighbouring devices belong to different hosts, so both hosts would read a row of two devices.
    devices = [dataclasses.replace(chip, process_index=chip.id % 2) for chip in chips(8, 8, 8)]
    array = make_mesh(MeshConfig(tensor=2), devices).devices
    assert all(len({chip.process_index for chip in row.flat}) == 1 for row in array)


@pytest.mark.parametrize(
    "sizes, in_a_process, shares",
    [
        ({"data": 8}, 4, [(0, 2, (0, 1, 2, 3)), (1, 2, (4, 5, 6, 7))]),
        ({"data": 2, "sequence": 4}, 4, [(0, 2, (0,)), (1, 2, (1,))]),
        ({"data": 2, "sequence": 4}, 2, [(0, 2, (0,)), (0, 2, (0,)), (1, 2, (1,)), (1, 2, (1,))]),
        ({"data": 1, "sequence": 2, "tensor": 4}, 4, [(0, 1, (0,)), (0, 1, (0,))]),
        ({"data": 1, "fsdp": 4, "tensor": 2}, 1, [(i // 2, 4, (i // 2,)) for i in range(8)]),
    ],
)
def test_processes_whose_devices_share_rows_read_the_same_ones(sizes, in_a_process, shares):
    made = make_mesh(MeshConfig(**sizes), chips(8, in_a_process, in_a_slice=8))
    assert [tuple(batch_share(made, process)) for process in range(8 // in_a_process)] == shares


def test_a_row_that_would_be_of_parts_of_two_processes_is_refused():
    with pytest.raises(UserError, match="tensor is 6, it must divide the 4 devices of a process, or be a multiple"):
        mesh_sizes(MeshConfig(data=2, tensor=6), 12, processes=3)


# --- the table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", tables.PRESETS)
def test_spec_of_every_parameter_is_the_golden_one(preset):
    assert tables.specs(preset) == tables.path("sharding", preset).read_text()


def test_moments_lie_where_their_parameter_lies_and_counters_are_copied():
    params = {"decoder": {"blocks": {"mlp": {"up": {"kernel": shape(2, 8, 16)}}}}}
    optimizer = AdamW().build(WarmupConstant().build(1.0, 10), params)
    specs = jax.tree.leaves(opt_state_specs(optimizer, params))
    assert specs == [
        P(),
        P("pipeline", ("fsdp", "expert"), "tensor"),
        P("pipeline", ("fsdp", "expert"), "tensor"),
    ]  # count, mu, nu


def test_a_parameter_the_table_does_not_know_is_an_error():
    with pytest.raises(ValueError, match="no row of PARTITION_RULES matches blocks/gate/alpha"):
        param_specs({"blocks": {"gate": {"alpha": shape(2)}}})


def test_a_parameter_of_another_rank_than_its_row_is_an_error():
    with pytest.raises(
        ValueError,
        match=r"blocks/mlp/up/kernel has shape \(8, 16\), its row of PARTITION_RULES has axes 'layers d_model d_ff'",
    ):
        param_specs({"blocks": {"mlp": {"up": {"kernel": shape(8, 16)}}}})


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
            ("blocks", "mlp_after", "up", "kernel"),
            (2, 8, 18),
            r"config.model.experts.dense_after 18 is not a multiple of config.mesh.tensor 4",
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
        tree_shardings(mesh(data=1, fsdp=2, tensor=4), tree)


# --- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, accumulate", [(12, 1), (8, 2)])
def test_a_batch_that_the_mesh_does_not_divide_is_named(rows, accumulate):
    message = f"config.train.global_batch_size {rows} is not a multiple of {8 * accumulate}: .*accumulate {accumulate} "
    with pytest.raises(UserError, match=message):
        check_mesh(experiment(global_batch_size=rows, accumulate=accumulate), mesh(data=4, fsdp=2))


def test_a_batch_need_not_divide_by_the_tensor_axis():
    check_mesh(experiment(global_batch_size=2), mesh(data=2, tensor=4))


def test_the_length_of_a_batch_is_split_where_it_divides():
    lengths = {"tokens": 8, "masked_positions": 3}
    batch = {name: np.arange(8 * n, dtype=np.int32).reshape(8, n) for name, n in lengths.items()}
    batch |= {"pair_labels": np.arange(8, dtype=np.int32)}
    arrays = put_batch(batch, mesh(data=2, sequence=4))
    parts = {name: {s.data.shape for s in x.addressable_shards} for name, x in arrays.items()}
    assert parts == {"tokens": {(4, 2)}, "masked_positions": {(4, 3)}, "pair_labels": {(4,)}}
    chex.assert_trees_all_equal(arrays, batch)


def test_rows_of_a_batch_are_spread_over_data_and_fsdp():
    rows = np.arange(16, dtype=np.int32).reshape(8, 2)
    array = put_batch({"tokens": rows}, mesh(data=2, fsdp=2, tensor=2))["tokens"]
    assert {s.data.shape for s in array.addressable_shards} == {(2, 2)}
    chex.assert_trees_all_equal(array, rows)
