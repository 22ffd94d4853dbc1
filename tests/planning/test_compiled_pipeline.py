"""Tests the communication and the kernels of pipelines compiled for 256 TPUs and GPUs that this machine lacks."""

import itertools

import pytest

from pretrainax.config import LearnedPositions, UserError
from pretrainax.planning.compiled import compile_step
from pretrainax.planning.topologies import Topology
from pretrainax.sharding.stages import pipeline_stages
from tests.support import tiny

pytestmark = pytest.mark.aot

LAYERS, WIDTH, INSIDE, LENGTH = 8, 512, 1024, 256


SLICES = {
    "v5e:16x16": {"data": 8, "pipeline": 4, "fsdp": 8},
    "v5p:8x8x4": {"data": 4, "pipeline": 8, "fsdp": 4, "tensor": 2},
    "h100:32x8": {"data": 8, "pipeline": 4, "fsdp": 4, "tensor": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule, topology", list(itertools.product(["gpipe", "1f1b"], SLICES)))
def test_a_tick_permutes_the_stream_of_a_part_and_no_stage_has_layers_of_another(schedule, topology):
    absent, mesh = Topology.parse(topology), SLICES[topology]
    try:
        absent.devices()
    except UserError as e:
        pytest.skip(str(e))
    experiment = tiny.get_config("gpt")
    model, train = experiment.model, experiment.train
    model.num_layers, model.d_model, model.d_ff, model.num_heads = LAYERS, WIDTH, INSIDE, WIDTH // 128
    model.position, experiment.data.sequence_length = LearnedPositions(LENGTH), LENGTH
    train.global_batch_size, train.remat, train.pipeline_schedule = 512, "block", schedule
    train.attention = "tpu_splash" if absent.chip.is_tpu else "cudnn"
    for axis, size in mesh.items():
        setattr(experiment.mesh, axis, size)
    step = compile_step(experiment, absent)
    stages = pipeline_stages(experiment, {"expert": 1, "fsdp": 1, **mesh})
    permutes = [c for c in step.collectives if c.kind == "collective-permute" and c.axis == "pipeline"]
    # Each tick sends hidden states in the forward, and their gradients in the backward.
    assert sum(c.count for c in permutes) == 2 * stages.ticks
    assert {c.bytes for c in permutes} == {2 * stages.rows * LENGTH * WIDTH}  # bfloat16
    # Along `fsdp`, a stage gathers its parameters once, and not in each tick.
    gathered = sum(
        c.total for c in step.collectives if (c.axis, c.kind) == ("fsdp", "all-gather") and "loss" not in c.where
    )
    fsdp, tensor = mesh.get("fsdp", 1), mesh.get("tensor", 1)
    of_stage = 4 * LAYERS // mesh["pipeline"] * (4 * WIDTH**2 + 2 * WIDTH * INSIDE) // tensor * (fsdp - 1) // fsdp
    around = 2 * (model.vocab_size + LENGTH) * WIDTH
    assert gathered <= of_stage + 2 * around
    # Stages exchange only rows, and gradients of the parameters outside of the layers.
    most = max(stages.parts * stages.rows * LENGTH * WIDTH * 2, 8 * model.vocab_size * WIDTH)
    assert all(c.bytes <= most for c in step.collectives if "pipeline" in c.axis)
    layers = [b for b in step.buffers if "loss" not in b.where]
    assert not [b for b in layers if b.shape.partition("[")[2].startswith(f"{LAYERS},{WIDTH},")]
