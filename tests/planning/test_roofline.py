"""Tests the estimated time and price of a run by hand."""

import dataclasses
import functools
import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import pytest

from pretrainax import models
from pretrainax.config import LearnedPositions, MeshConfig, MixtureOfExperts
from pretrainax.data.batch import lengths_of
from pretrainax.layers.compute import Compute
from pretrainax.models.flops import expert_flops, flops_per_step
from pretrainax.optim import Sophia
from pretrainax.planning import roofline
from pretrainax.planning.estimated_traffic import FUSED, bytes_by_kind, product_operands
from pretrainax.planning.hlo import MemoryTraffic
from pretrainax.planning.hlo.memory_traffic import KernelBytes
from pretrainax.planning.memory import estimate
from pretrainax.planning.product_bytes import product_bytes
from pretrainax.planning.report import run_report
from pretrainax.planning.search import estimate_run
from pretrainax.planning.shapes import batch_shapes
from pretrainax.planning.topologies import Topology
from pretrainax.planning.traffic import Collective
from pretrainax.runtime.chips import CHIPS, chip_of, peak_flops
from pretrainax.sharding.mesh import AXES
from tests.support import tiny
from tests.support.tiers import few

ROOT = pathlib.Path(__file__).parents[2]
ONE = dict.fromkeys(AXES, 1)


@pytest.fixture(scope="module")
def candidate():
    return estimate_run(tiny.get_config("gpt"), Topology.parse("v5e:2x2"))


def test_the_flops_are_those_of_the_run(candidate):
    experiment = candidate.experiment
    lengths = lengths_of(batch_shapes(experiment))
    assert candidate.roofline.flops == flops_per_step(experiment.model, 8, lengths.inputs, lengths.targets)


def test_gradients_that_an_optimizer_takes_besides_are_counted_and_take_their_time(candidate):
    experiment = dataclasses.replace(candidate.experiment, optimizer=Sophia(interval=4))
    at = ONE | {"data": 4}, Topology.parse("v5e:2x2"), candidate.memory, []
    more, one = roofline.estimate_time(experiment, *at), roofline.estimate_time(candidate.experiment, *at)
    times = 1 + 8 / 3 / 4
    expected = [times * x for x in (one.flops, one.executed_flops, one.compute)]
    assert (more.flops, more.executed_flops, more.compute) == pytest.approx(expected)
    # Only the traffic of activations grows with the number of gradients.
    assert one.memory < more.memory < times * one.memory


def test_products_take_their_flops_over_what_a_chip_attains(candidate):
    attained = 4 * 197e12 * roofline.ATTAINABLE["tpu"]
    assert candidate.roofline.compute == pytest.approx(candidate.roofline.flops / attained)


@pytest.mark.first(2)
@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:1"])
@pytest.mark.parametrize("misaligned, aligned", [(50_257, 50_304), (50_265, 50_304)], ids=["gpt2", "bart"])
def test_a_misaligned_head_takes_the_time_of_whole_tiles(candidate, topology, misaligned, aligned):
    times = []
    for vocabulary in (misaligned, aligned):
        experiment = tiny.get_config("gpt")
        experiment.model.vocab_size = vocabulary
        times.append(roofline.estimate_time(experiment, ONE, Topology.parse(topology), candidate.memory, []))
    assert times[0].compute == pytest.approx(times[1].compute)
    # The 47 additional columns are 9e-4 of 50,304. The FLOPs of the layers hardly reduce this share.
    assert times[0].flops / times[1].flops < 0.9995


def test_on_a_gpu_reading_and_writing_their_operands_takes_time_besides(candidate):
    experiment, topology = candidate.experiment, Topology.parse("h100:1")
    attained, once = 990e12 * roofline.ATTAINABLE["gpu"], product_bytes(experiment, ONE, "gpu")
    times, operands = {}, {}
    for remat in ("none", "block"):
        train = dataclasses.replace(experiment.train, remat=remat)
        again = dataclasses.replace(experiment, train=train)
        operands[remat] = product_operands(again, ONE, "gpu", candidate.memory)
        times[remat] = roofline.estimate_time(again, ONE, topology, candidate.memory, [])
    attention = bytes_by_kind(experiment, ONE, "gpu", candidate.memory).attention_residuals
    assert operands["block"] - operands["none"] == pytest.approx(FUSED * (once + attention))
    flops = times["none"].flops - times["none"].executed_flops  # These are the FLOPs of masked positions.
    assert times["none"].compute > (times["none"].flops - flops) / attained + 3 * once / 3350e9 * 0.999


