import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import MeshConfig, UserError
from pretrainax.models import Outputs
from pretrainax.sharding.mesh import make_mesh
from pretrainax.training.losses import check_labels, counts, loss_sums, objective

BATCH_AXES, LENGTH, WIDTH, VOCAB = 8, 11, 16, 97


def example(has_bias=True, dtype=jnp.float32, vocab=VOCAB):
    """Arrays (features, unembedding, bias), targets and unequal weights with a third of them 0."""
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(BATCH_AXES, LENGTH, WIDTH)), dtype)
    unembedding = jnp.asarray(0.3 * rng.normal(size=(WIDTH, vocab)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=vocab), jnp.float32) if has_bias else None
    targets = jnp.asarray(rng.integers(0, vocab, (BATCH_AXES, LENGTH)), jnp.int32)
    weights = rng.uniform(0.5, 2.0, (BATCH_AXES, LENGTH)) * (rng.random((BATCH_AXES, LENGTH)) > 0.3)
    return (features, unembedding, bias), targets, jnp.asarray(weights, jnp.float32)


def plain_sums(arrays, targets, weights, z_loss=0.0, label_smoothing=0.0, logit_cap=None):
    """The same sums with all logits at once and automatic gradients."""
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
    return loss_sums(Outputs(**dict(zip(names, arrays, strict=True)), logit_cap=logit_cap), targets, weights, **options)


def value_and_gradients(arrays, targets, weights, **options):
    def objective(arrays):
        sums = chunked_sums(arrays, targets, weights, **options)
        return sums["objective"][0] / sums["objective"][1], {name: value for name, (value, _) in sums.items()}

    (_, sums), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(arrays)
    return sums, gradients


# A chunk of 1,000 tokens is all 88; 16 is 2 of each row's 11, so the last chunk is filled up; 1 is raised to one a row.
BOTH = {"z_loss": 1e-2, "label_smoothing": 0.1}
OPTIONS = ({}, {"z_loss": 1e-2}, {"label_smoothing": 0.1}, BOTH, {"logit_cap": 1.5, **BOTH})


@pytest.mark.parametrize(
    "has_bias, chunk, options",
    [(True, 16, options) for options in OPTIONS] + [(True, 1000, BOTH), (True, 1, BOTH), (False, 16, BOTH)],
)
def test_chunked_sums_and_gradients_are_the_plain_ones(has_bias, chunk, options):
    arrays, targets, weights = example(has_bias)
    sums, gradients = value_and_gradients(arrays, targets, weights, chunk=chunk, **options)
    assert set(sums) == {"objective", "loss", "accuracy"} | ({"z_loss"} if "z_loss" in options else set())

    def objective(arrays):
        expected = plain_sums(arrays, targets, weights, **options)
        return expected["objective"] / weights.sum(), expected

    expected_gradients, expected = jax.jit(jax.grad(objective, has_aux=True))(arrays)
    for name in sums:  # 88 float32 terms added in another order
        np.testing.assert_allclose(sums[name], expected[name], rtol=1e-6, err_msg=name)
    for got, exact in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        # float32 sums of <= 97 terms in another order; the largest gradients are near 0.05
        np.testing.assert_allclose(got, exact, atol=1e-7, rtol=1e-5)


def test_sums_are_the_same_without_gradients():
    arrays, targets, weights = example()
    expected, _ = value_and_gradients(arrays, targets, weights, chunk=16, **BOTH)
    for name, (value, _) in jax.jit(lambda a: chunked_sums(a, targets, weights, chunk=16, **BOTH))(arrays).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6)  # compiled into other loops


def test_counts_are_the_sum_of_the_weights():
    arrays, targets, weights = example()
    for _, count in chunked_sums(arrays, targets, weights, chunk=16).values():
        np.testing.assert_allclose(count, weights.sum(), rtol=1e-6)  # 88 float32 terms


def test_only_the_objective_has_gradients():
    arrays, targets, weights = example()
    gradients = jax.grad(lambda arrays: chunked_sums(arrays, targets, weights)["loss"][0])(arrays)
    assert all(not np.any(g) for g in jax.tree.leaves(gradients))


def test_bfloat16_features_give_nearly_the_float32_loss():
    sums, gradients = value_and_gradients(*example(dtype=jnp.bfloat16), chunk=16)
    expected, expected_gradients = value_and_gradients(*example(), chunk=16)
    # bfloat16 keeps 8 bits: an operand is off by <= 2^-9 = 0.2 %, logits are a few units, errors average over tokens
    np.testing.assert_allclose(sums["loss"], expected["loss"], rtol=2e-3)
    # gradients are rounded once more as operands; measured against the largest entry
    for got, exact in zip(gradients, expected_gradients, strict=True):
        assert np.abs(got - exact).max() <= 1e-2 * np.abs(exact).max()


def test_parameter_gradients_stay_float32():
    _, (features, unembedding, bias) = value_and_gradients(*example(dtype=jnp.bfloat16), chunk=16)
    assert (features.dtype, unembedding.dtype, bias.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)


def test_no_weight_at_all_is_a_sum_of_zero_and_gradients_of_zero():
    arrays, targets, weights = example()

    def objective(arrays):
        return chunked_sums(arrays, targets, jnp.zeros_like(weights), z_loss=1e-2, chunk=16)["objective"][0]

    value, gradients = jax.value_and_grad(objective)(arrays)
    assert value == 0
    assert all(not np.any(g) for g in jax.tree.leaves(gradients))  # np.any is True of a NaN


