"""Compiles the attention backends and the loss, forward and backward, for accelerators that this machine lacks."""

import dataclasses
import importlib.util
import math
import re
from typing import Optional

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import UserError
from pretrainax.layers.attention import Mask, attention
from pretrainax.layers.attention_spec import Weights
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.heads.vocabulary_loss import loss_sums
from pretrainax.planning.hlo import Program
from pretrainax.planning.topologies import Topology
from pretrainax.sharding.axes import AXES, BATCH_AXES
from tests.support.tiers import few

pytestmark = pytest.mark.aot


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # The parent package is missing.
        return False


def mesh_of(topology):
    """Builds a mesh of 4 devices: 2 split the batch, and 2 split heads and vocabulary."""
    try:
        devices = np.array(Topology.parse(topology).devices()).reshape(2, 1, 1, 1, 1, 2)
    except UserError as e:
        pytest.skip(str(e))
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@pytest.fixture(scope="module")
def tpu_mesh():
    return mesh_of("v5e:2x2")


@pytest.fixture(scope="module")
def gpu_mesh():
    return mesh_of("h100:4")


@dataclasses.dataclass(frozen=True)
class Case:
    lengths: tuple[int, int]  # lengths of the queries and of the keys
    has_bias: bool = False
    causal: bool = True
    window: Optional[int] = None
    mixed: bool = False  # as in a scan over layers, some of which have the window
    cap: Optional[float] = None
    prefix: bool = False
    single_segment: bool = False  # Each row contains one segment.
    width: int = 64  # width of a head


def compile_attention(mesh, implementation, case):
    """Compiles a step with 8 rows per device, 8 heads, 4 key heads, bfloat16 and segment ids."""
    (t, s), (heads, key_heads, width) = case.lengths, (8, 4, case.width)

    def shape(sizes, dtype, *spec):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))

    q = shape((16, t, heads, width), jnp.bfloat16, BATCH_AXES, None, "tensor")
    k = shape((16, s, key_heads, width), jnp.bfloat16, BATCH_AXES, None, "tensor")
    bias = shape((1, heads, t, s), jnp.float32, None, "tensor") if case.has_bias else None
    ids = shape((16, t), jnp.int32, BATCH_AXES), shape((16, s), jnp.int32, BATCH_AXES)

    def step(q, k, v, bias, mask):
        def out(q, k, v, bias):
            return attention(
                q,
                k,
                v,
                mask=mask,
                bias=bias,
                scale=0.125,
                implementation=implementation,
                weights=Weights(logit_cap=case.cap),
            )

        out, backward = jax.vjp(out, q, k, v, bias)
        return out, backward(out)

    with jax.set_mesh(mesh):
        mask = Mask(
            case.causal,
            *ids,
            window=case.window,
            windowed=shape((), jnp.bool_) if case.mixed else None,
            prefix=ids[1] if case.prefix else None,
            single_segment=case.single_segment,
        )
        return jax.jit(step).lower(q, k, k, bias, mask).compile()


# Shapes of GPT and LLaMA, and of T5's encoder, decoder and cross-attention. Span corruption shortens 512 tokens to 114
# targets.
SHAPES = {
    "causal": Case(lengths=(1024, 1024), has_bias=False, causal=True),
    "encoder with bias": Case(lengths=(512, 512), has_bias=True, causal=False),
    "decoder with bias": Case(lengths=(114, 114), has_bias=True, causal=True),
    "cross": Case(lengths=(114, 512), has_bias=False, causal=False),
}
WITHOUT_BIAS = ("causal", "cross")
# Shapes of Mistral, ModernBERT and Gemma 2. One scan contains both kinds of Gemma 2's layers.
WINDOWS = {
    "window": Case(lengths=(1024, 1024), window=256),
    "two-sided window": Case(lengths=(1024, 1024), window=256, causal=False),
    "mixed": Case(lengths=(1024, 1024), window=256, mixed=True),
    "mixed with a cap": Case(lengths=(1024, 1024), window=256, mixed=True, cap=50.0),
}