def test_products_that_are_grouped_take_longer(candidate):
    model = dataclasses.replace(candidate.experiment.model, experts=MixtureOfExperts(4, top_k=2))
    experiment = dataclasses.replace(candidate.experiment, model=model)
    lengths = lengths_of(batch_shapes(experiment))
    time = roofline.estimate_time(experiment, ONE | {"data": 4}, Topology.parse("v5e:2x2"), candidate.memory, [])
    experts = 3 * 8 * expert_flops(model, lengths.inputs, lengths.targets)
    of_token = 2 * 2 * 32 * 64 + 32 * 4  # 2 products of 2 experts, and the product of the router.
    assert experts == 3 * 8 * lengths.inputs * 2 * 2 * of_token
    attained = 4 * 197e12 * roofline.ATTAINABLE["tpu"]
    assert time.compute == pytest.approx((time.flops + (1 / roofline.GROUPED - 1) * experts) / attained)


def test_links_behind_the_rest_take_no_time_and_others_do(candidate):
    time = candidate.roofline
    assert time.seconds == max(time.compute + time.memory, time.hidden) + time.exposed
    assert time.exposed > 0 == time.hidden  # pure data parallelism


def test_a_compiled_step_takes_the_time_of_the_bytes_that_were_counted(candidate):
    at = candidate.experiment, ONE | {"data": 4}, Topology.parse("v5e:2x2"), candidate.memory, []
    few, many = (KernelBytes("decoder/blocks/mlp/up", "products", True, size) for size in (10**3, 10**9))
    besides = KernelBytes("decoder/blocks", "elementwise", False, 10**8)
    estimated = roofline.estimate_time(*at)
    fast, slow = (roofline.estimate_time(*at, traffic=MemoryTraffic([one, besides], kernels=2)) for one in (few, many))
    rate = CHIPS["v5e"].memory_rate
    assert (fast.compute, fast.memory) == (estimated.compute, 10**8 / rate)
    assert (slow.compute, slow.memory) == (10**9 / rate, 10**8 / rate)


@pytest.mark.parametrize("kind, hides", [("all-gather", True), ("reduce-scatter", True), ("all-reduce", False)])
def test_gathers_along_fsdp_are_hidden_and_all_reduces_waited_for(candidate, kind, hides):
    sent = [Collective("fsdp", kind, 10**9, 1, "decoder/blocks")]
    sizes, topology = ONE | {"fsdp": 4}, Topology.parse("v5e:2x2")
    time = roofline.estimate_time(candidate.experiment, sizes, topology, candidate.memory, sent)
    seconds = 10**9 / CHIPS["v5e"].link_rate
    assert (time.hidden, time.exposed) == ((seconds, 0) if hides else (0, seconds))


def test_mfu_hours_and_price_follow_from_the_seconds(candidate):
    time = candidate.roofline
    assert time.mfu == pytest.approx(time.flops / (time.seconds * 4 * 197e12))
    assert time.mfu_executed == pytest.approx(time.executed_flops / (time.seconds * 4 * 197e12))
    assert time.hours == pytest.approx(time.seconds * 40 / 3600)
    assert time.price == pytest.approx(time.hours * 4 * CHIPS["v5e"].price)


def test_a_layer_made_again_takes_a_third_more_and_is_no_useful_flop(monkeypatch):
    experiment = tiny.get_config("gpt")
    # With 8 columns, the head takes almost no time, if `tile_padding` does not round them up to 128.
    experiment.model.vocab_size = 8
    monkeypatch.setattr(roofline, "tile_padding", lambda columns, platform: 1.0)
    plain, again = (estimate_run(e, Topology.parse("v5e:2x2")).roofline for e in (experiment, _block(experiment)))
    assert again.flops == plain.flops
    assert again.compute / plain.compute == pytest.approx(4 / 3, rel=0.01)