def test_huge_logits_stay_finite():
    (features, unembedding, bias), targets, weights = example()
    sums, gradients = value_and_gradients((features * 1e4, unembedding, bias), targets, weights, chunk=16)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((sums, gradients)))


def test_the_logits_of_all_tokens_are_never_held():
    arrays, targets, weights = example(vocab=8192)
    compiled = jax.jit(lambda *args: value_and_gradients(*args, chunk=16)).lower(arrays, targets, weights).compile()
    all_logits = BATCH_AXES * LENGTH * 8192 * 4  # bytes in float32
    # two arrays [16, V] at a time, and what holds the gradient [D, V] while it is summed: 3 · 16 · V · 4 bytes
    assert compiled.memory_analysis().temp_size_in_bytes < 0.75 * all_logits


MESHES = (
    MeshConfig(data=8),
    MeshConfig(data=1, fsdp=8),
    MeshConfig(data=2, fsdp=2, tensor=2),
    MeshConfig(data=1, tensor=8),
)


def on_mesh(mesh):
    """A jitted value_and_gradients with everything sharded as in a training step, and its arguments."""
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


@pytest.mark.parametrize("config", MESHES, ids=str)
def test_sharded_loss_and_gradients_are_those_of_one_device(config):
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
    """Nothing of a token's crosses devices: the only collectives are outside the loop over chunks."""
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
    assert all(math.prod(shape) <= WIDTH * 96 for shape in shapes)  # the matrix and its gradient, no [B, N, …]
    assert all(BATCH_AXES not in shape and LENGTH not in shape for shape in shapes)


# --- several heads -------------------------------------------------------------------------------------------------


def three_heads(rows=6, length=5):
    """Outputs with every head, and a batch with labels for each."""
    rng = np.random.default_rng(1)
    outputs = Outputs(
        features=jnp.asarray(rng.normal(size=(rows, length, WIDTH)), jnp.float32),
        unembedding=jnp.asarray(rng.normal(size=(WIDTH, 9)), jnp.float32),
        pair_logits=jnp.asarray(rng.normal(size=(rows, 2)), jnp.float32),
        replaced_logits=jnp.asarray(rng.normal(size=(rows, length)), jnp.float32),
        replaced=jnp.asarray(rng.random((rows, length)) < 0.3),
        replaced_weight=50.0,
    )
    batch = {
        "targets": jnp.asarray(rng.integers(0, 9, (rows, length)), jnp.int32),
        "loss_weights": jnp.asarray(rng.random((rows, length)), jnp.float32),
        "segment_ids": jnp.asarray(np.arange(length)[None] < rng.integers(1, length + 1, (rows, 1)), jnp.int32),
        "pair_labels": jnp.asarray(rng.integers(0, 2, rows), jnp.int32),
    }
    return outputs, batch


def test_each_head_adds_its_mean():
    outputs, batch = three_heads()
    value, sums = objective(outputs, batch, counts(batch))
    pair = optax.softmax_cross_entropy_with_integer_labels(outputs.pair_logits, batch["pair_labels"]).mean()
    real = batch["segment_ids"] > 0
    replaced = optax.sigmoid_binary_cross_entropy(outputs.replaced_logits, outputs.replaced)[real].mean()
    token = optax.softmax_cross_entropy_with_integer_labels(outputs.logits(), batch["targets"])
    token = (token * batch["loss_weights"]).sum() / batch["loss_weights"].sum()
    np.testing.assert_allclose(value, token + pair + 50 * replaced, rtol=1e-6)  # float32, in another order
    means = {name: total / count for name, (total, count) in sums.items()}
    expected = {"loss": token, "pair_loss": pair, "replaced_loss": replaced}
    expected["pair_accuracy"] = (outputs.pair_logits.argmax(-1) == batch["pair_labels"]).mean()
    expected["replaced_accuracy"] = ((outputs.replaced_logits > 0) == outputs.replaced)[real].mean()
    said, there = (outputs.replaced_logits > 0) & real, outputs.replaced & real
    expected["replaced_precision"] = (said & there).sum() / said.sum()
    expected["replaced_recall"] = (said & there).sum() / there.sum()
    for name, exact in expected.items():
        np.testing.assert_allclose(means[name], exact, rtol=1e-6, err_msg=name)


def test_objectives_of_micro_batches_add_up():
    outputs, batch = three_heads()
    whole, _ = objective(outputs, batch, counts(batch))
    parts = 0.0
    for rows in (slice(0, 2), slice(2, 6)):
        part = outputs.replace(
            **{
                name: getattr(outputs, name)[rows]
                for name in ("features", "pair_logits", "replaced_logits", "replaced")
            }
        )
        parts += objective(part, {name: x[rows] for name, x in batch.items()}, counts(batch))[0]
    np.testing.assert_allclose(parts, whole, rtol=1e-6)  # float32, in another order


@pytest.mark.parametrize("missing", ("pair_labels", "pair_logits"))
def test_a_pair_head_and_labels_go_together(missing):
    outputs, batch = three_heads()
    if missing == "pair_labels":
        del batch["pair_labels"]
    else:
        outputs = outputs.replace(pair_logits=None)
    with pytest.raises(UserError, match="config.model.pair_head and config.objective"):
        check_labels(outputs, batch)


def test_a_discriminator_without_a_generator_has_no_loss():
    outputs, batch = three_heads()
    with pytest.raises(UserError, match="set config.model.generator"):
        objective(outputs.replace(replaced=None), batch, counts(batch))


def test_pairs_without_labels_are_left_out_of_an_evaluation():
    outputs, batch = three_heads()
    del batch["pair_labels"]
    assert "pair_loss" not in objective(outputs, batch, counts(batch))[1]
