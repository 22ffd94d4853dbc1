"""Tests steps of the three families compiled for 256 chips: the collectives along each mesh axis. Nothing runs."""

import functools

import pytest

from pretrainax.config import MeshConfig, UserError
from pretrainax.planning.compiled import compile_step
from pretrainax.planning.topologies import Topology
from tests.support import tiny

pytestmark = [pytest.mark.aot, pytest.mark.slow]  # Each of the four programs takes half a minute.

LAYERS, WIDTH, LENGTH, ROWS = 2, 4096, 256, 64
MESHES = {
    "tensor": ("v5e:16x16", MeshConfig(data=2, fsdp=32, tensor=4)),
    "sequence": ("v5p:4x8x8", MeshConfig(data=2, fsdp=32, sequence=4)),
}


@functools.cache
def compiled(family, mesh):
    """Compiles two layers with 32 heads of 128, and one row for each part of the batch.

    `fsdp` splits the width into parts of 128, the lanes of a TPU. For embeddings with narrower parts, the TPU's
    compiler would sum the whole array on each device and keep a part of it.
    """
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
    """Returns the collectives along an axis, alone or with other axes, whose module has `where` in its name."""
    return [x for x in compiled(family, mesh).collectives if axis in x.axis and x.kind == kind and where in x.where]


# --- fsdp -----------------------------------------------------------------------------------------------------------

# Every family, and every axis with one stack and with two stacks
COMPILED = (("bert", "tensor"), ("gpt", "sequence"), ("t5", "tensor"), ("t5", "sequence"))


@pytest.mark.parametrize(("family", "mesh"), COMPILED)
def test_parameters_are_gathered_and_their_gradients_scattered_as_they_are_summed(family, mesh):
    assert found(family, mesh, "fsdp", "all-gather", "blocks/mlp") and found(family, mesh, "fsdp", "reduce-scatter")


@pytest.mark.parametrize(("family", "mesh"), COMPILED)
def test_no_matrix_is_summed_whole_on_each_device(family, mesh):
    smallest = 4 * WIDTH * WIDTH // MESHES[mesh][1].tensor  # bytes of a projection of attention
    # Norms and biases are replicated, so devices sum them whole. A layer has about 20 such vectors.
    assert sum(x.bytes for x in found(family, mesh, "fsdp", "all-reduce")) < smallest


# --- tensor ---------------------------------------------------------------------------------------------------------


def test_a_block_has_a_pair_of_sums_over_tensor_each_way():
    activation = 2 * WIDTH * LENGTH * ROWS // 64  # bytes of a bfloat16 activation on one device
    sent = 2 * activation * 3 // 4  # The ring all-reduce of 4 devices sends 3/4 of the array twice.
    sums = found("bert", "tensor", "tensor", "all-reduce", "blocks")
    # excluding scalars, such as squared norms of gradients
    assert sum(x.total for x in sums if x.bytes > 100) == 2 * 2 * LAYERS * sent


def test_a_decoder_that_reads_another_text_has_three_sums_each_way_and_one_for_what_it_reads():
    lengths = [tiny.get_config("t5").objective.lengths(LENGTH)]
    of = lambda length: 2 * (2 * WIDTH * length * ROWS // 64) * 3 // 4  # noqa: E731
    sums = found("t5", "tensor", "tensor", "all-reduce", "blocks")
    # The gradients from keys and from values are added before the all-reduce.
    expected = LAYERS * (4 * of(LENGTH) + 6 * of(lengths[0].targets) + of(LENGTH))
    assert sum(x.total for x in sums if x.bytes > 100) == expected


# --- sequence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ("gpt", "t5"))
def test_in_a_layer_keys_and_values_alone_move_along_the_length(family):
    moved = [
        x
        for kind in ("all-gather", "collective-permute", "all-to-all", "reduce-scatter")
        for x in found(family, "sequence", "sequence", kind)
        if x.bytes > 4 * LENGTH * ROWS  # excludes segment ids
    ]
    assert any("attention" in x.where for x in moved)
    # The other collectives run once or twice per step: T5's bias for all layers, predicted positions, and a length that
    # 4 does not divide.
    assert all("attention" in x.where or ("blocks" not in x.where and x.count <= 2) for x in moved)