def test_the_bubble_of_a_pipeline_is_time_of_the_layers_alone(monkeypatch):
    experiment = tiny.get_config("gpt")
    # With 8 columns, the head takes almost no time, if `tile_padding` does not round them up to 128.
    experiment.model.vocab_size = 8
    monkeypatch.setattr(roofline, "tile_padding", lambda columns, platform: 1.0)
    times = {}
    for parts in (0, 2):
        staged = dataclasses.replace(
            experiment,
            mesh=dataclasses.replace(experiment.mesh, data=2, pipeline=2),
            train=dataclasses.replace(experiment.train, pipeline_microbatches=parts),
        )
        times[parts] = estimate_run(staged, Topology.parse("v5e:2x2")).roofline
    plain = estimate_run(experiment, Topology.parse("v5e:2x2")).roofline
    assert times[0].compute / plain.compute == pytest.approx(5 / 4, rel=0.01)  # A pipeline with 4 rows takes 5 ticks.
    assert times[2].compute / plain.compute == pytest.approx(3 / 2, rel=0.01)
    assert times[0].flops == plain.flops
    staged.train.pipeline_schedule = "1f1b"
    again = estimate_run(staged, Topology.parse("v5e:2x2")).roofline
    assert again.compute / times[2].compute == pytest.approx(4 / 3, rel=0.01)  # one more forward
    assert again.flops == plain.flops


def _block(experiment):
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, remat="block"))


@pytest.mark.parametrize(
    "topology, sizes, axis, rate",
    [
        ("v5p:4x4x8", {"fsdp": 128}, "fsdp", 600e9),  # the whole torus
        ("v5p:4x4x8", {"data": 32, "tensor": 4}, "tensor", 200e9),  # one of the three dimensions of the torus
        ("h100:8", {"fsdp": 8}, "fsdp", 450e9),
        ("h100:4x8", {"data": 4, "tensor": 8}, "tensor", 450e9),  # within a host
        # Each group has one device of each host, which uses one port.
        ("h100:4x8", {"data": 4, "tensor": 8}, "data", 50e9),
        ("h100:4x8", {"fsdp": 32}, "fsdp", 400e9),  # eight ports of a host
        ("4*v5e:4x4", {"data": 64}, "slices", 3.125e9),
        ("tpu7x:4x4x4", {"fsdp": 128}, "fsdp", 300e9),  # A device has half of the links of its chip.
        ("gb200:72", {"data": 9, "tensor": 8}, "data", 900e9),  # NVLink connects a rack.
    ],
)
def test_the_rate_of_an_axis_is_that_of_the_wires_it_lies_on(topology, sizes, axis, rate):
    assert roofline.link_rate(axis, ONE | sizes, Topology.parse(topology)) == rate


def test_a_compiled_sum_is_hidden_as_far_as_it_runs_beside_products():
    assert {roofline.hidden_fraction(Collective("data", "all-reduce", 8, 4, "", overlapping=n)) for n in (0, 1, 4)} == {
        0,
        0.25,
        1,
    }


# --- published runs ------------------------------------------------------------------------------------------------

calibrate = runpy.run_path(str(ROOT / "benchmarks" / "calibrate.py"))
PUBLISHED = calibrate["published"]()
QUICK = ["gpt2_124m_a100", "gpt2_124m_h100", "llama3_8b_h100_128", "llama3_8b_v6e_256"]


@pytest.fixture(scope="module")
def run_of():
    return functools.cache(lambda name: calibrate["planned"](name, PUBLISHED[name]))


@pytest.mark.first(2)
@pytest.mark.parametrize("name", few(sorted(PUBLISHED), QUICK))
def test_a_published_run_lies_within_what_is_printed(name, run_of):
    run = run_of(name)
    assert run.least < run.tokens < run.most


def test_runs_that_are_held_out_are_of_both_platforms():
    held_out = {name.split("_")[-2] for name, entry in PUBLISHED.items() if entry.get("held_out")}
    assert held_out == {"1558m", "v6e", "v5p"}


