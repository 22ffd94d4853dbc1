import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import MeshConfig
from pretrainax.models.heads import logit_passes
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.heads.vocabulary_loss import cast_unembedding, loss_sums
from pretrainax.sharding.mesh import make_mesh

BATCH_AXES, LENGTH, WIDTH, VOCAB = 8, 11, 16, 97


@pytest.fixture(params=["in turn", "in one pass"])
def form(request, monkeypatch):
    """Selects separate passes over the logits, as on a CPU, or one pass, as on an accelerator."""
    monkeypatch.setattr(logit_passes, "in_one_pass", lambda: request.param == "in one pass")
    return request.param


def example(has_bias=True, dtype=jnp.float32, vocab=VOCAB):
    """Returns arrays (features, unembedding, bias), targets, and unequal weights, a third of which are 0."""
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(BATCH_AXES, LENGTH, WIDTH)), dtype)
    unembedding = jnp.asarray(0.3 * rng.normal(size=(WIDTH, vocab)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=vocab), jnp.float32) if has_bias else None
    targets = jnp.asarray(rng.integers(0, vocab, (BATCH_AXES, LENGTH)), jnp.int32)
    weights = rng.uniform(0.5, 2.0, (BATCH_AXES, LENGTH)) * (rng.random((BATCH_AXES, LENGTH)) > 0.3)
    return (features, unembedding, bias), targets, jnp.asarray(weights, jnp.float32)


def plain_sums(arrays, targets, weights, z_loss=0.0, label_smoothing=0.0, logit_cap=None):
    """Returns the same sums from all logits at once, with automatic gradients."""
    features, unembedding, bias = arrays
    logits = (features @ unembedding.astype(features.dtype)).astype(jnp.float32)
    logits = logits if bias is None else logits + bias[None, None]
    logits = logits if logit_cap is None else logit_cap * jnp.tanh(logits / logit_cap)
    labels = optax.smooth_labels(jax.nn.one_hot(targets, logits.shape[-1]), label_smoothing)
    objective = optax.safe_softmax_cross_entropy(logits, labels)
    penalty = z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return {
        "objective": ((objective + penalty) * weights).sum(),
        "loss": (loss * weights).sum(),
        "accuracy": ((logits.argmax(-1) == targets) * weights).sum(),
        "z_loss": (penalty * weights).sum(),
    }


def chunked_sums(arrays, targets, weights, logit_cap=None, **options):
    names = ("features", "unembedding", "bias")
    return loss_sums(
        LanguageModelOutput(**dict(zip(names, arrays, strict=True)), logit_cap=logit_cap), targets, weights, **options
    )


def value_and_gradients(arrays, targets, weights, **options):
    def objective(arrays):
        sums = chunked_sums(arrays, targets, weights, **options)
        return sums["objective"][0] / sums["objective"][1], {name: value for name, (value, _) in sums.items()}

    (_, sums), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(arrays)
    return sums, gradients


# A chunk of 1,000 tokens contains all 88. A chunk of 16 contains 2 of the 11 tokens of each row, so the last chunk is
# padded. A chunk of 1 is raised to one token per row.
BOTH = {"z_loss": 1e-2, "label_smoothing": 0.1}
OPTIONS = ({}, {"z_loss": 1e-2}, {"label_smoothing": 0.1}, BOTH, {"logit_cap": 1.5, **BOTH})


@pytest.mark.parametrize(
    "has_bias, chunk, options",
    [(True, 16, options) for options in OPTIONS] + [(True, 1000, BOTH), (True, 1, BOTH), (False, 16, BOTH)],
)
def test_chunked_sums_and_gradients_are_the_plain_ones(form, has_bias, chunk, options):
    arrays, targets, weights = example(has_bias)
    sums, gradients = value_and_gradients(arrays, targets, weights, chunk=chunk, **options)
    assert set(sums) == {"objective", "loss", "accuracy"} | ({"z_loss"} if "z_loss" in options else set())

    def objective(arrays):
        expected = plain_sums(arrays, targets, weights, **options)
        return expected["objective"] / weights.sum(), expected

    expected_gradients, expected = jax.jit(jax.grad(objective, has_aux=True))(arrays)
    for name in sums:  # 88 float32 terms in another order
        np.testing.assert_allclose(sums[name], expected[name], rtol=1e-6, err_msg=name)
    for got, exact in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        # float32 sums of <= 97 terms in another order; the largest gradients are near 0.05
        np.testing.assert_allclose(got, exact, atol=1e-7, rtol=1e-5)


def test_second_derivatives_are_the_plain_ones(form):
    """Tests the Hessian times a direction, as Sophia computes it."""
    arrays, targets, weights = example()
    direction = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(2).normal(size=x.shape), x.dtype), arrays)

    def product(sums, **options):
        gradient = jax.grad(lambda arrays: sums(arrays, targets, weights, **OPTIONS[-1], **options))
        return jax.jit(lambda: jax.jvp(gradient, (arrays,), (direction,))[1])()

    got = product(lambda *args, **options: chunked_sums(*args, **options)["objective"][0], chunk=16)
    expected = product(lambda *args, **options: plain_sums(*args, **options)["objective"])
    for one, exact in zip(got, expected, strict=True):
        # float32 sums of <= 97 terms in another order, twice
        np.testing.assert_allclose(one, exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max())


