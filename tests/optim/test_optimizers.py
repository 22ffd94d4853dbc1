import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import Phase, to_json
from pretrainax.optim import SM3, SOAP, Adafactor, AdEMAMix, Muon, ScheduleFreeAdamW, Sophia
from pretrainax.optim.decay import decay_mask
from pretrainax.optim.optimizers import AdamW, Lamb, Lion, Optimizer, StableAdamW
from pretrainax.optim.schedules import (
    WarmupConstant,
    WarmupCosine,
    WarmupStableDecay,
)
from pretrainax.sharding.param_paths import parameter_names
from tests.support import tables, tiny


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def adamw(**fields):
    """Builds AdamW with powers of two as b1 and b2, so that 1 - b² is exact in float32 (1 - 0.999 errs by 1e-5)."""
    return AdamW(b1=0.5, b2=0.75, **fields)


def trained(optimizer, params, gradients, schedule=None):
    """Returns `params` after one update for each tree in `gradients`."""
    tx = optimizer.build(schedule or WarmupConstant(0).build(optimizer.learning_rate, 100), params)
    state = tx.init(params)
    for step, gradient in enumerate(gradients):
        updates, state = tx.update(gradient, state, params, step=jnp.int32(step))
        params = jax.tree.map(jnp.add, params, updates)
    return params, state


# --- AdamW ---------------------------------------------------------------------------------------------------------


def test_one_step_by_hand():
    # The norm 5 is below clip_norm 10: g = (3, -4); m̂ = g, v̂ = g²; u = m̂ / (sqrt(v̂) + 1) = (3/4, -4/5).
    # w - 0.1 (u + 0.5 w) = (2 - 0.1 (0.75 + 1), 1 - 0.1 (-0.8 + 0.5))
    optimizer = adamw(learning_rate=0.1, epsilon=1.0, weight_decay=0.5, clip_norm=10.0)
    params, _ = trained(optimizer, {"kernel": jnp.array([2.0, 1.0])}, [{"kernel": jnp.array([3.0, -4.0])}])
    chex.assert_trees_all_close(params, {"kernel": jnp.array([1.825, 1.03])}, rtol=1e-6)  # float32 rounding


def test_a_gradient_above_clip_norm_is_scaled_down_to_it():
    # The norm over all parameters is 5 and is clipped to 1: g = (0.6, -0.8); g / (|g| + 1) = (0.375, -0.4444).
    optimizer = adamw(learning_rate=1.0, epsilon=1.0, weight_decay=0.0, clip_norm=1.0)
    zeros = {"a": {"kernel": jnp.zeros(1)}, "b": {"kernel": jnp.zeros(1)}}
    gradient = {"a": {"kernel": jnp.array([3.0])}, "b": {"kernel": jnp.array([-4.0])}}
    params, _ = trained(optimizer, zeros, [gradient])
    expected = {"a": {"kernel": jnp.array([-0.6 / 1.6])}, "b": {"kernel": jnp.array([0.8 / 1.8])}}
    chex.assert_trees_all_close(params, expected, rtol=1e-6)  # float32 rounding


def test_only_matrices_and_embeddings_decay():
    ones = {"mlp": {"up": {"kernel": jnp.ones(1), "bias": jnp.ones(1)}}, "norm": {"scale": jnp.ones(1)}}
    optimizer = adamw(learning_rate=1.0, weight_decay=0.25)
    params, _ = trained(optimizer, ones, [jax.tree.map(jnp.zeros_like, ones)])
    expected = {"mlp": {"up": {"kernel": jnp.full(1, 0.75), "bias": jnp.ones(1)}}, "norm": {"scale": jnp.ones(1)}}
    chex.assert_trees_all_equal(params, expected)


@pytest.mark.parametrize("field, decaying", [(f"decay_{name}", name) for name in ("embeddings", "norms", "biases")])
def test_a_field_selects_one_more_group_that_decays(field, decaying):
    paths = {"embeddings": "token_embedding/embedding", "norms": "norm/scale", "biases": "norm/bias"}
    ones = {path: jnp.ones(1) for path in ("kernel", *paths.values())}
    fields = {f"decay_{name}": False for name in ("embeddings", "norms", "biases")} | {field: True}
    params, _ = trained(AdamW(1.0, weight_decay=0.25, **fields), ones, [jax.tree.map(jnp.zeros_like, ones)])
    decayed = [path for path, value in params.items() if value[0] == 0.75]
    assert sorted(decayed) == sorted(["kernel", paths[decaying]])


