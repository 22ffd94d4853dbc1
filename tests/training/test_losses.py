import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pretrainax.config import UserError
from pretrainax.models import Outputs
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.heads.replaced_tokens import ReplacedTokensOutput
from pretrainax.training.losses import check_labels, counts, objective

WIDTH = 16


def three_heads(rows=6, length=5):
    """Makes outputs with every head, and a batch with labels for each."""
    rng = np.random.default_rng(1)
    lm = LanguageModelOutput(
        features=jnp.asarray(rng.normal(size=(rows, length, WIDTH)), jnp.float32),
        unembedding=jnp.asarray(rng.normal(size=(WIDTH, 9)), jnp.float32),
    )
    pair = jnp.asarray(rng.normal(size=(rows, 2)), jnp.float32)
    replaced = ReplacedTokensOutput(
        logits=jnp.asarray(rng.normal(size=(rows, length)), jnp.float32),
        replaced=jnp.asarray(rng.random((rows, length)) < 0.3),
        weight=50.0,
    )
    outputs = Outputs({"lm": lm, "pair": pair, "replaced": replaced})
    batch = {
        "targets": jnp.asarray(rng.integers(0, 9, (rows, length)), jnp.int32),
        "loss_weights": jnp.asarray(rng.random((rows, length)), jnp.float32),
        "segment_ids": jnp.asarray(np.arange(length)[None] < rng.integers(1, length + 1, (rows, 1)), jnp.int32),
        "pair_labels": jnp.asarray(rng.integers(0, 2, rows), jnp.int32),
    }
    return outputs, batch


@pytest.mark.slow
def test_an_objective_may_say_what_its_loss_is_divided_by(variant):
    outputs, batch = three_heads()
    asked = {name: x for name, x in batch.items() if name != "pair_labels"}
    lm = Outputs({"lm": outputs.heads["lm"]})
    value, sums = variant(lambda outputs, batch: objective(outputs, batch, counts(batch)))(lm, asked)
    own = asked | {"denominator": jnp.arange(1.0, 7.0)}
    other, same = variant(lambda outputs, batch: objective(outputs, batch, counts(batch)))(lm, own)
    np.testing.assert_allclose(other, value * asked["loss_weights"].sum() / 21, rtol=1e-6)  # float32, two divisions
    chex.assert_trees_all_equal(sums, same)  # The metric is the weighted mean.
    parts = [{name: x[rows] for name, x in own.items()} for rows in (slice(0, 2), slice(2, 6))]
    heads = [lm.heads["lm"].replace(features=lm.heads["lm"].features[rows]) for rows in (slice(0, 2), slice(2, 6))]
    split = sum(objective(Outputs({"lm": head}), part, counts(own))[0] for head, part in zip(heads, parts, strict=True))
    np.testing.assert_allclose(split, other, rtol=1e-6)  # float32, added in another order


def test_each_head_adds_its_mean(variant):
    outputs, batch = three_heads()
    value, sums = variant(lambda outputs, batch: objective(outputs, batch, counts(batch)))(outputs, batch)
    chex.assert_tree_all_finite((value, sums))
    lm, pair_logits, told = outputs.heads["lm"], outputs.heads["pair"], outputs.heads["replaced"]
    pair = optax.softmax_cross_entropy_with_integer_labels(pair_logits, batch["pair_labels"]).mean()
    real = batch["segment_ids"] > 0
    replaced = optax.sigmoid_binary_cross_entropy(told.logits, told.replaced)[real].mean()
    token = optax.softmax_cross_entropy_with_integer_labels(lm.logits(), batch["targets"])
    token = (token * batch["loss_weights"]).sum() / batch["loss_weights"].sum()
    np.testing.assert_allclose(value, token + pair + 50 * replaced, rtol=1e-6)  # float32, in another order
    means = {name: total / count for name, (total, count) in sums.items()}
    expected = {"loss": token, "pair_loss": pair, "replaced_loss": replaced}
    expected["pair_accuracy"] = (pair_logits.argmax(-1) == batch["pair_labels"]).mean()
    expected["replaced_accuracy"] = ((told.logits > 0) == told.replaced)[real].mean()
    said, there = (told.logits > 0) & real, told.replaced & real
    expected["replaced_precision"] = (said & there).sum() / said.sum()
    expected["replaced_recall"] = (said & there).sum() / there.sum()
    for name, exact in expected.items():
        np.testing.assert_allclose(means[name], exact, rtol=1e-6, err_msg=name)