@pytest.mark.slow
def test_the_constants_are_those_of_the_fit(run_of):
    runs = list(map(run_of, PUBLISHED))
    assert dict(calibrate["fit"](runs)) == pytest.approx(
        {"ATTAINABLE of a TPU": roofline.ATTAINABLE["tpu"], "GROUPED": roofline.GROUPED}, abs=0.015
    )
    for platform, ends in calibrate["spread"](runs).items():
        assert ends == pytest.approx(roofline.SPREAD[platform], abs=0.015)


def test_flops_of_a_token_are_those_that_a_published_mfu_counts():
    """Compares with MaxText's docs: 7,207 tokens/s/chip for Llama 3.1 8B at 8,192 are 45.46 % of 918 TFLOP/s."""
    experiment = runpy.run_path(str(ROOT / "configs" / "llama.py"))["get_config"]("3_8b")
    lengths = lengths_of(batch_shapes(experiment))
    flops = flops_per_step(experiment.model, 1, lengths.inputs, lengths.targets) / 8192
    assert flops == pytest.approx(0.4546 * 918e12 / 7207, rel=0.01)


@pytest.mark.parametrize("name", CHIPS)
def test_a_chip_is_found_by_each_of_its_names(name):
    for kind in CHIPS[name].device_kinds:
        assert chip_of(kind) is CHIPS[name]
        assert peak_flops(kind) == CHIPS[name].peak_flops


# --- executed FLOPs --------------------------------------------------------------------------------------------------


def long_rows(**train):
    """Returns a decoder on rows of 2,048, whose heads every kernel supports."""
    experiment = tiny.get_config("gpt")
    model = dataclasses.replace(experiment.model, head_dim=64, position=LearnedPositions(2048), vocab_size=8)
    data = dataclasses.replace(experiment.data, sequence_length=2048)
    return dataclasses.replace(experiment, model=model, data=data, train=dataclasses.replace(experiment.train, **train))


def on(experiment, topology, **mesh):
    found = estimate_run(
        dataclasses.replace(experiment, mesh=MeshConfig(**{"data": -1, **mesh})), Topology.parse(topology)
    )
    return found.roofline


def forward_attention(experiment):
    """Returns the FLOPs of the logits and of the weighted sums of values in a step's forward, without a mask."""
    return 2 * 2 * 8 * 2 * 4 * 64 * 2048**2  # The two products have 8 rows, 2 layers, 4 heads of width 64.


def seconds_of(flops, topology):
    topology = Topology.parse(topology)
    return flops / (topology.num_devices * topology.chip.peak_flops * roofline.ATTAINABLE[topology.chip.platform])


def operands_of(experiment, topology):
    """Returns the seconds in which a device moves the operands of products; TPUs need no extra time."""
    topology = Topology.parse(topology)
    if topology.chip.is_tpu:
        return 0.0
    sizes = ONE | {"data": topology.num_devices}
    memory = estimate(experiment, sizes, topology.chip)
    return product_operands(experiment, sizes, "gpu", memory) / topology.chip.memory_rate


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "topology, attention, skipped, again",
    [
        ("v5e:2x2", "auto", 1 - 10 / 16, 3),  # splash: 10 of 4 × 4 tiles, and three more products in its backward
        ("h100:4", "auto", 1 - 2049 / 4096, 1),
        ("v5e:2x2", "xla", 0, 0),  # XLA multiplies masked positions too.
        ("h100:4", "xla", 0, 0),
    ],
)
def test_time_follows_from_what_the_kernel_multiplies(topology, attention, skipped, again, monkeypatch):
    # The vocabulary fills only a part of a tile.
    monkeypatch.setattr(roofline, "tile_padding", lambda columns, platform: 1.0)
    experiment = long_rows(attention=attention)
    time, in_full = on(experiment, topology), forward_attention(experiment)
    assert time.flops - time.executed_flops == pytest.approx(3 * in_full * skipped)
    products = seconds_of(time.executed_flops + in_full / 2 * again * (1 - skipped), topology)
    assert time.compute == pytest.approx(products + operands_of(experiment, topology))


