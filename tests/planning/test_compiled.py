"""Tests the train step, compiled for 8 fake CPU devices, and for TPUs and GPUs that this machine lacks."""

import functools
import math
import pathlib
import re
import runpy

import jax
import pytest

from pretrainax.config import Experiment, UserError
from pretrainax.layers.compute import resolve_auto
from pretrainax.planning import topologies
from pretrainax.planning.compiled import Compiled, compile_for, compile_step, exhausted_bytes
from pretrainax.planning.shapes import batch_shapes
from pretrainax.planning.topologies import Topology
from pretrainax.sharding.arrays import batch_sharding
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training.run import build_steps
from tests.support.tiers import few

pytestmark = pytest.mark.slow

GIB = 2**30
get_config = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "support" / "tiny.py"))["get_config"]


def config(variant: str = "gpt", rows: int = 64, **mesh) -> Experiment:
    experiment = get_config(variant)
    experiment.model.d_model = experiment.model.d_ff = 512  # A quarter of this width fills the 128 lanes of a TPU.
    experiment.train.global_batch_size, experiment.mesh.data = rows, 1
    experiment.train.scan_unroll = 1  # XLA merges the collectives of unrolled blocks.
    for axis, size in mesh.items():
        setattr(experiment.mesh, axis, size)
    return experiment


def absent(name: str) -> Topology:
    topology = Topology.parse(name)
    try:
        topology.devices()
    except UserError as e:
        pytest.skip(str(e))
    return topology


@functools.cache
def compiled(variant: str, name: str, **mesh) -> Compiled:
    if name == "cpu":
        return compile_for(config(variant, **mesh), jax.devices(), 4 * GIB)
    return compile_step(config(variant, **mesh), absent(name))


# --- 8 fake CPU devices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", few(["gpt", "bert", "t5"], ["t5"]))
def test_the_arguments_are_parameters_moments_and_batch(variant):
    experiment = config(variant, fsdp=8)
    mesh = make_mesh(experiment.mesh)
    with jax.set_mesh(mesh):
        shapes = batch_shapes(experiment)
        state = build_steps(experiment, shapes, mesh).abstract_state
    shards = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    # T5's positions are relative, so the step does not receive these arrays.
    unread = ("positions", "encoder_positions") if variant == "t5" else ()
    rows = sum(math.prod(x.shape) * x.dtype.itemsize // 8 for name, x in shapes.items() if name not in unread)
    assert compiled(variant, "cpu", fsdp=8).memory.arguments == shards + rows


def test_the_new_state_takes_the_place_of_the_old():
    memory = compiled("gpt", "cpu", fsdp=8).memory
    assert 0 <= memory.outputs - memory.donated < 4096  # The remaining bytes are metrics and pointers to all outputs.


def test_a_step_that_needs_more_than_there_is_does_not_fit():
    found = compile_for(config(fsdp=8), jax.devices(), available=1000)
    assert not found.fits
    assert found.needed == found.memory.total > found.available == 1000


def test_tensor_parallel_sums_run_along_the_tensor_axis_in_each_layer():
    found = [c for c in compiled("gpt", "cpu", fsdp=1, tensor=4, data=2).collectives if c.axis == "tensor"]
    assert {c.kind for c in found if "blocks" in c.where} >= {"all-reduce"}


@pytest.mark.parametrize(
    "message, needed",
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (17.50G) "
            "exceeds available HBM (15.75G).",
            17.5 * GIB + 1000,
        ),
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Used 512.25M of 15.75G hbm.", 512.25 * 2**20),
        ("INTERNAL: Used 512.25M of something", None),
        ("RESOURCE_EXHAUSTED: too many registers", None),
    ],
)
def test_the_number_is_read_of_an_error(message, needed):
    assert exhausted_bytes(message, arguments=1000) == needed


# --- TPU and GPU ---------------------------------------------------------------------------------------------------


def lowered(experiment: Experiment, topology: Topology) -> jax.stages.Lowered:
    mesh = make_mesh(experiment.mesh, topology.devices())
    with jax.set_mesh(mesh):
        shapes = batch_shapes(experiment)
        steps = build_steps(experiment, shapes, mesh)
        batch = {name: x.update(sharding=batch_sharding(mesh, x.shape)) for name, x in shapes.items()}
        return steps.step.lower(steps.abstract_state, batch, steps.abstract_frozen)


@pytest.mark.aot
@pytest.mark.parametrize("variant, activation", [("gpt", "gelu"), ("bert", "relu")])
def test_matmuls_for_a_gpu_add_biases_and_gradients_and_apply_relu(variant, activation):
    experiment = config(variant)
    experiment.train.dtype, experiment.model.activation = "bfloat16", activation
    experiment.model.norm_at = "post" if variant == "bert" else "pre"
    text = lowered(experiment, absent("h100:1")).compile().as_text()
    kernels = re.findall(r"(?m)^.* custom-call.*__cublas\$lt\$matmul.*", text)
    biased = [re.search(r'op_name="([^"]*)"', kernel)[1] for kernel in kernels if '"epilogue":"BIAS"' in kernel]
    # Matmuls add all biases except the bias of `up`. The kernel of a GELU adds that bias, in the forward and in the
    # backward.
    for name in ("query", "key", "value", "out", "down"):
        assert any(f"/{name}/dot_general" in x for x in biased), (name, biased)
    assert any('"epilogue":"BIAS_RELU"' in kernel for kernel in kernels) == (activation == "relu")
    assert "__triton_nested_gemm_fusion" not in text
    # In the backward, the matmuls of queries, keys and values add the gradients of other uses of their input. In BERT,
    # whose norms follow the sublayers, the residual stream is a fourth use.
    adding = [x for x in kernels if "transpose(jvp" in x and "output_to_operand_aliasing" in x]
    assert sum(bool(re.search("/(query|key|value)/dot_general", x)) for x in adding) == (3 if variant == "bert" else 2)
    # One kernel computes both sums of a layer norm.
    assert not re.search(r'= f32\[[\d,]+\]\S* fusion\(.*op_name="jit\(step\)/jvp\([^"]*_norm/reduce_sum"', text)


