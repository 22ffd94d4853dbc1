"""Tests the update with a model of two parameters: keys, counts, non-finite values, and gradients for the optimizer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pretrainax import models
from pretrainax.config import MeshConfig, ModelConfig, TrainConfig, UserError
from pretrainax.layers.compute import resolve_auto
from pretrainax.layers.hashed_keys import hashed_key
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.optim import AdamW, ScheduleFreeAdamW, Sophia
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training import train_step


class Toy:
    """A model with features a + sqrt(b), which records its dropout keys.

    At b = 0 the loss is finite and the gradient of b is not.
    """

    config = ModelConfig()

    def __init__(self, a=1.0, b=1.0):
        self.start, self.keys = (a, b), []

    def record(self, key):
        jax.debug.callback(lambda k: self.keys.append(np.asarray(k).tobytes()), jax.random.key_data(key))

    def init(self, rngs, batch, deterministic):
        self.record(rngs["params"])
        a, b = self.start
        return {"params": {"a": {"bias": jnp.full(8, a)}, "b": {"bias": jnp.full(8, b)}}}

    def apply(self, variables, batch, deterministic, rngs):
        self.record(rngs["dropout"])
        a, b = (variables["params"][k]["bias"] for k in "ab")
        features = jnp.broadcast_to((a + jnp.sqrt(b))[None, None], (*batch["tokens"].shape, 8))
        return models.Outputs({"lm": LanguageModelOutput(features, jnp.eye(8))})


EIGHT = {name: jax.ShapeDtypeStruct((8, 4), jnp.int32) for name in ("tokens", "targets")}
EIGHT["loss_weights"] = jax.ShapeDtypeStruct((8, 4), jnp.float32)
ONES = {name: jnp.ones(x.shape, x.dtype) for name, x in EIGHT.items()}


def toy_steps(toy, batches, monkeypatch, chosen=None, **train):
    """Returns the states and metrics of a step on each batch; both parameters are on one device."""
    chosen = chosen or AdamW(weight_decay=0.0)
    monkeypatch.setattr("pretrainax.sharding.rules.PARTITION_RULES", ((r"[ab]/bias", "d_model"),))
    mesh, train = make_mesh(MeshConfig(), jax.devices()[:1]), resolve_auto(TrainConfig(**train))
    with jax.set_mesh(mesh):
        optimizer = chosen.build(lambda step: 0.1, train_step.abstract_params(toy, EIGHT))
        step = train_step.make_train_step(toy, optimizer, lambda step: jnp.float32(0.1), train, mesh, chosen)
        state = train_step.make_init(toy, optimizer, EIGHT, mesh)(train.seed_of("init"))
        states, metrics = [jax.device_get(state)], []
        for batch in batches:
            state, out = step(state, batch)
            states.append(jax.device_get(state))
            metrics.append(jax.device_get(out))
    jax.effects_barrier()
    return states, metrics


def test_no_key_is_used_twice(monkeypatch):
    toy = Toy()
    toy_steps(toy, [ONES] * 3, monkeypatch, accumulate=4)
    assert len(toy.keys) == len(set(toy.keys)) == 1 + 3 * 4


def test_another_seed_draws_other_dropout(monkeypatch):
    one, other = Toy(), Toy()
    toy_steps(one, [ONES], monkeypatch, seed=0)
    toy_steps(other, [ONES], monkeypatch, seed=1)
    assert not set(one.keys) & set(other.keys)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "seeds, init_is_another, dropout_is_another",
    [
        ({"init_seed": 1}, True, False),
        ({"dropout_seed": 1}, False, True),
        ({"order_seed": 1, "mask_seed": 1}, False, False),
        ({"seed": 1, "init_seed": 0, "dropout_seed": 0}, False, False),
        ({"init_seed": 0, "order_seed": 0, "dropout_seed": 0, "mask_seed": 0}, False, False),
    ],
)
def test_a_seed_of_its_own_sets_one_use_apart(monkeypatch, seeds, init_is_another, dropout_is_another):
    one, other = Toy(), Toy()
    toy_steps(one, [ONES], monkeypatch, seed=0)
    toy_steps(other, [ONES], monkeypatch, **{"seed": 0} | seeds)
    assert [a != b for a, b in zip(one.keys, other.keys, strict=True)] == [init_is_another, dropout_is_another]


def test_replacements_are_drawn_by_the_seed_of_the_masks(monkeypatch):
    keys = [set(), set(), set()]
    for seen, seeds in zip(keys, ({}, {"mask_seed": 1}, {"dropout_seed": 1}), strict=True):
        toy = Toy()
        toy.record = lambda key: None
        toy.apply = _recording_samples(toy.apply, seen)
        toy_steps(toy, [ONES], monkeypatch, **seeds)
    assert len(keys[0]) == 1 and keys[0] == keys[2] != keys[1]


def _recording_samples(apply, seen):
    def recorded(*args, rngs, **kwargs):
        jax.debug.callback(lambda key: seen.add(np.asarray(key).tobytes()), jax.random.key_data(rngs["sample"]))
        return apply(*args, rngs=rngs, **kwargs)

    return recorded


def test_the_text_and_the_padding_of_a_batch_are_counted(monkeypatch):
    rows = {"text_tokens": np.arange(8), "text_bytes": 2**24 + np.arange(8)}  # beyond the exact integers of float32
    segments = {"segment_ids": np.arange(32).reshape(8, 4) % 4}
    batch = ONES | {name: jnp.asarray(x, jnp.int32) for name, x in (rows | segments).items()}
    _, (metrics,) = toy_steps(Toy(), [batch], monkeypatch, accumulate=2)
    assert {name: int(x) for name, x in metrics["text"].items()} == {name: x.sum() for name, x in rows.items()}
    assert tuple(metrics["sums"]["padding_fraction"]) == (8, 32)


def test_a_gradient_that_is_not_finite_is_named_and_changes_only_the_step(monkeypatch):
    states, (metrics,) = toy_steps(Toy(b=0.0), [ONES], monkeypatch)
    assert not metrics["finite"] and parameter_names(states[0].params)[metrics["bad_parameter"]] == "b/bias"
    assert states[1].step == 1
    chex.assert_trees_all_equal(states[0].replace(step=0), states[1].replace(step=0))


def test_a_loss_that_is_not_finite_is_skipped_and_training_goes_on(monkeypatch):
    poisoned = ONES | {"loss_weights": jnp.full((8, 4), jnp.inf)}
    states, metrics = toy_steps(Toy(), [poisoned, ONES], monkeypatch)
    assert [bool(m["finite"]) for m in metrics] == [False, True]
    expected, _ = toy_steps(Toy(), [ONES], monkeypatch)
    chex.assert_trees_all_equal(states[2].params, expected[1].params)


def test_a_batch_without_loss_tokens_gives_no_gradient(monkeypatch):
    empty = ONES | {"loss_weights": jnp.zeros((8, 4))}
    _, (metrics,) = toy_steps(Toy(), [empty], monkeypatch)
    assert (metrics["finite"], metrics["gradient_norm"]) == (True, 0.0)


class Diverged(Toy):
    """A toy whose blocks give a loss without a gradient."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def apply(self, *args, **kwargs):
        value = jnp.float32(self.value), jnp.float32(1.0)
        return super().apply(*args, **kwargs).replace(sums={"balance_loss": value})


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
def test_a_loss_that_is_not_finite_is_left_out_though_its_gradient_is_finite(value, monkeypatch):
    states, (metrics,) = toy_steps(Diverged(value), [ONES], monkeypatch)
    assert np.isfinite(metrics["gradient_norm"]) and metrics["gradient_norm"] > 0
    assert (bool(metrics["finite"]), int(metrics["bad_parameter"])) == (False, -1)
    chex.assert_trees_all_equal(states[0].replace(step=0), states[1].replace(step=0))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_gradient_norm_is_of_all_parameters_and_before_clipping(accumulate, monkeypatch):
    # All logits are equal, so a has the gradient 1/8 - [1 at the target]; sqrt(b) halves it for b = 1.
    _, (metrics,) = toy_steps(Toy(), [ONES], monkeypatch, accumulate=accumulate)
    squares = 7 / 8**2 + (7 / 8) ** 2
    np.testing.assert_allclose(metrics["gradient_norm"], (squares * 1.25) ** 0.5, rtol=1e-6)  # float32; clipped: 1
    np.testing.assert_allclose(metrics["sums"]["loss"], (32 * np.log(8), 32), rtol=1e-6)


