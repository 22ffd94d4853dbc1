"""FLOPs of products in compiled HLO, beside the count on paper."""

import itertools

import jax
import pytest

from pretrainax.adapt import BitFit, HeadAlone, LoRA, PrefixTuning
from pretrainax.data.batch import lengths_of
from pretrainax.models.flops import flops_per_step
from pretrainax.planning.hlo import Program, product_flops
from pretrainax.planning.hlo.kernels import kernels_of
from pretrainax.planning.shapes import batch_shapes
from pretrainax.sharding.mesh import make_mesh
from pretrainax.training.run import build_steps
from tests.planning.test_compiled import absent, config
from tests.support.tiers import few

pytestmark = pytest.mark.slow


def total(text: str) -> float:
    program = Program(text)
    found = [product_flops(program, one.computation, one.merged) for one in kernels_of(program)]
    assert None not in found
    runs = [program.runs[one.computation] for one in kernels_of(program)]
    return sum(n * flops for n, flops in zip(runs, found, strict=True))


@pytest.mark.parametrize(
    ("name", "variant"),
    few(
        itertools.product(["cpu", "v5e:1x1", "h100:1"], ["gpt", "t5"]),
        [("cpu", "t5"), ("h100:1", "gpt")],
    ),
)
def test_the_products_of_a_step_are_those_of_the_count_on_paper(name, variant):
    """A step makes no logits again on the way back; the rest of what is no product of the model's, and what it makes
    again on accelerators, is less than a tenth of such a small one."""
    experiment = config(variant, rows=8)
    experiment.train.attention = "xla"
    devices = jax.devices()[:1] if name == "cpu" else absent(name).devices()[:1]
    mesh = make_mesh(experiment.mesh, devices)
    with jax.set_mesh(mesh):
        shapes = batch_shapes(experiment)
        steps = build_steps(experiment, shapes, mesh)
        text = steps.step.lower(steps.abstract_state, shapes, steps.abstract_frozen).compile().as_text()
    lengths = lengths_of(shapes)
    paper = flops_per_step(experiment.model, experiment.rows_per_update, lengths.inputs, lengths.targets)
    assert total(text) == pytest.approx(paper, rel=0.1)


TUNINGS = [LoRA(rank=2), BitFit(), PrefixTuning(length=1), HeadAlone()]


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda tuning: type(tuning).__name__)
def test_a_tuned_step_makes_no_gradient_of_what_is_frozen(tuning):
    """What a tuning adds is less than a tenth."""
    experiment = config("bert", rows=8)
    experiment.train.attention, experiment.tuning = "xla", tuning
    experiment.checkpoint.fresh_heads = True
    mesh = make_mesh(experiment.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        shapes = batch_shapes(experiment)
        steps = build_steps(experiment, shapes, mesh)
        text = steps.step.lower(steps.abstract_state, shapes, steps.abstract_frozen).compile().as_text()
    lengths = lengths_of(shapes)
    step = experiment.model, experiment.rows_per_update, lengths.inputs, lengths.targets
    assert total(text) == pytest.approx(flops_per_step(*step, passes=experiment.passes), rel=0.1)
    assert flops_per_step(*step) / flops_per_step(*step, passes=experiment.passes) > 1.3


GEMM = """ENTRY %main (a: bf16[8,64,32], b: bf16[8,32,16]) -> bf16[8,64,16] {
  %a = bf16[8,64,32]{2,1,0} parameter(0)
  %b = bf16[8,32,16]{2,1,0} parameter(1)
  %c = (bf16[8,64,16]{2,1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"]}}}
  ROOT %r = bf16[8,64,16]{2,1,0} get-tuple-element(%c), index=0
}"""  # noqa: E501


def test_a_call_of_cublas_says_over_which_axes_it_sums():
    assert total(GEMM) == 2 * 8 * 64 * 16 * 32


def test_a_kernel_of_attention_says_nothing():
    program = Program(GEMM.replace("__cublas$gemm", "__cudnn$fmhaSoftmax").replace('"lhs_contr', '"x'))
    (kernel,) = kernels_of(program)
    assert product_flops(program, kernel.computation, kernel.merged) is None