def test_updates_match_torch():
    torch = pytest.importorskip("torch", reason="torch is the oracle; it comes with the extra `parity`")
    rng = np.random.default_rng(0)
    start = rng.normal(size=(4, 3)).astype(np.float32)
    gradients = rng.normal(size=(5, 4, 3)).astype(np.float32)
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    other = torch.optim.AdamW([weight], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for gradient in gradients:
        weight.grad = torch.from_numpy(gradient.copy())
        torch.nn.utils.clip_grad_norm_([weight], 1.5)
        other.step()
    optimizer = AdamW(learning_rate=1e-2, b1=0.8, b2=0.95, epsilon=1e-6, weight_decay=0.1, clip_norm=1.5)
    params, _ = trained(optimizer, {"kernel": jnp.asarray(start)}, [{"kernel": jnp.asarray(g)} for g in gradients])
    # Both sides use float32. Torch adds 1e-6 to the norm in clipping. Adam's division cancels this, except for epsilon.
    np.testing.assert_allclose(params["kernel"], weight.detach().numpy(), rtol=2e-6, atol=1e-7)


def test_rms_scaling_takes_each_stacked_layer_by_itself():
    # In the first step, the update is g / |g| = 1 times max(1e-3, RMS). The layers have the RMS 4, 0.5 and 0.
    kernel = jnp.array([4.0, 0.5, 0.0]).reshape(3, 1, 1) * jnp.ones((3, 2, 2))
    params = {"encoder": {"blocks": {"mlp": {"up": {"kernel": kernel}}}}}
    optimizer = adamw(learning_rate=0.1, weight_decay=0.0, clip_norm=None, scale_by_parameter_rms=True)
    new, _ = trained(optimizer, params, [jax.tree.map(jnp.ones_like, params)])
    moved = (kernel - new["encoder"]["blocks"]["mlp"]["up"]["kernel"])[:, 0, 0]
    # epsilon is 1e-8. In float32, 4 - 0.4 has a rounding error of 2e-7, relative to the difference of 0.4.
    np.testing.assert_allclose(moved, [0.4, 0.05, 1e-4], rtol=2e-6)


def test_rms_scaling_takes_an_unstacked_matrix_whole():
    # The RMS is sqrt(25 / 4) = 2.5.
    params = {"token_embedding": {"embedding": jnp.array([[3.0], [4.0], [0.0], [0.0]])}}
    optimizer = adamw(learning_rate=1.0, weight_decay=0.0, clip_norm=None, scale_by_parameter_rms=True)
    new, _ = trained(optimizer, params, [jax.tree.map(jnp.ones_like, params)])
    moved = params["token_embedding"]["embedding"] - new["token_embedding"]["embedding"]
    np.testing.assert_allclose(moved, np.full((4, 1), 2.5), rtol=1e-6)  # float32 rounding


@pytest.mark.first(3)
@pytest.mark.parametrize("optimizer", [adamw(scale_by_parameter_rms=True), Lamb()], ids=["AdamW", "Lamb"])
@pytest.mark.parametrize("path", ["encoder/blocks/mlp/up/kernel", "token_embedding/embedding"])
def test_an_update_keeps_shapes_and_dtypes_and_is_finite(optimizer, path):
    params = jax.random.normal(jax.random.key(0), (3, 4, 2) if "blocks" in path else (4, 2))
    for name in reversed(path.split("/")):
        params = {name: params}
    new, state = trained(optimizer, params, [jax.tree.map(jnp.ones_like, params)] * 2)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, params)
    chex.assert_tree_all_finite((new, state))


def test_an_update_is_the_same_with_and_without_jit():
    params = {"mlp": {"up": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}}}
    tx = adamw(learning_rate=0.1).build(WarmupConstant(0).build(0.1, 100), params)
    gradient, state = jax.tree.map(jnp.ones_like, params), tx.init(params)
    update = chex.assert_max_traces(lambda step: tx.update(gradient, state, params, step=step), n=1)
    jitted = jax.jit(update)
    for step in range(3):
        expected = tx.update(gradient, state, params, step=jnp.int32(step))
        # Fused products have other rounding errors.
        chex.assert_trees_all_close(jitted(jnp.int32(step)), expected, rtol=1e-6)


# --- LAMB ----------------------------------------------------------------------------------------------------------


def lamb(**fields):
    return Lamb(b1=0.5, b2=0.75, clip_norm=None, **fields)