def test_sums_are_the_same_without_gradients(form):
    arrays, targets, weights = example()
    expected, _ = value_and_gradients(arrays, targets, weights, chunk=16, **BOTH)
    for name, (value, _) in jax.jit(lambda a: chunked_sums(a, targets, weights, chunk=16, **BOTH))(arrays).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6)  # compiled into other loops


def test_counts_are_the_sum_of_the_weights():
    arrays, targets, weights = example()
    for _, count in chunked_sums(arrays, targets, weights, chunk=16).values():
        np.testing.assert_allclose(count, weights.sum(), rtol=1e-6)  # 88 float32 terms


@pytest.mark.parametrize("config", (MeshConfig(data=8), MeshConfig(data=2, fsdp=2, sequence=2)), ids=str)
def test_of_text_loss_and_accuracy_are_those_of_its_targets(config):
    arrays, targets, weights = example(vocab=96)
    text_weights = weights * (targets > 30)
    with jax.set_mesh(make_mesh(config)):
        sums = jax.jit(functools.partial(chunked_sums, chunk=16))(arrays, targets, weights, text_weights=text_weights)
    expected, whole = plain_sums(arrays, targets, text_weights), plain_sums(arrays, targets, weights)
    for name in ("loss", "accuracy"):  # 88 float32 terms in another order
        np.testing.assert_allclose(sums[f"text_{name}"], (expected[name], text_weights.sum()), rtol=1e-6)
        np.testing.assert_allclose(sums[name], (whole[name], weights.sum()), rtol=1e-6)


def test_text_weights_change_neither_objective_nor_gradients():
    arrays, targets, weights = example()
    expected = value_and_gradients(arrays, targets, weights, chunk=16, **BOTH)
    sums, gradients = value_and_gradients(arrays, targets, weights, chunk=16, text_weights=weights / 2, **BOTH)
    # Other meshes compile other loops.
    np.testing.assert_allclose(sums["objective"], expected[0]["objective"], rtol=1e-6)
    for got, exact in zip(gradients, expected[1], strict=True):
        np.testing.assert_allclose(got, exact, atol=1e-7, rtol=1e-5)
    np.testing.assert_allclose(sums["text_loss"], sums["loss"] / 2, rtol=1e-6)


SEQUENCES = (MeshConfig(data=8), MeshConfig(data=2, fsdp=2, sequence=2), MeshConfig(sequence=4))


@pytest.mark.parametrize("config", SEQUENCES, ids=str)
@pytest.mark.parametrize("chunk", [1000, 16])
def test_a_sequence_is_right_if_all_its_targets_are_that_count(config, chunk):
    arrays, targets, weights = example(vocab=96)
    features, unembedding, bias = arrays
    best = (features @ unembedding + bias[None, None]).argmax(-1)
    rng = np.random.default_rng(1)
    # There are 8 rows of 11 tokens. Most predictions are correct.
    targets = jnp.where(rng.random(targets.shape) < 0.8, best, targets)
    # The segments have any length and any order.
    segments = np.sort(rng.integers(0, 5, targets.shape), axis=1)[:, ::-1]
    found = [
        ((np.asarray(weights)[row] > 0) & (segments[row] == i), np.asarray(best == targets)[row])
        for row in range(len(segments))
        for i in np.unique(segments[row])
    ]
    right = [bool(is_right[asked].all()) for asked, is_right in found if asked.any()]
    assert 0 < sum(right) < len(right) < len(found)  # Some segments are correct, and some have no target.
    with jax.set_mesh(make_mesh(config)):
        counting = functools.partial(chunked_sums, chunk=chunk, sequences=True)
        sums = jax.jit(counting)(arrays, targets, weights, segment_ids=jnp.asarray(segments.copy()))
    assert tuple(map(float, sums["sequence_accuracy"])) == (sum(right), len(right))


def test_only_the_objective_has_gradients():
    arrays, targets, weights = example()
    gradients = jax.grad(lambda arrays: chunked_sums(arrays, targets, weights)["loss"][0])(arrays)
    assert all(not np.any(g) for g in jax.tree.leaves(gradients))


def test_bfloat16_features_give_nearly_the_float32_loss(form):
    sums, gradients = value_and_gradients(*example(dtype=jnp.bfloat16), chunk=16)
    expected, expected_gradients = value_and_gradients(*example(), chunk=16)
    # bfloat16 keeps 8 bits, so it changes an operand by at most 2^-9 = 0.2 %. Logits are a few units, and the errors
    # average over tokens.
    np.testing.assert_allclose(sums["loss"], expected["loss"], rtol=2e-3)
    # Gradients are rounded once more as operands. The error is relative to the largest entry.
    for got, exact in zip(gradients, expected_gradients, strict=True):
        assert np.abs(got - exact).max() <= 1e-2 * np.abs(exact).max()


