"""Tests that the header of a run names the attention kernels that its model traces, on simulated hardware."""

import contextlib
import types

import jax
import jax.numpy as jnp
import pytest

from pretrainax.config import Generator, LearnedPositions, UserError
from pretrainax.data.batch import lengths_of
from pretrainax.data.packing import OneEach
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import JsonLines
from pretrainax.layers import multi_head
from pretrainax.runs import description
from pretrainax.runs.description import describe
from pretrainax.sharding.axes import AXES
from pretrainax.sharding.mesh import abstract_mesh, make_mesh
from pretrainax.training.run import Run, build_run, build_steps, no_generation
from pretrainax.training.start import FRESH
from pretrainax.training.validation import Validation
from pretrainax.training.work import Work
from tests.support import tiny
from tests.support.tables import example_shapes
from tests.training import test_pretraining

translations = test_pretraining.translations  # the fixture


@pytest.fixture
def traced(monkeypatch):
    """Lists the attention implementations that the layers trace, in order.

    A stub replaces them, because tracing cuDNN attention queries the library.
    """
    names = []

    def attention(q, k, v, *, implementation, **_):
        names.append(implementation)
        return jnp.zeros_like(q)

    monkeypatch.setattr(multi_head, "attention", attention)
    return names


def t5(**other):
    experiment = tiny.get_config("t5")
    experiment.model.head_dim, experiment.model.num_layers = 64, 1
    for name, value in other.items():
        setattr(experiment.model, name, value)
    return experiment


@contextlib.contextmanager
def run_on(platform, experiment, length=512, **sizes):
    """Yields a run on simulated devices, under its mesh."""
    shapes = example_shapes(experiment.model, length=length)
    mesh = abstract_mesh(dict.fromkeys(AXES, 1) | sizes, platform)
    with jax.sharding.use_abstract_mesh(mesh):
        steps, batches = build_steps(experiment, shapes, mesh), types.SimpleNamespace(no_target_bytes="")
        lengths, specs = lengths_of(shapes), steps.attention_specs
        yield Run(
            experiment=experiment,
            prepared=types.SimpleNamespace(summary=""),
            mesh=mesh,
            peers=None,
            model=steps.model,
            optimizer=steps.optimizer,
            batch_shapes=shapes,
            train_batches=None,
            step=steps.step,
            init=steps.init,
            abstract_state=steps.abstract_state,
            abstract_frozen=steps.abstract_frozen,
            work=Work(experiment, steps.model, specs, lengths, shapes, None, mesh.size),
            validation=Validation(experiment, batches, steps.eval_step, steps.answer_step, mesh, None),
            start=FRESH,
            write=no_generation,
        )


def header(experiment, platform, length=512, **sizes):
    """Returns the attention in the header, and the warnings."""
    with run_on(platform, experiment, length, **sizes) as run:
        rows = describe(run)
    announced = dict(rows)["compute"].split(", attention ")[1].removesuffix(OTHER_BITS)
    return announced, [value for name, value in rows if name == "WARNING"]


OTHER_BITS = ", not deterministic: see config.train.deterministic"


@pytest.mark.parametrize(
    ("platform", "deterministic", "said"),
    [
        ("gpu", False, OTHER_BITS),
        ("gpu", True, ", deterministic"),
        ("cpu", False, ""),
        ("cpu", True, ", deterministic"),
    ],
)
def test_the_header_says_whether_a_resume_has_the_same_bits(platform, deterministic, said, monkeypatch):
    monkeypatch.setattr(description, "platform", lambda: platform)
    experiment = types.SimpleNamespace(train=types.SimpleNamespace(deterministic=deterministic))
    compute = types.SimpleNamespace(dtype="bfloat16", products="fp8")
    run = types.SimpleNamespace(model=types.SimpleNamespace(compute=compute), experiment=experiment)
    assert description._compute(run, ["xla"]) == "bfloat16, products fp8, attention xla" + said


def test_a_decoder_whose_length_is_split_is_announced_with_its_warning(traced):
    announced, warnings = header(t5(), "tpu", sequence=2)
    assert list(dict.fromkeys(traced)) == ["tpu_flash", "xla", "tpu_splash"]
    assert announced == "tpu_flash, xla, tpu_splash"
    assert warnings == [
        "SLOW ATTENTION: 'xla' is used on this TPU, because 'tpu_flash' has no causal mask of a part of a row, and "
        "config.mesh.sequence is 2, and 'tiled' needs unsplit lengths, and config.mesh.sequence is 2"
    ]


