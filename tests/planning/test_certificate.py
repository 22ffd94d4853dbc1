"""Compares each value of a compiled step's certificate with a count by hand, planted faults and committed values."""

import dataclasses
import functools
import json
import logging
import re

import jax
import optax
import pytest

from pretrainax.config import Experiment, LearnedPositions, UserError
from pretrainax.data.packing import OneEach
from pretrainax.optim.optimizers import AdamW, scale_by_adam
from pretrainax.planning import certificate, memory
from pretrainax.planning.compiled import Compiled, compile_step
from pretrainax.planning.hlo import Program, matrix_products_of, runtime_conditionals
from pretrainax.runs.train import train
from pretrainax.runtime.chips import CHIPS
from pretrainax.sharding.axes import AXES
from tests.planning import certificates
from tests.planning.test_compiled import absent, config
from tests.support import tiny
from tests.support.runs import write_text

ROWS, LENGTH, WIDTH, LAYERS, VOCABULARY = 64, 256, 512, 2, 512
TOKENS = ROWS * LENGTH
MATRICES = LAYERS * 6 * WIDTH**2  # query, key, value, out, up, down
PARAMETERS = (
    MATRICES
    + LAYERS * (6 * WIDTH + 2 * 2 * WIDTH)  # biases and norms
    + (VOCABULARY + LENGTH) * WIDTH
    + 2 * WIDTH  # the final norm
)
ONE_DEVICE: dict[str, int] = dict.fromkeys(AXES, 1)


def small() -> Experiment:
    """Builds a GPT of two layers whose sizes are multiples of 128, with heads of 128 that fused kernels support."""
    experiment = config("gpt", rows=ROWS)
    experiment.data.sequence_length, experiment.model.position = LENGTH, LearnedPositions(LENGTH)
    experiment.train.scan_unroll = LAYERS
    return experiment


def certified(experiment: Experiment, name: str) -> dict[str, certificate.Entry]:
    topology = absent(name)
    return {x.name: x for x in certificate.certify(experiment, topology, compile_step(experiment, topology))}


@functools.cache
def sound(name: str) -> Compiled:
    return compile_step(small(), absent(name))


# --- programs written by hand ----------------------------------------------------------------------------------------

STEP = """HloModule step

%fused (p: bf16[64,32], q: bf16[32,50]) -> bf16[64,50] {
  %p = bf16[64,32]{1,0} parameter(0)
  %q = bf16[32,50]{1,0} parameter(1)
  ROOT %d = bf16[64,50]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp(loss)/dot_general"}
}

%body (b: (s32[], bf16[64,32])) -> (s32[], bf16[64,32]) {
  %b = (s32[], bf16[64,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = bf16[64,32]{1,0} get-tuple-element(%b), index=1
  %w = f32[32,32]{1,0} constant({...})
  %y = f32[64,32]{1,0} convert(%x)
  %z = f32[64,32]{1,0} dot(%y, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/rematted_computation/decoder/blocks/mlp/up/dot_general"}
  %s = bf16[2,4,8,16]{3,2,1,0} constant({...})
  %l = bf16[2,4,8,8]{3,2,1,0} dot(%s, %s), lhs_batch_dims={0,1}, rhs_batch_dims={0,1}, lhs_contracting_dims={3}, rhs_contracting_dims={3}, metadata={op_name="jit(step)/decoder/blocks/self_attention/dot_general"}
  %k = bf16[2,4,8,16]{3,2,1,0} custom-call(%s, %s, %s), custom_call_target="new_kernel", metadata={op_name="jit(step)/decoder/blocks/self_attention/kernel"}
  %r = u32[2,4,8,8]{3,2,1,0} custom-call(%i), custom_call_target="random_bits", metadata={op_name="jit(step)/decoder/blocks/self_attention/bits"}
  %c = bf16[64,32]{1,0} conditional(%i, %x, %x), branch_computations={%same, %same}
  ROOT %t = (s32[], bf16[64,32]{1,0}) tuple(%i, %c)
}

%same (o: bf16[64,32]) -> bf16[64,32] {
  ROOT %o = bf16[64,32]{1,0} parameter(0)
}

%cond (n: (s32[], bf16[64,32])) -> pred[] {
  %n = (s32[], bf16[64,32]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (a: bf16[64,32], e: bf16[32,50]) -> bf16[64,50] {
  %a = bf16[64,32]{1,0} parameter(0)
  %e = bf16[32,50]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %init = (s32[], bf16[64,32]{1,0}) tuple(%zero, %a)
  %loop = (s32[], bf16[64,32]{1,0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %f = bf16[64,50]{1,0} fusion(%a, %e), kind=kOutput, calls=%fused
}"""  # noqa: E501