@pytest.mark.first(1)
@pytest.mark.parametrize("remat, again", [("dots", 2), ("block", 2)])
def test_rematerialisation_makes_attention_again_and_blocks_their_maps_too(remat, again):
    topology, in_full = "h100:4", forward_attention(None)
    plain, more = (on(long_rows(remat=policy), topology) for policy in ("none", remat))
    assert (more.flops, more.executed_flops) == (plain.flops, plain.executed_flops)
    # without the matmul of the head
    maps = 0 if remat == "dots" else (plain.flops - 3 * in_full) / 3 - 2 * 8 * 2048 * 32 * 8
    extra = in_full / 2 * again * 2049 / 4096 + maps
    operands = operands_of(long_rows(remat=remat), topology) - operands_of(long_rows(), topology)
    assert more.compute - plain.compute == pytest.approx(seconds_of(extra, topology) + operands)


def test_all_wait_for_the_device_whose_queries_have_the_most_keys():
    whole, split = (on(long_rows(), "v5e:2x2", sequence=parts) for parts in (1, 2))
    assert split.executed_flops == whole.executed_flops  # The first half of a row has 3 of the 10 tiles.
    waited = (7 * 2 - 10) / 16 * forward_attention(None) / 2 * 9
    assert split.compute - whole.compute == pytest.approx(seconds_of(waited, "v5e:2x2"))


@pytest.mark.first(1)
@pytest.mark.parametrize("remat", ["dots", "block"])
def test_what_is_made_again_is_what_jax_makes_again(remat):
    def counted(policy):
        experiment = long_rows()
        config = dataclasses.replace(experiment.model, d_model=64, position=LearnedPositions(256))
        model = models.build(config, Compute(attention="xla", remat=policy, scan_unroll=2))
        batch = {name: jax.ShapeDtypeStruct((2, 256), jnp.int32) for name in ("tokens", "positions", "segment_ids")}

        def loss(params, batch):
            logits = model.apply({"params": params}, batch, deterministic=True).heads["lm"].logits()
            return jnp.sum(jnp.square(logits))

        # This counts the FLOPs after JAX's lowering. A CPU compiler would share work that two loops cannot share.
        return jax.jit(jax.grad(loss)).lower(models.abstract_params(config), batch).cost_analysis()["flops"]

    blocks = 0 if remat == "dots" else 2 * 2 * 256 * (4 * 2 * 64 * 256 + 2 * 2 * 64 * 64)
    expected = blocks + 2 * 2 * 2 * 2 * 4 * 64 * 256**2
    assert counted(remat) - counted("none") == pytest.approx(expected, rel=0.08)  # XLA also counts softmax and norms.


def test_a_plan_says_how_much_of_the_convention_is_done():
    candidate = estimate_run(dataclasses.replace(long_rows(), mesh=MeshConfig(data=-1)), Topology.parse("h100:4"))
    text = run_report("gpt", candidate, Topology.parse("h100:4"), None, "")
    time = candidate.roofline
    assert (
        f"{time.executed_flops:.3g} per step ({time.executed_flops / time.flops:.0%}) executed: "
        "attention skips masked positions" in text
    )
    assert f"{time.mfu:.0%} MFU ({time.mfu_executed:.0%} from executed FLOPs)" in text
    plain = estimate_run(
        dataclasses.replace(long_rows(attention="xla"), mesh=MeshConfig(data=-1)), Topology.parse("h100:4")
    )
    assert "executed" not in run_report("gpt", plain, Topology.parse("h100:4"), None, "")


@pytest.mark.parametrize("name", CHIPS)
def test_a_plan_says_the_price_or_that_none_is_known(candidate, name):
    chip = CHIPS[name]
    topology = Topology.parse(f"{name}:{'x'.join(['2'] * chip.torus) if chip.is_tpu else 4}")
    found = dataclasses.replace(
        candidate,
        roofline=roofline.estimate_time(candidate.experiment, ONE | {"data": 4}, topology, candidate.memory, []),
    )
    (row,) = [line for line in run_report("gpt", found, topology, None, "").splitlines() if line.startswith("  run ")]
    # The run takes only seconds, but the row shows no 0.
    assert row.endswith("(pretrainax/runtime/chips.py)") and not re.search(r" 0(\.0)? ", row)
    assert (f"the price of a {name} is unknown" in row) == (chip.price is None)
    assert (f" USD at {chip.price} " in row or f" USD at {chip.price:.2f} " in row) if chip.price else "USD" not in row
