"""Steps of the three families for 256 chips: what the compiler makes of each axis of the mesh. Nothing runs."""

import functools

import pytest

from pretrainax.config import MeshConfig, UserError
from pretrainax.planning.compiled import compile_step
from pretrainax.planning.topologies import Topology
from tests.support import tiny

pytestmark = [pytest.mark.aot, pytest.mark.slow]  # half a minute for each of the four programs

LAYERS, WIDTH, LENGTH, ROWS = 2, 4096, 256, 64
MESHES = {
    "tensor": ("v5e:16x16", MeshConfig(data=2, fsdp=32, tensor=4)),
    "sequence": ("v5p:4x8x8", MeshConfig(data=2, fsdp=32, sequence=4)),
}


@functools.cache
def compiled(family, mesh):
    """Two layers, 32 heads of 128, a row for each part of the batch; `fsdp` cuts the width into parts of 128, the lanes
    of a TPU. (Of embeddings whose parts are narrower its compiler sums the whole on each device, and keeps a part.)"""
    topology, sizes = MESHES[mesh]
    experiment = tiny.get_config(family)
    for name, value in dict(
        num_layers=LAYERS, d_model=WIDTH, d_ff=2 * WIDTH, num_heads=32, head_dim=128, vocab_size=8192
    ).items():
        setattr(experiment.model, name, value)
    experiment.data.sequence_length, experiment.mesh = LENGTH, sizes
    experiment.train.global_batch_size, experiment.train.dtype, experiment.train.scan_unroll = ROWS, "bfloat16", 1
    if family != "t5":
        experiment.model.position.max_length = LENGTH
    try:
        return compile_step(experiment, Topology.parse(topology))
    except UserError as e:
        pytest.skip(str(e))


def found(family, mesh, axis, kind, where=""):
    """Those along an axis, alone or with others, whose module has `where` in its name."""
    return [x for x in compiled(family, mesh).collectives if axis in x.axis and x.kind == kind and where in x.where]


# --- fsdp -----------------------------------------------------------------------------------------------------------

# Every family, and every axis with one side and with two
COMPILED = (("bert", "tensor"), ("gpt", "sequence"), ("t5", "tensor"), ("t5", "sequence"))


@pytest.mark.parametrize(("family", "mesh"), COMPILED)
def test_parameters_are_gathered_and_their_gradients_scattered_as_they_are_summed(family, mesh):
    assert found(family, mesh, "fsdp", "all-gather", "blocks/mlp") and found(family, mesh, "fsdp", "reduce-scatter")


@pytest.mark.parametrize(("family", "mesh"), COMPILED)
def test_no_matrix_is_summed_whole_on_each_device(family, mesh):
    smallest = 4 * WIDTH * WIDTH // MESHES[mesh][1].tensor  # bytes of a projection of attention
    # What is copied, and so summed whole, are norms and biases: some 20 vectors a layer.
    assert sum(x.bytes for x in found(family, mesh, "fsdp", "all-reduce")) < smallest


# --- tensor ---------------------------------------------------------------------------------------------------------


def test_a_block_has_a_pair_of_sums_over_tensor_each_way():
    activation = 2 * WIDTH * LENGTH * ROWS // 64  # bytes of one device's, bfloat16
    sent = 2 * activation * 3 // 4  # each of 4 devices, around a ring
    sums = found("bert", "tensor", "tensor", "all-reduce", "blocks")
    assert sum(x.total for x in sums if x.bytes > 100) == 2 * 2 * LAYERS * sent  # but for scalars: squares of gradients


def test_a_decoder_that_reads_another_text_has_three_sums_each_way_and_one_for_what_it_reads():
    lengths = [tiny.get_config("t5").objective.lengths(LENGTH)]
    of = lambda length: 2 * (2 * WIDTH * length * ROWS // 64) * 3 // 4  # noqa: E731
    sums = found("t5", "tensor", "tensor", "all-reduce", "blocks")
    # Gradients of keys and of values are added, then summed.
    expected = LAYERS * (4 * of(LENGTH) + 6 * of(lengths[0].targets) + of(LENGTH))
    assert sum(x.total for x in sums if x.bytes > 100) == expected


# --- sequence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ("gpt", "t5"))
def test_in_a_layer_keys_and_values_alone_move_along_the_length(family):
    moved = [
        x
        for kind in ("all-gather", "collective-permute", "all-to-all", "reduce-scatter")
        for x in found(family, "sequence", "sequence", kind)
        if x.bytes > 4 * LENGTH * ROWS  # segment ids
    ]
    assert any("attention" in x.where for x in moved)
    # The others run once or twice a step: T5's bias of all layers, what is predicted, a length that 4 does not divide.
    assert all("attention" in x.where or ("blocks" not in x.where and x.count <= 2) for x in moved)