def test_products_have_their_types_sizes_and_executions():
    head, up, logits, kernel = sorted(matrix_products_of(Program(STEP)), key=lambda x: -(x.flops or 0))
    if head.times == 3:  # 3 × 64 × 32 × 32 exceeds 64 × 32 × 50.
        head, up = up, head
    assert head[:7] == ("loss", ("bf16", "bf16"), 1, 2 * 64 * 32 * 50, 64, 50, 32)
    assert up[:7] == ("decoder/blocks/mlp/up", ("f32", "f32"), 3, 3 * 2 * 64 * 32 * 32, 64, 32, 32)
    assert logits[:7] == ("decoder/blocks/self_attention", ("bf16",) * 2, 3, 3 * 2 * 8 * 8 * 8 * 16, 8, 8, 16)
    assert (up.is_recomputed, logits.is_attention, logits.is_fused_attention) == (True, True, False)
    assert kernel.flops is None and kernel.is_fused_attention and kernel.dtypes == ("bf16",)
    assert (head.is_aligned(2), head.is_aligned(64), up.is_aligned(32)) == (True, False, True)


def test_conditionals_count_as_often_as_they_run():
    assert runtime_conditionals(Program(STEP)) == 3


def test_a_step_without_a_program_has_no_certificate():
    topology, gib = absent("h100:1"), 2**30
    failed = Compiled(False, 90 * gib, 79 * gib, None, [], [], None, 1.0)
    with pytest.raises(UserError, match=r"the step needs 96\.\d+ GB, the device has 84\.\d+ GB: reduce .*_size, .* 64"):
        certificate.certify(small(), topology, failed)


# --- values of a config ----------------------------------------------------------------------------------------------


def test_each_row_length_is_a_program():
    experiment = small()
    assert certificate.compiled_programs(experiment) == 4  # initialization, step, evaluation, samples
    experiment.data.packing = OneEach(buckets=(64, 128))
    assert certificate.compiled_programs(experiment) == 1 + 3 + 3 + 1


@pytest.mark.slow
def test_a_run_compiles_the_programs_that_are_counted(tmp_path, caplog):
    experiment = tiny.get_config("gpt")
    experiment.data.source.path = str(write_text(tmp_path / "text") / "*.txt")
    experiment.data.cache_dir = str(tmp_path / "cache")
    experiment.train.steps, experiment.schedule.warmup_steps = 4, 1
    experiment.evaluate.every = experiment.checkpoint.every = 2
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        assert train(experiment, str(tmp_path / "run")) == 0
    programs = re.findall(r"Compiling jit\((\w+)\) with global", caplog.text)
    assert len(programs) == certificate.compiled_programs(experiment), programs


def test_one_more_batch_than_the_largest_does_not_fit():
    """Tests the largest batch within 2 %, the resolution of the search."""
    experiment, chip = small(), CHIPS["v5e"]
    rows = certificate.largest_batch(experiment, ONE_DEVICE, chip)

    def fits(count: int) -> bool:
        train = dataclasses.replace(experiment.train, global_batch_size=count)
        return memory.estimate(dataclasses.replace(experiment, train=train), ONE_DEVICE, chip).fits(chip)

    assert fits(rows) and not fits(round(1.02 * rows))


def test_the_largest_batch_of_a_pipeline_divides_into_its_microbatches():
    experiment, sizes = small(), ONE_DEVICE | {"pipeline": 2}
    experiment.train.global_batch_size, experiment.train.pipeline_microbatches = 6, 3
    rows = certificate.largest_batch(experiment, sizes, CHIPS["v5e"])
    assert rows > 3 and rows % 3 == 0