def test_a_step_of_lamb_by_hand():
    # g = (3, -4). u = m̂ / (sqrt(v̂) + 1) + 0.5 w = (3/4, -4/5) + 0.5 w = (2.25, 1.2). |u| = 2.55 and |w| = 5, so the
    # result is w - 0.1 · 5 / 2.55 · u.
    optimizer = lamb(learning_rate=0.1, epsilon=1.0, weight_decay=0.5)
    start, gradient = ({"embedding_projection": {"kernel": jnp.array([[3.0, x]])}} for x in (4.0, -4.0))
    params, _ = trained(optimizer, start, [gradient])
    expected = [[3 - 0.5 / 2.55 * 2.25, 4 - 0.5 / 2.55 * 1.2]]
    np.testing.assert_allclose(params["embedding_projection"]["kernel"], expected, rtol=1e-6)


def test_lamb_takes_each_stacked_layer_for_itself():
    # The last layer takes a plain Adam step.
    kernel = jnp.stack([jnp.full((2, 2), 4.0), jnp.full((2, 2), 0.5), jnp.zeros((2, 2))])
    params = {"encoder": {"blocks": {"mlp": {"up": {"kernel": kernel}}}}}
    optimizer = lamb(learning_rate=0.1, weight_decay=0.0)
    new, _ = trained(optimizer, params, [jax.tree.map(jnp.ones_like, params)])
    moved = (kernel - new["encoder"]["blocks"]["mlp"]["up"]["kernel"])[:, 0, 0]
    # epsilon is 1e-6. In float32, 4 - 0.4 has a rounding error of 2e-7, relative to the difference of 0.4.
    np.testing.assert_allclose(moved, [0.4, 0.05, 0.1], rtol=3e-6)


def test_lamb_gives_norms_and_biases_the_step_of_adam():
    params = {"norm": {"scale": jnp.full(3, 5.0)}, "bias": jnp.full(3, 5.0)}
    gradients = [params, jax.tree.map(lambda x: -2.0 * x, params)]
    fields = dict(learning_rate=0.1, epsilon=1e-6, weight_decay=0.5)
    new, _ = trained(lamb(**fields), params, gradients)
    expected, _ = trained(adamw(clip_norm=None, **fields), params, gradients)
    chex.assert_trees_all_equal(new, expected)


@pytest.mark.parametrize("field, value", [("b1", 1.0), ("learning_rate", 0.0), ("weight_decay", -1.0)])
def test_an_impossible_field_of_lamb_is_named(field, value):
    (problem,) = dataclasses.replace(Lamb(), **{field: value}).problems(None)
    assert problem.startswith(f"config.optimizer.{field} is {value}, ")


# --- state ---------------------------------------------------------------------------------------------------------


def test_moments_are_float32():
    _, state = trained(AdamW(), {"kernel": jnp.ones(2)}, [{"kernel": jnp.ones(2)}])
    moments = [x for x in jax.tree.leaves(state) if x.ndim]
    assert len(moments) == 2
    chex.assert_type(moments, jnp.float32)


@pytest.mark.parametrize(
    "optimizer", [AdamW(), AdamW(bias_correction="none"), AdamW(scale_by_parameter_rms=True), Lamb()]
)
def test_the_arrays_of_a_state_have_the_names_that_checkpoints_have_had_so_far(optimizer):
    state = optimizer.build(lambda step: 0.1, {"kernel": shape(2)}).init({"kernel": jnp.ones(2)})
    assert parameter_names(state) == ["1/count", "1/mu/kernel", "1/nu/kernel"]


def test_the_rate_follows_the_step_that_is_passed():
    schedule = WarmupConstant(10).build(1.0, 100)
    tx = adamw(weight_decay=0.0).build(schedule, {"kernel": shape(1)})
    params = {"kernel": jnp.ones(1)}
    updates, _ = tx.update(params, tx.init(params), params, step=jnp.int32(4))
    # The tolerance covers epsilon (1e-8) and float32 rounding.
    np.testing.assert_allclose(updates["kernel"], [-0.5], rtol=1e-6)


# --- which parameters decay ----------------------------------------------------------------------------------------


def test_a_parameter_the_decay_table_does_not_know_is_an_error():
    with pytest.raises(ValueError, match="no row of DECAY matches blocks/gate/alpha"):
        decay_mask({"blocks": {"gate": {"alpha": shape(2)}}})


@pytest.mark.parametrize("preset", tables.PRESETS)
def test_decay_of_every_parameter_is_the_golden_one(preset):
    assert tables.decay(preset) == Path(tables.path("decay", preset)).read_text()