def test_a_two_sided_window_selects_the_kernel_that_has_it(traced):
    announced, warnings = header(t5(layer_pattern=("local",), window=128), "gpu")
    assert traced.count("cudnn") == 2 * traced.count("tiled") > 0  # Two of three are the decoder's.
    assert (announced, warnings) == ("tiled, cudnn", [])


@pytest.mark.parametrize(
    "platform, length, expected",
    [("cpu", 512, "xla"), ("gpu", 512, "cudnn"), ("tpu", 512, "tpu_flash, tpu_splash"), ("tpu", 64, "xla")],
)
def test_what_is_announced_is_traced_and_nothing_is_to_be_warned_of(traced, platform, length, expected):
    assert header(t5(), platform, length) == (expected, [])
    assert ", ".join(dict.fromkeys(traced)) == expected


def test_each_warning_is_said_once(traced):
    _, warnings = header(t5(num_layers=2, head_dim=288), "tpu")
    assert [warning.split("'")[3] for warning in warnings] == ["tpu_flash", "tpu_splash"]


def test_the_generator_of_an_electra_is_announced_too(traced):
    experiment = tiny.get_config("bert")
    experiment.model.head_dim, experiment.model.replaced_token_head = 64, True
    experiment.model.generator = Generator(num_layers=1, d_model=32, d_ff=64, num_heads=1)
    announced, warnings = header(experiment, "tpu")
    assert (announced, warnings) == ("tpu_splash, tiled", [])


def test_the_longest_rows_are_announced_where_the_first_batch_is_of_a_short_bucket(translations, cache):
    experiment = tiny.get_config("gpt")
    experiment.data.source = JsonLines(path=translations, valid_fraction=0.2)
    experiment.data.packing, experiment.data.cache_dir = OneEach(buckets=(24,)), str(cache)
    experiment.tokenizer.vocab_size = 260
    mesh = make_mesh(experiment.mesh)
    with jax.set_mesh(mesh):
        run = build_run(experiment, prepare(experiment), mesh, peers=None)
    assert run.batch_shapes["tokens"].shape == (8, 24)
    assert [spec.lengths for spec in run.work.attention_specs] == [(32, 32)]


def test_a_request_that_a_layer_cannot_serve_ends_the_run_before_it_begins(traced):
    experiment = t5()
    experiment.train.attention = "tpu_splash"
    with pytest.raises(UserError, match="config.train.attention is 'tpu_splash', which takes no bias"):
        header(experiment, "tpu")


def gpt():
    experiment = tiny.get_config("gpt")
    experiment.model.head_dim, experiment.model.position = 64, LearnedPositions(512)
    return experiment


@pytest.mark.parametrize("platform, pairs", [("gpu", 512 * 513 / 2), ("tpu", 512**2), ("cpu", 512**2)])
def test_a_run_counts_what_its_attention_skips(traced, platform, pairs):
    with run_on(platform, gpt()) as run:
        row = dict(describe(run))["FLOPs"]
    # 8 rows, 2 layers, 4 heads of 64; 2 matmuls in the forward and 4 in the backward.
    assert run.work.flops_per_step - run.work.flops_done_per_step == 2 * 6 * 8 * 2 * 4 * 64 * (512**2 - pairs)
    share = f"; {run.work.flops_done_per_step / run.work.flops_per_step:.0%} done: attention skips masked positions"
    assert row.endswith(share) == (platform == "gpu")
    assert ("done" in row) == (platform == "gpu")


def test_flops_of_a_step_are_of_the_lengths_of_its_batch(traced):
    with run_on("gpu", gpt()) as run:
        short = run.work.lengths._replace(inputs=128, targets=128)
        run.work.batches = types.SimpleNamespace(lengths_of=lambda step: (short, run.work.lengths)[step])
        assert [run.work.flops_of(step) for step in (1, 0)] == [run.work.flops_per_step, run.work.flops_at(short)]
        assert run.work.flops_done_of(1) == run.work.flops_done_per_step
        assert run.work.flops_of(0) - run.work.flops_done_of(0) == 2 * 6 * 8 * 2 * 4 * 64 * (128**2 - 128 * 129 / 2)