def test_labels_that_no_head_learns_from_end_the_first_step(monkeypatch):
    with pytest.raises(UserError, match="config.model.pair_head and config.objective"):
        toy_steps(Toy(), [ONES | {"pair_labels": jnp.ones(8, jnp.int32), "segment_ids": ONES["tokens"]}], monkeypatch)


def toy_loss(params):
    """Returns the loss that a step of `Toy` on ONES minimises."""
    logits = params["a"]["bias"] + jnp.sqrt(params["b"]["bias"])
    return jax.nn.logsumexp(logits) - logits[1]


def test_the_gradient_is_taken_where_the_optimizer_says(monkeypatch):
    free = ScheduleFreeAdamW(b1=0.5)
    (_, _, state, _), metrics = toy_steps(Toy(), [ONES] * 3, monkeypatch, free)
    point = free.gradient_point(state.params, state.opt_state)
    norms = [
        float(optax.tree.norm(jax.grad(toy_loss)(x))) for x in (point, state.params, state.opt_state.z)
    ]  # the third step
    np.testing.assert_allclose(metrics[2]["gradient_norm"], norms[0], rtol=1e-5)  # float32 sums over the tokens
    assert min(abs(norm - norms[0]) for norm in norms[1:]) > 1e-3


@pytest.mark.slow
def test_the_curvature_is_that_of_the_loss_of_all_micro_batches(monkeypatch):
    (start, state), _ = toy_steps(Toy(), [ONES], monkeypatch, Sophia(b2=0.0, clip_norm=None), accumulate=4)
    hessian = jax.hessian(lambda x: toy_loss({"a": {"bias": x[:8]}, "b": {"bias": x[8:]}}))(
        jnp.concatenate([start.params["a"]["bias"], start.params["b"]["bias"]])
    )
    (found,) = (x.nu for x in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "nu")) if hasattr(x, "nu"))
    found = np.concatenate([found["a"]["bias"], found["b"]["bias"]])
    # The estimate is signs · (Hessian · signs) for one draw of signs. It differs from the diagonal by the other entries
    # with random signs.
    assert np.all(np.abs(found - np.diag(hessian)) <= np.abs(hessian).sum(1) - np.abs(np.diag(hessian)) + 1e-6)
    key = jax.random.fold_in(jax.random.key(0), 0)
    signs = optax.tree.random_like(key, start.params, jax.random.rademacher)
    signs = np.concatenate([signs["a"]["bias"], signs["b"]["bias"]])
    np.testing.assert_allclose(found, signs * (hessian @ signs), rtol=1e-4, atol=1e-6)  # float32 sums over the tokens