# --- compiled steps, compared with counts by hand --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100:1", "v5e:1x1"])
def test_the_values_of_two_layers_are_the_counts_by_hand(name):
    entries = certificate.certify(small(), absent(name), sound(name))
    found, moved = {entry.name: entry.value or 0.0 for entry in entries}, sound(name).traffic
    # The first term is the activations of the products; each product reads and writes 512 columns. The others are the
    # logits, and the parameters, gradients and two moments of AdamW.
    floor = 2 * 2 * 6 * LAYERS * TOKENS * WIDTH + 2 * 2 * TOKENS * VOCABULARY + (2 + 2 + 2 * 3) * 4 * PARAMETERS
    assert moved is not None
    # The tolerance of 1 % covers biases and the step counters of the optimizer.
    assert found["bytes_over_floor"] == pytest.approx(moved.total / floor, rel=0.01)
    assert found["fused_attention"] == 1
    # The gradients of both embeddings are float32 products with one-hot vectors, in groups of 128 tokens on a GPU.
    update = 6 * TOKENS * (MATRICES + VOCABULARY * WIDTH)
    embeddings = 2 * 2 * TOKENS * 128 * WIDTH if name == "h100:1" else 0
    # The tolerance of 0.2 % covers the second, smaller product of each embedding.
    assert found["intended_type"] == pytest.approx(1 - embeddings / (update + embeddings), abs=0.002)
    assert found["recomputed"] == pytest.approx(1 + embeddings / update, abs=0.002)
    # The tolerance of 0.2 % covers the same products, which have 32 columns.
    assert found["aligned"] == pytest.approx(1, abs=0.002)
    assert found["exposed_collectives"] == found["conditionals"] == found["unknown_products"] == 0
    # AdamW reads parameters, gradients and two moments, and writes parameters and moments: 7 accesses. A GPU reads the
    # gradients once more for their norm. With so few parameters, kernels also move up to 2 accesses for biases and
    # metrics. A TPU copies the state of a small model between its memories, and these copies do not count as
    # optimizer traffic.
    assert (6 if name == "h100:1" else 3) <= found["optimizer_traffic"] <= 11
    # Parameters and two moments have four bytes each. The tolerance of 1 % covers the metrics in the state.
    assert found["checkpoint"] == pytest.approx(3 * 4 * PARAMETERS / 1e9, rel=0.01)
    assert found["compiled_programs"] == 4


@dataclasses.dataclass
class TwiceTheState(AdamW):
    """A faulty AdamW with a second pair of moments, which the update reads."""

    def directions(self, params_shape):
        yield scale_by_adam(self.b1, self.b2, self.epsilon, self.bias_correction)
        yield optax.scale_by_adam(self.b2, self.b1)


def planted(fault: str) -> Experiment:
    experiment = small()
    if fault == "float32 products":
        experiment.train.dtype = "float32"
    elif fault == "attention by XLA":
        experiment.train.attention = "xla"
    elif fault == "a width of 1,000":
        experiment.model.d_ff = 1000
    elif fault == "remat":
        experiment.train.remat = "block"
    else:
        experiment.optimizer = TwiceTheState(**vars(experiment.optimizer))
    return experiment


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "entry", "least", "most", "words"),
    [
        ("float32 products", "intended_type", 0, 0.01, "f32·f32"),
        ("attention by XLA", "fused_attention", 0, 0, ""),
        ("a width of 1,000", "aligned", 0.3, 0.8, "mlp"),
        ("remat", "recomputed", 1.25, 1.4, ""),  # one more forward of the blocks
        (
            "twice the state",
            "optimizer_traffic",
            13.5,
            20,
            "",
        ),  # 10.5 without the fault; the update reads and writes each moment
    ],
)
def test_a_planted_fault_is_found(fault, entry, least, most, words):
    found = certified(planted(fault), "h100:1")[entry]
    assert found.value is not None and least <= found.value <= most, found
    assert words in found.note


# --- committed certificates ------------------------------------------------------------------------------------------

COMMITTED = json.loads(certificates.FILE.read_text())
FAST = [("h100", "shakespeare_char")]  # the config that compiles fastest


@pytest.mark.parametrize(
    ("chip", "name"),
    [
        pytest.param(chip, name, marks=() if (chip, name) in FAST else pytest.mark.slow)
        for chip in COMMITTED
        for name in COMMITTED[chip]
    ],
)
def test_no_certificate_is_worse_than_the_committed_one(chip, name):
    """Fails if a value is worse by more than 3 %; `python -m tests.planning.certificates` writes new certificates."""
    absent(certificates.CHIPS[chip])
    committed = COMMITTED[chip][name]
    if isinstance(committed, str):  # The step did not fit.
        with pytest.raises(UserError):
            certificates.certificate(name, chip)
        return
    assert certificates.losses(certificates.certificate(name, chip), committed) == []


def test_a_loss_of_more_than_3_percent_is_listed():
    entries = [
        certificate.Entry("aligned", 0.96, "%", "HLO", True),
        certificate.Entry("recomputed", 1.02, "×", "HLO", False),
        certificate.Entry("conditionals", 2, "per step", "HLO", False),
    ]
    committed = {"aligned": 1.0, "recomputed": 1.0, "conditionals": 0.0, "temporaries": 5.0}
    assert certificates.losses(entries, committed) == [
        "temporaries is missing; it was 5.0",
        "aligned is 0.96; it was 1.0",
        "conditionals is 2.0; it was 0.0",
    ]