# --- config --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value",
    [("b1", 1.0), ("b2", -0.1), ("learning_rate", 0.0), ("epsilon", 0.0), ("clip_norm", 0.0), ("weight_decay", -1.0)],
)
def test_an_impossible_optimizer_field_is_named(field, value):
    (problem,) = dataclasses.replace(AdamW(), **{field: value}).problems(None)
    assert problem.startswith(f"config.optimizer.{field} is {value}, ")


@pytest.mark.parametrize(
    "optimizer, field, value",
    [
        (StableAdamW(), "b2", 1.0),
        (AdEMAMix(), "b3", 1.0),
        (AdEMAMix(), "alpha_warmup_steps", -1),
        (AdEMAMix(), "alpha", -1.0),
        (AdEMAMix(), "b3", 0.0),
        (AdEMAMix(alpha_warmup_steps=10), "b3", 0.5),  # b3 rises from b1, so it must not be below b1.
        (Lion(), "learning_rate", 0.0),
        (Adafactor(), "clip_rms", 0.0),
        (Adafactor(), "decay_exponent", 0.0),
        (Adafactor(), "min_factored_size", 0),
        (SM3(), "b1", 1.0),
        (Muon(), "momentum", 1.0),
        (Muon(), "update_rms", 0.0),
        (Muon(), "neuron_b2", 1.0),
        (Muon(), "adam_learning_rate", 0.0),
        (Sophia(), "gamma", 0.0),
        (Sophia(), "interval", 0),
        (ScheduleFreeAdamW(), "b1", 0.0),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Optimizer) else str(x),
)
def test_an_impossible_field_of_another_optimizer_is_named(optimizer, field, value):
    experiment = tiny.get_config("gpt")
    experiment.schedule, experiment.train.attention = WarmupConstant(), "xla"
    assert list(optimizer.problems(experiment)) == []
    (problem,) = dataclasses.replace(optimizer, **{field: value}).problems(experiment)
    assert problem.startswith(f"config.optimizer.{field} is {value}, ")


@pytest.mark.parametrize(
    "optimizer, line",
    [
        (
            ScheduleFreeAdamW(),
            r"config\.schedule is WarmupCosine\(warmup_steps=5\), .* a constant rate: set --config",
        ),
        (Sophia(), r"config\.train\.attention is 'auto', .* set --config\.train\.attention=xla"),
    ],
)
def test_what_an_optimizer_needs_of_the_rest_is_said(optimizer, line):
    experiment = tiny.get_config("gpt")
    (problem,) = optimizer.problems(experiment)
    assert re.match(line, problem)


def test_a_rate_that_is_relative_fits_every_size():
    relative = (AdamW(scale_by_parameter_rms=True), Lamb(), Adafactor())
    assert all(optimizer.is_scale_invariant for optimizer in relative)
    assert not any(o.is_scale_invariant for o in (AdamW(), Muon(), Adafactor(scale_by_parameter_rms=False)))


def test_an_impossible_schedule_field_is_named():
    problems = list(WarmupCosine(warmup_steps=-1, final_fraction=2.0).problems(None))
    assert [p.split(" is ")[0] for p in problems] == ["config.schedule.warmup_steps", "config.schedule.final_fraction"]


def test_an_impossible_start_of_the_rise_is_named():
    (problem,) = WarmupConstant(start_fraction=1.5).problems(None)
    assert problem == "config.schedule.start_fraction is 1.5, it must be in [0, 1]"
    (problem,) = WarmupConstant(0, start_fraction=0.5).problems(None)
    assert problem.startswith("config.schedule.start_fraction is 0.5, and there is no warmup: ")


def test_an_impossible_length_of_a_cosine_or_an_annealing_is_named():
    experiment = SimpleNamespace(train=SimpleNamespace(steps=100))
    (problem,) = WarmupCosine(10, cosine_steps=9).problems(experiment)
    assert problem.startswith("config.schedule.cosine_steps is 9, it must be at least config.schedule.warmup_steps, 10")
    (problem,) = WarmupConstant(10, anneal_steps=101).problems(experiment)
    assert problem == "config.schedule.anneal_steps is 101, it must be from 0 to config.train.steps, 100"
    (problem,) = WarmupConstant(10, anneal_steps=-1).problems(experiment)
    assert "anneal_steps is -1" in problem


def test_an_impossible_decay_is_named():
    problems = list(WarmupStableDecay(decay_steps=-1, final_fraction=2.0).problems(None))
    assert [p.split(" is ")[0] for p in problems] == ["config.schedule.final_fraction", "config.schedule.decay_steps"]


