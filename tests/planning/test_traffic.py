"""Tests the communication between devices by hand for a tiny decoder: 2 layers, width 32, feed-forward 64, 4 heads."""

import pytest

from pretrainax.config import MixtureOfExperts
from pretrainax.data.batch import lengths_of
from pretrainax.planning.activations import shapes_of
from pretrainax.planning.topologies import Topology
from pretrainax.planning.traffic import Collective, collectives
from pretrainax.sharding.mesh import AXES
from tests.support import tiny

ONE = dict.fromkeys(AXES, 1)
D, F, LAYERS, VOCABULARY, LENGTH = 32, 64, 2, 512, 32
MATRICES = 4 * D * D + 2 * D * F  # numbers of the matrices of one layer


def total(found, axis, kind, where=""):
    return sum(c.total for c in found if (c.axis, c.kind) == (axis, kind) and where in c.where)


def test_one_device_sends_nothing():
    assert collectives(tiny.get_config("gpt"), ONE) == []


def test_fsdp_gathers_matrices_twice_in_bfloat16_and_scatters_their_gradients_once_in_float32():
    found = collectives(tiny.get_config("gpt"), ONE | {"fsdp": 4})
    assert total(found, "fsdp", "all-gather", "blocks") == 2 * LAYERS * 2 * MATRICES * 3 // 4
    assert total(found, "fsdp", "reduce-scatter", "blocks") == LAYERS * 4 * MATRICES * 3 // 4


def test_fsdp_reduces_no_matrix_whole():
    found = collectives(tiny.get_config("gpt"), ONE | {"fsdp": 4})
    vectors = LAYERS * (4 * D + F + D + 4 * D)  # Biases and norms are replicated.
    assert total(found, "fsdp", "all-reduce", "blocks") == pytest.approx(2 * 4 * vectors * 3 / 4, abs=LAYERS)