def test_an_added_loss_of_a_batch_without_its_predictions_is_zero():
    outputs, batch = three_heads()

    def value(scale, count):
        added = outputs.replace(sums={"rare_loss": (scale * count, jnp.float32(count))})
        return objective(added, batch, counts(batch))[0]

    without, slope = jax.value_and_grad(value)(3.0, 0.0)
    assert without == objective(outputs, batch, counts(batch))[0] and slope == 0.0
    np.testing.assert_allclose(value(3.0, 2.0), without + 3.0, rtol=1e-6)  # float32


def test_objectives_of_micro_batches_add_up():
    outputs, batch = three_heads()
    whole, _ = objective(outputs, batch, counts(batch))
    parts = 0.0
    for rows in (slice(0, 2), slice(2, 6)):
        lm, pair, told = (outputs.heads[name] for name in ("lm", "pair", "replaced"))
        lm = lm.replace(features=lm.features[rows])
        told = told.replace(logits=told.logits[rows], replaced=told.replaced[rows])
        part = Outputs({"lm": lm, "pair": pair[rows], "replaced": told})
        parts += objective(part, {name: x[rows] for name, x in batch.items()}, counts(batch))[0]
    np.testing.assert_allclose(parts, whole, rtol=1e-6)  # float32, in another order


@pytest.mark.parametrize("missing", ("pair_labels", "head"))
def test_a_pair_head_and_labels_go_together(missing):
    outputs, batch = three_heads()
    if missing == "pair_labels":
        del batch["pair_labels"]
    else:
        del outputs.heads["pair"]
    with pytest.raises(UserError, match="config.model.pair_head and config.objective"):
        check_labels(outputs, batch)


def test_a_discriminator_without_a_generator_has_no_loss():
    outputs, batch = three_heads()
    with pytest.raises(UserError, match="set config.model.generator"):
        objective(
            Outputs(outputs.heads | {"replaced": outputs.heads["replaced"].replace(replaced=None)}),
            batch,
            counts(batch),
        )


def test_pairs_without_labels_are_left_out_of_an_evaluation():
    outputs, batch = three_heads()
    del batch["pair_labels"]
    assert "pair_loss" not in objective(outputs, batch, counts(batch))[1]


# --- sums of blocks --------------------------------------------------------------------------------------------------


def test_a_loss_of_the_blocks_is_added_and_a_metric_is_not():
    outputs, batch = three_heads()
    beside = {"balance_loss": (jnp.float32(6.0), jnp.float32(4.0)), "load": (jnp.float32(3.0), jnp.float32(4.0))}
    value, sums = objective(outputs.replace(sums=beside), batch, counts(batch))
    without, others = objective(outputs, batch, counts(batch))
    np.testing.assert_allclose(value, without + 1.5, rtol=1e-6)  # float32
    chex.assert_trees_all_close(sums, others | beside)


def test_a_loss_of_the_blocks_has_the_weight_of_its_micro_batch():
    outputs, batch = three_heads()

    def extra(rows):
        """Computes the contribution of a block loss of 2 to the objective of some rows."""
        lm = outputs.heads["lm"].replace(features=outputs.heads["lm"].features[rows])
        part = Outputs({"lm": lm})
        found = [
            objective(part.replace(sums=sums), {name: x[rows] for name, x in batch.items()}, counts(batch))[0]
            for sums in ({"balance_loss": (jnp.float32(8.0), jnp.float32(4.0))}, {})
        ]
        return found[0] - found[1]

    np.testing.assert_allclose(extra(slice(0, 2)) + extra(slice(2, 6)), 2.0, rtol=1e-5)  # float32 differences


def test_the_loss_of_the_blocks_has_gradients():
    outputs, batch = three_heads()

    def value(size):
        return objective(outputs.replace(sums={"balance_loss": (size, jnp.float32(4.0))}), batch, counts(batch))[0]

    np.testing.assert_allclose(jax.jit(jax.grad(value))(jnp.float32(6.0)), 0.25, rtol=1e-6)


# --- wrong axes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, message",
    [
        ("targets", r"targets and loss_weights are \[B, N\]"),
        ("loss_weights", r"targets and loss_weights are \[B, N\]"),
        ("segment_ids", r"logits, replaced and segment_ids are \[B, T\]"),
    ],
)
def test_an_axis_that_would_broadcast_is_named(name, message):
    outputs, batch = three_heads()
    with pytest.raises(AssertionError, match=message):
        objective(outputs, batch | {name: batch[name][:, :1]}, counts(batch))


def test_labels_of_another_shape_are_named():
    outputs, batch = three_heads()
    with pytest.raises(AssertionError, match=r"pair_labels \[B\]"):
        objective(outputs, batch | {"pair_labels": batch["pair_labels"][:1]}, counts(batch))
