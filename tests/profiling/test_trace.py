"""Tests the reader of traces. The tests have no GPU or TPU, so they write traces of GPUs and TPUs.

These traces have the planes, lines and statistics that the real profilers write.
"""

import re

import pytest
from jaxlib import xla_client
from matplotlib.figure import Figure

from pretrainax.config import UserError
from pretrainax.planning.roofline import ATTAINABLE
from pretrainax.planning.topologies import Topology
from pretrainax.profiling import picture, report
from pretrainax.profiling.kernels import UNKNOWN, Work, kernel_work
from pretrainax.profiling.trace import Op, ProgramId, Run, Trace, exclusive_times, read_trace
from pretrainax.runtime.chips import CHIPS
from tests.support import tiny
from tests.support.xspace import Event, xspace

SIZE = 64  # The matrices of STEP are [SIZE, SIZE].
CALLED = ProgramId("jit_step", 5)
STEPS = Event("train_step", 0, 900, {"step_num": 7}), Event("train_step", 1000, 900, {"step_num": 8})


STEP = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[64,64], w: f32[64,64]) -> f32[64] {
  %x = f32[64,64]{1,0} parameter(0)
  %w = f32[64,64]{1,0} parameter(1)
  %zero = f32[] constant(0)
  %dot = f32[64,64]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, METADATA_OF_mlp
  ROOT %sum = f32[64]{0} reduce(%dot, %zero), dimensions={0}, to_apply=%add, METADATA_OF_norm
}
"""


def step_proto(product: str = "dot") -> bytes:
    """Returns the program STEP as a trace contains it; `product` is the name of its product."""
    text = re.sub(r"METADATA_OF_(\w+)", r'metadata={op_name="jit(step)/\1/op"}', STEP.replace("%dot", f"%{product}"))
    return xla_client.hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def gpu_trace(tmp_path, steps=STEPS, devices=1, programs=None):
    """Writes a trace of two steps of 1 µs: a product of 400 ns, an overlapping copy of 100 ns, and a sum of 300 ns."""

    def kernels(start):
        of = {"hlo_module": "jit_step", "program_id": 5}
        return [
            Event("ampere_sgemm_128x64", start, 400, {"hlo_op": "dot", **of}),
            Event("input_reduce_fusion", start + 500, 300, {"hlo_op": "sum", **of}),
        ]

    lines = {
        "Stream #13(Compute)": [*kernels(0), *kernels(1000)],
        "Stream #14(MemcpyH2D)": [Event("MemcpyH2D", start + 300, 100) for start in (0, 1000)],
        "XLA Ops": [Event("derived", 0, 1800)],  # Trace readers derive this line from the same time.
    }
    planes = [(f"/device:GPU:{i}", lines) for i in range(devices)]
    path = tmp_path / "gpu.xplane.pb"
    path.write_bytes(
        xspace([("/host:CPU", {"python": list(steps)}), *planes], programs or {"jit_step(5)": step_proto()})
    )
    return read_trace(str(path))


def test_kernels_of_a_cuda_graph_are_read_by_their_own_names(tmp_path):
    """XLA records most of a step as CUDA graphs. `hlo_op` then names the graph, which is no instruction."""
    graph = {"hlo_module": "jit_step", "program_id": 5, "hlo_op": "command_buffer_3", "cuda_graph_id": 9}
    kernels = [
        Event("gemm_fusion_dot_1", 0, 400, graph),  # of the instruction gemm_fusion_dot.1
        Event("sum", 500, 200, graph),
        Event("nvjet_hsh_128x256", 800, 100, graph),  # of a library
    ]
    path = tmp_path / "gpu.xplane.pb"
    planes = [("/host:CPU", {"python": [STEPS[0]]}), ("/device:GPU:0", {"Stream #13(Compute)": kernels})]
    path.write_bytes(xspace(planes, {"jit_step(5)": step_proto("gemm_fusion_dot.1")}))
    trace = read_trace(str(path))
    assert trace.busy == pytest.approx(
        {Op(CALLED, "gemm_fusion_dot.1"): 400e-9, Op(CALLED, "sum"): 200e-9, Op(CALLED, "nvjet_hsh_128x256"): 100e-9}
    )
    modules = {(work.module, work.kind): work.seconds for work in kernel_work(trace)}
    assert modules == pytest.approx(
        {("mlp", "products"): 400e-9, ("norm", "elementwise"): 200e-9, ("", "unknown"): 100e-9}
    )


def tpu_lines():
    """Returns the lines of the GPU's trace in a TPU's form, without the copy."""
    return {
        "Steps": [Event("7", 0, 800), Event("8", 1000, 800)],
        "XLA Modules": [Event("jit_step(5)", 0, 800), Event("jit_step(5)", 1000, 800)],
        "XLA Ops": [
            event
            for start in (0, 1000)
            for event in (
                Event("%dot = f32[64,64]{1,0} fusion(f32[64,64] %x, f32[64,64] %w)", start, 400),
                Event("%sum = f32[64]{0} reduce(f32[64,64] %dot, f32[] %c)", start + 500, 300),
            )
        ],
        "Async XLA Ops": [Event("%copy-start = ()", 0, 1800)],
    }


def tpu_trace(tmp_path):
    path = tmp_path / "tpu.xplane.pb"
    planes = [("/host:CPU", {"python": list(STEPS)}), ("/device:TPU:0", tpu_lines())]
    path.write_bytes(xspace(planes, {"jit_step(5)": step_proto()}))
    return read_trace(str(path))


def test_what_runs_at_once_shares_the_time():
    a, b = Op(CALLED, "a"), Op(CALLED, "b")
    assert exclusive_times([Run(a, 0, 10), Run(b, 6, 12), Run(a, 20, 21)]) == {a: 6 + 2 + 1, b: 2 + 2}
    assert exclusive_times([]) == {}


@pytest.mark.parametrize("devices", [1, 3])
def test_a_gpu_is_read_by_its_streams(tmp_path, devices):
    trace = gpu_trace(tmp_path, devices=devices)
    assert (trace.platform, trace.devices, trace.steps) == ("gpu", devices, [7, 8])
    assert trace.seconds == pytest.approx(900e-9)  # two steps, from 0 to 1,800 ns
    expected = {Op(CALLED, "dot"): 350e-9, Op(None, "MemcpyH2D"): 50e-9, Op(CALLED, "sum"): 300e-9}
    assert trace.busy == pytest.approx(expected)
    assert {(work.module, work.kind) for work in kernel_work(trace)} == {
        *(("mlp", "products"), ("norm", "elementwise"), ("", "unknown"))
    }


def test_a_tpu_is_read_by_its_ops_and_the_modules_around_them(tmp_path):
    trace = tpu_trace(tmp_path)
    assert (trace.platform, trace.devices, trace.steps) == ("tpu", 1, [7, 8])
    assert trace.busy == pytest.approx({Op(CALLED, "dot"): 400e-9, Op(CALLED, "sum"): 300e-9})
    assert [(work.module, work.kind) for work in kernel_work(trace)] == [("mlp", "products"), ("norm", "elementwise")]


@pytest.mark.parametrize(("dtype", "products"), [("bf16", ""), ("s8", "int8"), ("f8e4m3fn", "fp8")])
def test_products_of_eight_bits_are_expected_at_their_own_rate(tmp_path, monkeypatch, dtype, products):
    size, chip = 8192, CHIPS["h100"]  # At this size, moving the bytes takes less time than the FLOPs.
    monkeypatch.setattr(f"{__name__}.STEP", STEP.replace("f32", dtype).replace("64", str(size)))
    trace = gpu_trace(tmp_path)
    (work,) = [work for work in kernel_work(trace, chip) if work.kind == "products"]
    assert work.expected == pytest.approx(2 * size**3 / (ATTAINABLE["gpu"] * chip.product_flops(products)))


def test_a_program_of_another_number_is_found_by_its_name_and_instructions(tmp_path):
    """Tests a program with another number, as from a compilation cache, next to a wrong program of the step's name."""
    other = step_proto("product")
    trace = gpu_trace(tmp_path, programs={"jit_step(5)": other, "jit_step(9)": step_proto(), "jit_f(1)": other})
    assert {(work.module, work.kind) for work in kernel_work(trace)} >= {("mlp", "products"), ("norm", "elementwise")}