class Telling(Toy):
    """A toy that records the arguments of `apply`."""

    def __init__(self):
        super().__init__()
        self.told = set()

    def apply(self, variables, batch, deterministic, rngs):
        self.told.add((deterministic, *((use, jax.random.key_impl(key)) for use, key in sorted(rngs.items()))))
        return super().apply(variables, batch, deterministic, rngs)


def test_training_has_dropout_and_keys_for_each_use(monkeypatch):
    toy = Telling()
    _, metrics = toy_steps(toy, [ONES] * 2, monkeypatch)
    of_jax = jax.random.key(0)
    dropout, sample = ("dropout", hashed_key(of_jax)), ("sample", of_jax)
    assert toy.told == {(False, *((use, jax.random.key_impl(key)) for use, key in (dropout, sample)))}
    assert [int(m["bad_parameter"]) for m in metrics] == [-1, -1]


def test_each_update_is_one_step(monkeypatch):
    states, _ = toy_steps(Toy(), [ONES] * 2, monkeypatch)
    assert [int(state.step) for state in states] == [0, 1, 2]


def test_the_parameter_at_fault_is_told_by_its_number(monkeypatch):
    _, (metrics,) = toy_steps(Toy(b=0.0), [ONES], monkeypatch)
    assert int(metrics["bad_parameter"]) == 1  # not -1, which is also the index of the last one