# Heads of Gemma; row lengths of UL2.
WIDE_OR_ODD = {
    "wide": Case(lengths=(1024, 1024), width=256),
    "wide and mixed": Case(lengths=(1024, 1024), width=256, window=512, mixed=True),
    "odd with bias": Case(lengths=(507, 507), has_bias=True),
    "odd": Case(lengths=(507, 512), causal=False, single_segment=True),
}
PREFIXES = {
    "prefix": Case(lengths=(1024, 1024), prefix=True),
    "prefix and mixed": Case(lengths=(1024, 1024), window=256, mixed=True, prefix=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", few(SHAPES, ["decoder with bias"]))
def test_xla_compiles_for_tpu(tpu_mesh, shape):
    assert compile_attention(tpu_mesh, "xla", SHAPES[shape])


@pytest.mark.slow
@pytest.mark.parametrize(
    "implementation, shape",
    [("tpu_splash", shape) for shape in WITHOUT_BIAS] + [("tpu_flash", shape) for shape in SHAPES],
)
def test_tpu_kernels_compile_to_three_kernels(tpu_mesh, implementation, shape):
    text = compile_attention(tpu_mesh, implementation, SHAPES[shape]).as_text()
    # the forward; the gradient of q; the gradients of k and v
    assert text.count('custom_call_target="tpu_custom_call"') == 3


@pytest.mark.slow
@pytest.mark.parametrize("shape", few(WINDOWS, ["mixed with a cap"]))
def test_splash_compiles_with_windows(tpu_mesh, shape):
    text = compile_attention(tpu_mesh, "tpu_splash", WINDOWS[shape]).as_text()
    kinds = 2 if WINDOWS[shape].mixed else 1
    assert text.count('custom_call_target="tpu_custom_call"') == 3 * kinds


@pytest.mark.slow
@pytest.mark.parametrize("shape", few(SHAPES | WINDOWS | PREFIXES, ["mixed"]))
def test_xla_compiles_for_h100(gpu_mesh, shape):
    assert compile_attention(gpu_mesh, "xla", (SHAPES | WINDOWS | PREFIXES)[shape])


@pytest.mark.first(6)
@pytest.mark.parametrize("shape", [*SHAPES, "window", "mixed", *PREFIXES, *WIDE_OR_ODD])
def test_cudnn_compiles_to_two_kernels(gpu_mesh, shape):
    if not installed("nvidia.cudnn"):
        pytest.skip("cuDNN is not installed: pip install 'pretrainax[cuda13]'")
    text = compile_attention(gpu_mesh, "cudnn", (SHAPES | WINDOWS | PREFIXES | WIDE_OR_ODD)[shape]).as_text()
    kinds = 2 if "mixed" in shape else 1
    assert len(re.findall(r'custom_call_target="__cudnn\$fmha', text)) == 2 * kinds  # forward and backward


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_one_text_have_no_mask_or_bias_of_their_own(gpu_mesh, shape):
    """Tests that all rows share T5's bias and its gradient: no array holds logits for the 8 rows of a device."""
    if not installed("nvidia.cudnn"):
        pytest.skip("cuDNN is not installed: pip install 'pretrainax[cuda13]'")
    case = SHAPES[shape]
    (t, s), padded = case.lengths, dataclasses.replace(case, single_segment=True)
    per_row = re.compile(rf"(bf16|f32|pred)\[8,(4,|1,)?{t},{s}\]")
    assert per_row.search(compile_attention(gpu_mesh, "cudnn", case).as_text())
    text = compile_attention(gpu_mesh, "cudnn", padded).as_text()
    assert not per_row.search(text) and len(re.findall(r'custom_call_target="__cudnn\$fmha', text)) == 2


def compile_loss(mesh, has_bias=False, cap=None, vocab=50304, **options):
    """Compiles the loss of GPT-2 124M for 4,096 tokens per device, in chunks of 1,024."""
    rows, length, width = 8, 1024, 768

    def shape(sizes, dtype, *spec):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def step(features, unembedding, bias, targets, weights):
        def objective(features, unembedding, bias):
            outputs = LanguageModelOutput(features, unembedding, bias if has_bias else None, cap)
            return loss_sums(outputs, targets, weights, chunk=1024, **options)["objective"][0]

        return jax.value_and_grad(objective, (0, 1, 2))(features, unembedding, bias)

    with jax.set_mesh(mesh):
        return (
            jax.jit(step)
            .lower(
                shape((rows, length, width), jnp.bfloat16, BATCH_AXES),
                shape((width, vocab), jnp.float32, "fsdp", "tensor"),
                shape((vocab,), jnp.float32, "tensor"),
                shape((rows, length), jnp.int32, BATCH_AXES),
                shape((rows, length), jnp.float32, BATCH_AXES),
            )
            .compile()
        )


@pytest.mark.parametrize("mesh", few(("tpu_mesh", "gpu_mesh"), ["gpu_mesh"]))
def test_loss_never_holds_a_devices_logits(mesh, request):
    held = compile_loss(request.getfixturevalue(mesh)).memory_analysis().temp_size_in_bytes
    assert held < 4096 * 50304 // 2 * 4  # bytes of the device's float32 logits, which cover half of the vocabulary


def arrays_of(program, numbers):
    """Returns the arrays with `numbers` elements that kernels write, and those that kernels read."""
    written, read = [], []
    for name in set(program.computations) - program.fused:
        made = program.computations[name]
        views = {x.name for x in made.values() if x.opcode in ("parameter", "get-tuple-element", "tuple", "bitcast")}
        for x in (x for x in made.values() if x.opcode not in ("while", "call") and x.name not in views):
            written += [shape for shape in x.shapes if math.prod(shape.dims) == numbers]
            operands = [shape for name in x.operands if name in made for shape in made[name].shapes]
            read += [shape for shape in operands if math.prod(shape.dims) == numbers]
    return written, read


SMOOTH = {"z_loss": 1e-4, "label_smoothing": 0.1}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "options",
    few(
        [{}, SMOOTH, {"cap": 30.0}, {"has_bias": True}, {"has_bias": True, "cap": 30.0, **SMOOTH}],
        [{}, {"has_bias": True, "cap": 30.0, **SMOOTH}],
    ),
    ids=["plain", "smooth", "cap", "bias", "all"],
)
def test_kernels_read_logits_twice_and_write_them_once(gpu_mesh, options):
    """Tests that kernels also write the logits' gradient once, that products read it, and that all are bfloat16."""
    written, read = arrays_of(Program(compile_loss(gpu_mesh, **options).as_text()), 1024 * 50304 // 2)
    products = 3 if options.get("has_bias") else 2  # gradients of the features, of the matrix, and of the bias
    assert [shape.dtype for shape in written] == ["bf16"] * 2
    assert [shape.dtype for shape in read] == ["bf16"] * (2 + products)


@pytest.mark.first(1)
@pytest.mark.parametrize("options", [{}, {"has_bias": True, "cap": 30.0, **SMOOTH}], ids=["plain", "all"])
def test_a_padded_vocabulary_has_no_other_array_of_logits(gpu_mesh, options):
    """Tests that GPT-2's 50,257 columns are computed as 50,304 columns, without a kernel that copies them."""
    mesh = Mesh(gpu_mesh.devices.reshape(4, 1, 1, 1, 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    program = Program(compile_loss(mesh, vocab=50257, **options).as_text())
    assert arrays_of(program, 1024 * 50257) == ([], [])
    written, read = arrays_of(program, 1024 * 50304)
    assert [len(written), len(read)] == [2, 5 if options else 4]  # the same counts as in the test above