@pytest.mark.aot
@pytest.mark.parametrize("variant", ["gpt", "bert"])
def test_no_sum_of_a_step_for_a_gpu_depends_on_the_order_of_its_threads(variant):
    """Tests that the step has no adding scatter: it compiles to atomics, or to a slow kernel in a deterministic run."""
    text = lowered(config(variant, fsdp=2, tensor=2), absent("h100:4")).as_text()
    assert "stablehlo.dot_general" in text
    assert "stablehlo.scatter" not in text


def split_parameters(experiment: Experiment, devices) -> dict[str, int]:
    """Returns the number of elements of each parameter of the blocks that fsdp splits."""
    mesh = make_mesh(experiment.mesh, devices)
    with jax.set_mesh(mesh):
        params = build_steps(experiment, batch_shapes(experiment), mesh).abstract_state.params
    named = zip(parameter_names(params), jax.tree.leaves(params), strict=True)
    return {name: x.size for name, x in named if "blocks" in name and "fsdp" in x.sharding.spec}


@pytest.mark.aot
@pytest.mark.parametrize("name", few(["v5e:2x2", "h100:4"], ["h100:4"]))
def test_fsdp_gathers_each_matrix_once_forward_and_once_backward(name):
    experiment = config(fsdp=4)
    numbers = sum(split_parameters(experiment, absent(name).devices()).values())
    found = [c for c in compiled("gpt", name, fsdp=4).collectives if c.kind == "all-gather" and "blocks" in c.where]
    # Arrays are bfloat16. A device holds a quarter of each array and sends this much three times.
    assert sum(c.total for c in found) == 2 * numbers * 2 * 3 // 4


@pytest.mark.aot
@pytest.mark.parametrize("name", few(["v5e:2x2", "h100:4"], ["h100:4"]))
def test_fsdp_never_sums_a_whole_matrix_of_a_block_on_each_device(name):
    # Parameters of 2 layers are stacked.
    smallest = min(split_parameters(config(fsdp=4), absent(name).devices()).values()) // 2
    found = [c for c in compiled("gpt", name, fsdp=4).collectives if c.kind == "all-reduce" and "blocks" in c.where]
    # An all-reduce sends 3/4 of its float32 array, twice.
    assert all(c.bytes < 2 * 3 / 4 * 4 * smallest for c in found)


@pytest.mark.aot
def test_a_step_for_a_tpu_runs_in_bfloat16_and_with_its_kernel():
    experiment = config(fsdp=4)
    experiment.data.sequence_length = experiment.model.position.max_length = 128
    experiment.model.num_heads = 2  # Heads have width 64.
    mesh = make_mesh(experiment.mesh, absent("v5e:2x2").devices())
    with jax.set_mesh(mesh):
        assert resolve_auto(experiment.train).dtype == "bfloat16"
        shapes = batch_shapes(experiment)
        program = build_steps(experiment, shapes, mesh)
        assert "tpu_custom_call" in program.step.lower(program.abstract_state, shapes).as_text()


@pytest.mark.aot
def test_a_tpu_that_is_too_small_is_an_answer_with_the_bytes():
    found = compile_step(config(rows=2**24, fsdp=4), absent("v5e:2x2"))
    assert not found.fits
    assert found.needed > found.available == Topology.parse("v5e:2x2").chip.memory_bytes
    assert found.memory is None


@pytest.mark.aot
@pytest.mark.parametrize("name", few(["v5e:2x2", "h100:4"], ["h100:4"]))
def test_every_large_buffer_and_collective_is_named_by_its_module(name):
    found = compiled("gpt", name, fsdp=4)
    assert any("blocks" in buffer.where for buffer in found.buffers)
    assert [b.bytes for b in found.buffers] == sorted((b.bytes for b in found.buffers), reverse=True)
    assert all(buffer.where for buffer in found.buffers)
    assert all(one.where for one in found.collectives if one.bytes > 1000)


@pytest.mark.slow
@pytest.mark.aot
def test_a_tpu_needs_what_its_compiler_counts_at_the_worst_moment():
    memory = compiled("gpt", "v5e:2x2", fsdp=4).memory
    assert memory.arguments < memory.total <= memory.peak
    assert compiled("gpt", "cpu", fsdp=4, data=2).memory.peak is None


def test_a_compiler_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(topologies, "_is_installed", lambda module: False)
    with pytest.raises(UserError, match="pretrainax\\[tpu\\]"):
        compile_step(config(), Topology.parse("v5e:2x2"))