@pytest.mark.parametrize("flat, torus, chips", [("v6e:8x8", "v5p:4x4x4", 64), ("v6e:8x32", "v6e:16x16", 256)])
def test_around_a_torus_gathers_of_a_whole_slice_are_sums(flat, torus, chips):
    experiment, sizes = tiny.get_config("gpt"), ONE | {"fsdp": chips}
    experiment.train.global_batch_size = experiment.model.d_model = experiment.model.d_ff = chips
    plain, summed = (collectives(experiment, sizes, Topology.parse(name)) for name in (flat, torus))
    assert plain == collectives(experiment, sizes)
    assert {c.kind for c in summed} == {"all-reduce"}
    both = ("all-gather", "reduce-scatter")
    assert [c.total for c in summed] == [c.total * (2 if c.kind in both else 1) for c in plain]
    half = ONE | {"data": 2, "fsdp": chips // 2}
    assert collectives(experiment, half, Topology.parse(torus)) == collectives(experiment, half)


def test_remat_gathers_once_more():
    experiment = tiny.get_config("gpt")
    before = total(collectives(experiment, ONE | {"fsdp": 4}), "fsdp", "all-gather", "blocks")
    experiment.train.remat = "block"
    assert total(collectives(experiment, ONE | {"fsdp": 4}), "fsdp", "all-gather", "blocks") == before * 3 // 2


def test_data_reduces_every_gradient():
    found = collectives(tiny.get_config("gpt"), ONE | {"data": 4})
    numbers = LAYERS * (MATRICES + 4 * D + F + D + 4 * D) + (VOCABULARY + 64) * D + 2 * D
    # The bytes are rounded for each module.
    assert sum(c.total for c in found) == pytest.approx(2 * 4 * numbers * 3 / 4, rel=1e-3)


def test_tensor_sums_the_stream_after_both_sublayers_and_back():
    found = collectives(tiny.get_config("gpt"), ONE | {"tensor": 2})
    stream = 8 * LENGTH * D * 2  # bytes of [B, T, D] in bfloat16
    assert total(found, "tensor", "all-reduce", "blocks") == 4 * LAYERS * stream  # 2 (n - 1) / n = 1


def test_parallel_sublayers_share_the_sum_of_the_gradient_of_their_input():
    experiment = tiny.get_config("gpt")
    experiment.model.parallel = True
    found = collectives(experiment, ONE | {"tensor": 2})
    # Two layers of width 512, compiled for v5e:2x2 with tensor=4, also send 3 times these bytes per layer (2026-11-29).
    assert total(found, "tensor", "all-reduce", "blocks") == 3 * LAYERS * (8 * LENGTH * D * 2)


def test_sequence_gathers_keys_and_values():
    found = collectives(tiny.get_config("gpt"), ONE | {"sequence": 2})
    both = 2 * 8 * LENGTH * D * 2
    assert total(found, "sequence", "all-gather") == 2 * LAYERS * both // 2
    assert total(found, "sequence", "reduce-scatter") == LAYERS * both // 2


def test_a_pipeline_permutes_the_stream_of_a_part_at_each_tick_and_back():
    found = collectives(tiny.get_config("gpt"), ONE | {"pipeline": 2, "data": 2})
    part = LENGTH * D * 2  # This is one row. 4 rows pass through a pipeline.
    assert total(found, "pipeline", "collective-permute") == 2 * (4 + 2 - 1) * part
    assert total(found, "pipeline", "all-gather") == total(found, "pipeline", "reduce-scatter") == 2 * 4 * part // 2


def test_parts_that_go_back_one_by_one_come_in_and_out_one_by_one_too():
    experiment = tiny.get_config("gpt")
    experiment.train.pipeline_schedule = "1f1b"
    found = collectives(experiment, ONE | {"pipeline": 2, "data": 2})
    part, ticks = LENGTH * D * 2, 4 + 2 - 1
    assert total(found, "pipeline", "collective-permute") == 2 * ticks * part
    assert (
        total(found, "pipeline", "all-reduce") == 2 * ticks * part
    )  # embeddings and their gradients; 2 (n - 1) / n = 1
    assert total(found, "pipeline", "all-gather") == total(found, "pipeline", "reduce-scatter") == 4 * part // 2
    stream = 4 * LENGTH * D * 2
    tensor = total(collectives(experiment, ONE | {"pipeline": 2, "tensor": 2}), "tensor", "all-reduce", "blocks")
    assert tensor == 6 * LAYERS * stream * 9 // 8  # forward, recomputed forward, backward


def test_a_stage_has_gradients_of_its_layers_alone_and_all_stages_those_of_what_is_around():
    found = collectives(tiny.get_config("gpt"), ONE | {"pipeline": 2, "data": 2})
    of_stage = LAYERS // 2 * (MATRICES + 4 * D + F + D + 4 * D)
    assert total(found, "data", "all-reduce") == pytest.approx(4 * of_stage, rel=1e-3)  # 2 (n - 1) / n = 1
    around = (VOCABULARY + 64) * D + 2 * D
    assert total(found, "data+pipeline", "all-reduce") == pytest.approx(2 * 4 * around * 3 / 4, rel=1e-3)


def test_a_stage_gathers_its_layers_once_in_float32():
    found = [c for c in collectives(tiny.get_config("gpt"), ONE | {"pipeline": 2, "fsdp": 2}) if "blocks" in c.where]
    assert total(found, "fsdp", "all-gather") == LAYERS // 2 * 4 * MATRICES // 2
    assert total(found, "fsdp", "reduce-scatter") == LAYERS // 2 * 4 * MATRICES // 2
    # They do not overlap with computation.
    assert {c.overlapping for c in found if c.kind in ("all-gather", "reduce-scatter")} == {0}


def test_in_a_pipeline_tensor_sums_what_nobody_reads_too():
    found = collectives(tiny.get_config("gpt"), ONE | {"pipeline": 2, "tensor": 2})
    stream = 4 * LENGTH * D * 2  # bytes of the rows of a device in bfloat16
    assert total(found, "tensor", "all-reduce", "blocks") == 4 * LAYERS * stream * 9 // 8  # 8 microbatches in 9 ticks


def test_each_micro_batch_sends_again():
    experiment = tiny.get_config("gpt")
    once = total(collectives(experiment, ONE | {"fsdp": 4}), "fsdp", "all-gather")
    experiment.train.accumulate = 2
    assert total(collectives(experiment, ONE | {"fsdp": 4}), "fsdp", "all-gather") == 2 * once


def test_between_slices_goes_a_share_of_the_gradients_alone():
    experiment = tiny.get_config("gpt")
    experiment.mesh.slices = 2
    found = collectives(experiment, ONE | {"data": 4})
    within, between = (total(found, axis, "all-reduce") for axis in ("data", "slices"))
    # An all-reduce within a slice sends 2 (n - 1) / n of V with n = 2. Between two slices, it sends as much of the
    # half that a device has summed.
    assert between == pytest.approx(within / 2, rel=1e-3)


def test_an_encoder_decoder_has_a_third_sum_in_the_decoder():
    experiment = tiny.get_config("t5")
    lengths = lengths_of(shapes_of(experiment))
    found = collectives(experiment, ONE | {"tensor": 2})
    sums = {c.where: (c.count, c.bytes) for c in found if c.axis == "tensor"}
    stream = lambda length: 8 * length * D * 2  # noqa: E731
    assert sums == {  # tests/planning/test_scale.py tests these sums in a compiled step.
        "encoder/blocks": (2 * 2 * LAYERS, stream(lengths.inputs)),
        "decoder/blocks": (3 * 2 * LAYERS, stream(lengths.targets)),
        "decoder/blocks/cross_attention": (LAYERS, stream(lengths.inputs)),  # the gradient of the encoder's output
    }


def test_of_stacks_of_two_sizes_each_sends_its_own():
    experiment = tiny.get_config("t5_narrow")
    lengths = lengths_of(shapes_of(experiment))
    tensor, sequence = (collectives(experiment, ONE | {axis: 2}) for axis in ("tensor", "sequence"))
    for stack, length, width, layers, sublayers in (
        ("encoder", lengths.inputs, D, LAYERS, 2),
        ("decoder", lengths.targets, 24, 3, 3),
    ):
        stream = 8 * length * width * 2  # bytes of [B, T, D] in bfloat16
        sums = [c.total for c in tensor if (c.axis, c.where) == ("tensor", f"{stack}/blocks")]
        assert sums == [2 * sublayers * layers * stream]
        kept = width if stack == "encoder" else 4 * 4  # The decoder has 4 key heads of width 4.
        # Cross-attention of the decoder also reads the encoder's tokens.
        tokens = length + (lengths.inputs if stack == "decoder" else 0)
        assert total(sequence, "sequence", "reduce-scatter", stack) == layers * (2 * 8 * tokens * kept * 2) // 2


def test_a_feed_forward_behind_experts_has_a_sum_of_its_own():
    experiment = tiny.get_config("t5")
    experiment.model.num_layers = 4
    experiment.model.experts = MixtureOfExperts(num_experts=2, every=2, dense_after=64)
    found = collectives(experiment, ONE | {"tensor": 2})
    counts = {c.where: c.count for c in found if c.axis == "tensor"}
    # Two layers of each stack have this feed-forward.
    assert counts == {
        "encoder/blocks": 2 * (2 * 4 + 2),
        "decoder/blocks": 2 * (3 * 4 + 2),
        "decoder/blocks/cross_attention": 4,
    }


def test_the_total_is_bytes_times_runs():
    assert Collective("fsdp", "all-gather", 3, 4, "decoder/blocks").total == 12