def test_a_product_is_expected_to_take_the_longer_of_its_flops_and_its_bytes(tmp_path):
    chip = CHIPS["h100"]
    product, total = (work for work in kernel_work(gpu_trace(tmp_path), chip) if work.module)
    moved = 3 * SIZE * SIZE * 4 / chip.memory_rate
    assert product.expected == pytest.approx(max(moved, 2 * SIZE**3 / (0.8 * chip.peak_flops)))
    assert total.expected == pytest.approx(
        (SIZE * SIZE + SIZE) * 4 / chip.memory_rate, rel=0.02
    )  # The tolerance covers the zero that the sum starts from.
    assert (product.in_products, total.in_products) == (product.seconds, 0.0)


def test_the_table_of_a_chip_has_the_plan_beside_it(tmp_path):
    trace = gpu_trace(tmp_path)
    said = report.report(trace, None, Topology.parse("h100:1"))
    assert "plan" in said and "without a plan" not in said
    assert "set --topology to the devices of the run" in report.report(trace, None, None)


def test_what_is_expected_of_the_step_is_of_the_program_that_was_traced(tmp_path):
    """Tests that products follow the plan's count for the config, and other memory traffic the traced program."""
    topology = Topology.parse("v5e:1x1")
    expected = report.expectation(tpu_trace(tmp_path), tiny.get_config("gpt"), topology)
    besides = (SIZE * SIZE + SIZE + 1) * 4  # The sum reads the product and a zero, and writes a row.
    assert expected.memory == pytest.approx(besides / topology.chip.memory_rate)
    assert expected.seconds == expected.compute + expected.memory > expected.memory > 0


def test_rows_and_what_is_idle_are_all_of_a_step(tmp_path):
    trace = gpu_trace(tmp_path)
    rows = report.kernel_table(trace, kernel_work(trace)).splitlines()[1:]
    shares = [float(row.split()[-1].rstrip("%")) for row in rows]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))  # Each share is rounded to a tenth.
    assert report.idle_seconds(trace) == pytest.approx(200e-9)


def test_a_trace_without_steps_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no step of a run"):
        gpu_trace(tmp_path, steps=())


@pytest.mark.parametrize("content", [b"\x0a\xff\xff", b"not a trace", b""])
def test_what_is_no_trace_is_refused_in_a_line(tmp_path, content):
    (tmp_path / "x.xplane.pb").write_bytes(content)
    with pytest.raises(UserError, match="xplane|trace"):
        read_trace(str(tmp_path / "x.xplane.pb"))


@pytest.mark.parametrize("steps, text", [([7], "step 7 on cpu, by"), ([7, 8], "steps 7 to 8 on cpu, by")])
def test_the_picture_names_its_steps(steps, text, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda picture, *_, **__: drawn.append(picture))
    picture.draw("", Trace("cpu", 1, steps, 0.01, {}, {}), [Work("decoder", UNKNOWN, 0.005, 0.0, None)])
    assert drawn[0].texts[1].get_text().startswith(text)