def test_a_decay_that_begins_before_the_warmup_ends_is_named():
    experiment = SimpleNamespace(train=SimpleNamespace(steps=100))
    (problem,) = WarmupStableDecay(5, decay_steps=1000).problems(experiment)
    assert problem == (
        "config.schedule.decay_steps is 1000, it must be at most 95, the steps after the warmup (config.train.steps "
        "100 - config.schedule.warmup_steps 5): set --config.schedule.decay_steps=95"
    )
    assert not list(WarmupStableDecay(5, decay_steps=95).problems(experiment))
    assert not list(WarmupStableDecay(100, decay_steps=1000).problems(experiment))  # A trial may end during the warmup.
    experiment.train.steps = 0  # The run has a budget, so the steps are still unknown.
    assert not list(WarmupStableDecay(5, decay_steps=1000).problems(experiment))


@pytest.mark.parametrize(
    ("schedule", "rate", "said"),
    [
        (WarmupConstant(10, anneal_steps=20), None, "config.schedule.anneal_steps is 20"),
        (WarmupConstant(10), 1e-4, "config.phases[1].learning_rate is 0.0001"),
        (WarmupConstant(10), 2.5e-3, ""),
    ],
)
def test_a_rate_that_is_not_constant_is_refused_for_schedule_free_adamw(schedule, rate, said):
    phases = (Phase(share=0.5), Phase(learning_rate=rate))
    problems = list(ScheduleFreeAdamW().problems(SimpleNamespace(schedule=schedule, phases=phases)))
    assert len(problems) == bool(said)
    assert all(problem.startswith(said) and "requires a constant rate" in problem for problem in problems)


def test_json_names_an_optimizer_by_its_class():
    assert to_json(AdamW())["type"] == "AdamW"


@pytest.mark.parametrize("kind", [AdamW, Lamb])
def test_the_least_that_is_possible_is_no_problem(kind):
    least = dict(b1=0.0, b2=0.0, weight_decay=0.0, clip_norm=None, epsilon=1e-30, learning_rate=1e-30)
    assert not list(kind(**least).problems(None))


def test_a_tiny_matrix_still_moves_by_a_thousandth():
    params = {"token_embedding": {"embedding": jnp.full((2, 2), 5e-4)}}
    optimizer = adamw(learning_rate=1.0, weight_decay=0.0, clip_norm=None, scale_by_parameter_rms=True)
    new, _ = trained(optimizer, params, [jax.tree.map(jnp.ones_like, params)])
    moved = params["token_embedding"]["embedding"] - new["token_embedding"]["embedding"]
    # The tolerance covers epsilon (1e-8), and 5e-4 - 1e-3 in float32.
    np.testing.assert_allclose(moved, np.full((2, 2), 1e-3), rtol=1e-5)


def test_moments_of_gradients_in_bfloat16_are_float32():
    params = {"kernel": jnp.ones(2, jnp.bfloat16)}
    _, state = trained(AdamW(), params, [params])
    means = [x for x in jax.tree.leaves(state) if x.ndim][:1]
    chex.assert_type(means, jnp.float32)


@pytest.mark.parametrize("optimizer", [Muon(), SOAP()], ids=lambda x: type(x).__name__)
def test_the_gates_of_an_lstm_are_outputs_of_one_matrix(optimizer):
    inputs, gates, width = 6, 4, 5

    def update(*names, columns):
        draws = np.random.default_rng(0).normal(size=(3, 2, inputs, gates * width)).astype(np.float32)
        params, *gradients = ({"kernel": x.reshape(2, inputs, *columns)} for x in draws)
        for name in reversed(names):
            params, *gradients = ({name: x} for x in (params, *gradients))
        new, _ = trained(optimizer, params, gradients)
        return np.asarray(jax.tree.leaves(new)[0]).reshape(2, inputs, -1)

    of_gates = update("recurrent", "blocks", "forward", "input", columns=(gates, width))
    of_matrix = update("decoder", "blocks", "mlp", "up", columns=(gates * width,))
    np.testing.assert_array_equal(of_gates, of_matrix)


@pytest.mark.slow
def test_what_is_not_set_is_as_in_the_papers():
    # The sources are algorithm 1 of Kingma and Ba 2014, and ALBERT's code for LAMB's epsilon.
    assert (AdamW().b1, AdamW().b2, AdamW().epsilon) == (Lamb().b1, Lamb().b2, 1e-8) == (0.9, 0.999, 1e-8)
    assert Lamb().epsilon == 1e-6 and AdamW().clip_norm == Lamb().clip_norm == 1.0