def test_parameter_gradients_stay_float32(form):
    _, (features, unembedding, bias) = value_and_gradients(*example(dtype=jnp.bfloat16), chunk=16)
    assert (features.dtype, unembedding.dtype, bias.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)


def test_no_weight_at_all_is_a_sum_of_zero_and_gradients_of_zero(form):
    arrays, targets, weights = example()

    def objective(arrays):
        return chunked_sums(arrays, targets, jnp.zeros_like(weights), z_loss=1e-2, chunk=16)["objective"][0]

    value, gradients = jax.value_and_grad(objective)(arrays)
    assert value == 0
    assert all(not np.any(g) for g in jax.tree.leaves(gradients))  # np.any is True for a NaN.


def test_huge_logits_stay_finite(form):
    (features, unembedding, bias), targets, weights = example()
    sums, gradients = value_and_gradients((features * 1e4, unembedding, bias), targets, weights, chunk=16)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((sums, gradients)))


def test_the_logits_of_all_tokens_are_never_held(form):
    arrays, targets, weights = example(vocab=8192)
    compiled = jax.jit(lambda *args: value_and_gradients(*args, chunk=16)).lower(arrays, targets, weights).compile()
    all_logits = BATCH_AXES * LENGTH * 8192 * 4  # bytes in float32
    # The memory holds two arrays [16, V] at a time, and an array for the sum of the gradient [D, V]. These are
    # 3 · 16 · V · 4 bytes.
    assert compiled.memory_analysis().temp_size_in_bytes < 0.75 * all_logits


MESHES = (
    MeshConfig(data=8),
    MeshConfig(data=1, fsdp=8),
    MeshConfig(data=2, fsdp=2, tensor=2),
    MeshConfig(data=1, tensor=8),
)


def on_mesh(mesh):
    """Returns a jitted value_and_gradients with all arrays sharded as in a training step, and its arguments."""
    arguments = example(vocab=96)
    rows = P(("data", "fsdp"))
    specs = ((rows, P("fsdp", "tensor"), P("tensor")), rows, rows)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
    step = jax.jit(
        lambda *args: value_and_gradients(*args, chunk=4, **BOTH),
        in_shardings=shardings,
        out_shardings=(None, shardings[0]),
    )
    return step, jax.device_put(arguments, shardings)


@pytest.mark.first(2)
@pytest.mark.parametrize("config", MESHES, ids=str)
def test_sharded_loss_and_gradients_are_those_of_one_device(form, config):
    mesh = make_mesh(config)
    expected = value_and_gradients(*example(vocab=96), chunk=4, **BOTH)
    with jax.set_mesh(mesh):
        step, arguments = on_mesh(mesh)
        got = step(*arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)  # float32 sums in another order


def test_a_batch_that_the_mesh_does_not_divide_has_a_loss_too():
    (features, unembedding, bias), targets, weights = example(vocab=96)
    some = (features[:3], unembedding, bias), targets[:3], weights[:3]
    expected = value_and_gradients(*some, chunk=4)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        got = value_and_gradients(*some, chunk=4)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)  # float32 sums in another order


@pytest.mark.parametrize("config", MESHES[:2], ids=str)
def test_chunks_of_a_split_batch_need_no_communication(config):
    """Tests that devices exchange no data of tokens: the only collectives are outside of the loop over chunks."""
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        step, arguments = on_mesh(mesh)
        text = step.lower(*arguments).compile().as_text()
    pattern = r"= (.*) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\("
    inside, outside = text.split("\nENTRY ")
    assert not re.findall(pattern, inside)
    shapes = [
        tuple(map(int, s.split(","))) for s in re.findall(r"\[([\d,]+)\]", " ".join(re.findall(pattern, outside)))
    ]
    # The collectives contain the matrix and its gradient, but no [B, N, …].
    assert all(math.prod(shape) <= WIDTH * 96 for shape in shapes)
    assert all(BATCH_AXES not in shape and LENGTH not in shape for shape in shapes)


def test_the_logits_are_centered_by_the_mean_of_some_columns():
    matrix = jnp.asarray(np.random.default_rng(0).normal(-20, 1, (WIDTH, 8192)), jnp.float32)
    subtracted = matrix - cast_unembedding(matrix, jnp.float32, keeps_mean=False, products="int8")
    # float32 rounds numbers near 20 by 2^-20.
    np.testing.assert_allclose(
        subtracted, jnp.broadcast_to(matrix[:, ::8].mean(1, keepdims=True), matrix.shape), atol=1e-5
    )
    # The tolerance is four standard deviations of the mean of 1,024 columns.
    assert abs(subtracted + 20).max() < 4 * 1024**-0.5
