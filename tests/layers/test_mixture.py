"""Tests mixtures of experts: the router's choices, the inputs of each expert, and equal results on any devices."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import MeshConfig, MixtureOfExperts, ModelConfig
from pretrainax.layers.feed_forward import ACTIVATIONS, Dense, Mixture
from pretrainax.layers.feed_forward.router import balance, route
from pretrainax.layers.feed_forward.slots import assign, from_slots, slots_per_expert, to_slots
from pretrainax.sharding.mesh import make_mesh
from tests.golden.case import needs_transformers
from tests.support.tiers import few

X = jax.random.normal(jax.random.key(0), (4, 70, 16))


def config(gated=True, use_bias=False, **experts):
    settings = MixtureOfExperts(**{"num_experts": 8, "top_k": 2} | experts)
    own = {"activation": "silu", "gated": gated, "use_bias": use_bias, "init_stddev": 0.5}
    return ModelConfig(d_model=16, d_ff=24, experts=settings, **own)


def params_of(config):
    params = Mixture(config).init(jax.random.key(1), X)
    return jax.tree.map(lambda p: p if p.ndim == 3 else p + 0.3 * jax.random.normal(jax.random.key(2), p.shape), params)


def all_experts(config, params, x):
    """Computes all experts for every token, and combines the results of the chosen experts."""
    own, settings = params["params"], config.experts
    logits = x @ own["router"]["kernel"]
    routing = route(settings, logits + own["router"]["bias"][None, None] if config.use_bias else logits)

    def mapped(name, y):
        # [B, T, D] or [B, T, E, D] -> [B, T, E, F]
        product = jnp.einsum(f"BT{'E' * (y.ndim - 3)}D,EDF->BTEF", y, own[name]["kernel"])
        return product + own[name]["bias"][None, None] if config.use_bias else product

    up = mapped("experts_up", x)
    activation = ACTIVATIONS[config.activation]
    if config.gated:
        hidden = activation(mapped("experts_gate", x)) * up
    else:
        hidden = activation(up)
    y = mapped("experts_down", hidden)
    return jnp.einsum("BTKD,BTK->BTD", jnp.take_along_axis(y, routing.experts[..., None], axis=2), routing.weights)


def value_and_gradients(function, params, x=X):
    return jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(function(p, x))), (0, 1)))(params, x)


@pytest.mark.first(3)
@pytest.mark.parametrize("capacity", [None, 8.0], ids=("dropless", "room for all"))
@pytest.mark.parametrize("gated", [True, False], ids=("gated", "plain"))
@pytest.mark.parametrize(
    "experts",
    few(
        [{"normalized": False}, {"top_k": 1}, {"num_experts": 3, "top_k": 3}, {"use_bias": True}],
        [{"top_k": 1}, {"use_bias": True}],
    ),
    ids=str,
)
def test_is_the_sum_over_the_chosen_of_all_experts(gated, capacity, experts):
    settings = config(gated, capacity=capacity, **experts)
    params = params_of(settings)
    got = value_and_gradients(lambda p, x: Mixture(settings).apply(p, x)[0], params)
    want = value_and_gradients(lambda p, x: all_experts(settings, p, x), params)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-3)  # float32 sums of 280 tokens in another order


def test_bfloat16_stays_bfloat16_and_the_router_sees_float32():
    settings = config()
    params, x = params_of(settings), X.astype(jnp.bfloat16)
    y, _ = Mixture(settings).apply(params, x)
    chex.assert_type(y, jnp.bfloat16)
    want = all_experts(settings, params, x.astype(jnp.float32))
    # Three products of numbers up to 30 have a rounding error of 2^-8. A token sent to the wrong expert would differ
    # far more.
    np.testing.assert_allclose(y.astype(np.float32), want, atol=0.5)


@pytest.mark.first(1)
@pytest.mark.parametrize("use_bias", few([False, True], [True]), ids=("", "biases"))
@pytest.mark.parametrize("capacity", [None, 1.0], ids=("dropless", "room for as many"))
@pytest.mark.parametrize(
    "mesh",
    few(
        [
            *({"fsdp": 8}, {"data": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "sequence": 2}),
            *({"expert": 8}, {"fsdp": 2, "expert": 2, "tensor": 2}, {"expert": 4, "sequence": 2}),
        ],
        [{"fsdp": 2, "expert": 2, "tensor": 2}],
    ),
    ids=str,
)
def test_on_eight_devices_as_on_one(mesh, capacity, use_bias):
    settings = config(capacity=capacity, use_bias=use_bias)
    rows = jnp.concatenate([X, X])[:, :64]
    params = params_of(settings)

    def of(p, x):
        return Mixture(settings).apply(p, x)[0]

    with jax.set_mesh(make_mesh(MeshConfig(**{"data": 1} | mesh))):
        got = value_and_gradients(of, params, rows)
    if capacity is None:
        want = value_and_gradients(of, params, rows)
    else:  # Each device has capacity for its own tokens.
        rows_each = 8 // math.prod(mesh.get(axis, 1) for axis in ("data", "fsdp", "expert"))
        length = 64 // mesh.get("sequence", 1)

        def parts(p, x):
            x = x.reshape(-1, rows_each, 64 // length, length, 16).swapaxes(1, 2)
            y = jnp.stack([jnp.stack([of(p, part) for part in row]) for row in x])
            return y.swapaxes(1, 2).reshape(8, 64, 16)

        want = value_and_gradients(parts, params, rows)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-3)  # float32 sums in another order


# --- slots -----------------------------------------------------------------------------------------------------------


def test_first_choices_get_the_room_before_second_ones():
    # There are three tokens. Tokens 0 and 2 choose expert 0 first, and token 1 chooses it second.
    chosen = jnp.array([[0, 1], [1, 0], [0, 2]])
    slots = assign(chosen, num_experts=3, room=2, real=jnp.ones(3, bool))
    np.testing.assert_array_equal(slots.sizes, [3, 2, 1])
    # Expert 0 gets tokens 0 and 2 (assignments 0 and 4). Expert 1 gets tokens 1 and 0. Expert 2 gets token 2 and has an
    # empty slot.
    np.testing.assert_array_equal(slots.assignment, [0, 4, 2, 1, 5, 6])
    np.testing.assert_array_equal(slots.slot_of_assignment, [0, 3, 2, 6, 1, 4])  # 6: no slot was free
    x = jnp.arange(1.0, 4.0)[:, None]
    np.testing.assert_array_equal(to_slots(x, slots)[:, 0], [1, 3, 2, 1, 3, 0])
    y = from_slots(to_slots(x, slots), slots, jnp.full((3, 2), 0.5))
    np.testing.assert_array_equal(y[:, 0], [1.0, 1.0, 3.0])  # Token 1 loses half of its output.


def test_padding_gets_no_slot_of_an_expert():
    chosen, real = jnp.array([[0, 1], [0, 1], [0, 2]]), jnp.array([False, True, True])
    slots = assign(chosen, num_experts=3, room=2, real=real)
    np.testing.assert_array_equal(slots.sizes, [2, 1, 1])
    np.testing.assert_array_equal(slots.assignment, [2, 4, 3, 6, 5, 6])  # 6: an empty slot
    np.testing.assert_array_equal(slots.slot_of_assignment, [6, 6, 0, 2, 1, 4])
    slots = assign(chosen, num_experts=3, room=None, real=real)
    np.testing.assert_array_equal(slots.sizes, [2, 1, 1])
    np.testing.assert_array_equal(slots.assignment, [2, 4, 3, 5, 0, 1])  # Padding comes after all experts.
    np.testing.assert_array_equal(slots.slot_of_assignment, [4, 5, 0, 2, 1, 3])


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("capacity", [None, 1.0], ids=("dropless", "room for as many"))
def test_real_tokens_lose_no_slots_to_padding(capacity, mesh):
    settings = config(use_bias=True, num_experts=4, top_k=1, capacity=capacity)
    params = params_of(settings)
    rows = jnp.concatenate([X, X])[:, :64].at[:, 16:].set(X[0, 0])  # The router sends all padding to the same expert.
    real = jnp.arange(64)[None] < jnp.full((8, 1), 16)
    with jax.set_mesh(make_mesh(MeshConfig(**{"data": 1} | mesh))):
        y, sums = jax.jit(Mixture(settings).apply)(params, rows, real)
    want = all_experts(settings, params, rows[:, :16])
    np.testing.assert_allclose(y[:, :16], want, rtol=1e-4, atol=1e-3)  # float32 sums in another order
    np.testing.assert_array_equal(y[:, 16:], 0.0)
    if capacity is not None:
        assert tuple(map(float, sums["layers/dropped"])) == (0.0, 8 * 16)


def test_what_is_dropped_is_counted():
    settings = config(capacity=1.0)
    params = params_of(settings)
    params["params"]["router"]["kernel"] = jnp.zeros((16, 8))  # All tokens go to experts 0 and 1.
    _, sums = Mixture(settings).apply(params, X)
    dropped, assigned = sums["layers/dropped"]
    assert assigned == 2 * 280 and dropped == 2 * (280 - slots_per_expert(1.0, 560, 8)) == 2 * (280 - 70)
    np.testing.assert_array_equal(sums["layers/expert_tokens"][0], [280, 280, 0, 0, 0, 0, 0, 0])


# --- the router ------------------------------------------------------------------------------------------------------


def test_weights_are_those_of_the_best():
    logits = jnp.log(jnp.array([[[0.1, 0.4, 0.2, 0.3]]]))
    for normalized, weights in ((True, [4 / 7, 3 / 7]), (False, [0.4, 0.3])):
        routing = route(MixtureOfExperts(num_experts=4, top_k=2, normalized=normalized), logits)
        np.testing.assert_array_equal(routing.experts[0, 0], [1, 3])
        np.testing.assert_allclose(routing.weights[0, 0], weights, rtol=1e-6)  # float32 rounding


def test_a_sigmoid_scores_each_expert_by_itself():
    logits = jnp.array([[[0.0, 2.0, 1.0, -1.0]]])
    for normalized in (True, False):
        settings = MixtureOfExperts(num_experts=4, top_k=2, scores="sigmoid", normalized=normalized, scale=2.5)
        routing = route(settings, logits)
        np.testing.assert_array_equal(routing.experts[0, 0], [1, 2])
        scores = 1.0 / (1.0 + np.exp([-2.0, -1.0]))
        np.testing.assert_allclose(
            routing.weights[0, 0], 2.5 * scores / (scores.sum() if normalized else 1.0), rtol=1e-6
        )  # float32 rounding


def test_a_bias_chooses_and_weighs_nothing():
    logits = jnp.log(jnp.array([[[0.1, 0.4, 0.2, 0.3]]]))
    settings = MixtureOfExperts(num_experts=4, top_k=2, normalized=False, bias_rate=0.001)
    routing = route(settings, logits, jnp.array([1.0, 0.0, 0.0, -1.0]))
    np.testing.assert_array_equal(routing.experts[0, 0], [0, 1])
    np.testing.assert_allclose(routing.weights[0, 0], [0.1, 0.4], rtol=1e-6)  # float32 rounding


@pytest.mark.parametrize("score, experts", [("best", [0, 1]), ("best_two", [4, 5])])
def test_experts_are_of_the_best_groups(score, experts):
    probabilities = jnp.array([[[0.3, 0.02, 0.18, 0.03, 0.25, 0.22]]])  # three groups of two
    settings = MixtureOfExperts(num_experts=6, top_k=2, groups=3, top_groups=1, group_score=score)
    np.testing.assert_array_equal(route(settings, jnp.log(probabilities)).experts[0, 0], experts)


def test_shared_experts_are_one_feed_forward_for_all():
    settings = config(shared_experts=2)
    params = params_of(settings)
    chex.assert_shape(params["params"]["shared_up"]["kernel"], (16, 48))
    routed = {"params": {name: x for name, x in params["params"].items() if "shared" not in name}}
    shared = {"params": {name.removeprefix("shared_"): x for name, x in params["params"].items() if "shared" in name}}
    plain = dataclasses.replace(settings, experts=None, d_ff=48)
    want = Mixture(config()).apply(routed, X)[0] + Dense(plain).apply(shared, X)[0]
    np.testing.assert_allclose(Mixture(settings).apply(params, X)[0], want, atol=1e-6)  # float32 sums in another order


def balanced(logits, counted, **changes):
    settings = MixtureOfExperts(**{"num_experts": logits.shape[-1], "balance_weight": 1.0} | changes)
    return balance(settings, logits, route(settings, logits), counted)


def test_an_even_router_has_a_loss_of_one():
    logits = 20.0 * jnp.eye(4)[None]  # The router is certain, and each token chooses a different expert.
    sums = balanced(logits, jnp.ones((1, 4)), top_k=1, z_weight=0.5)
    np.testing.assert_allclose(sums["balance_loss"][0], 1.0, rtol=1e-6)
    np.testing.assert_allclose(sums["router_z_loss"][0], 0.5 * 20.0**2, rtol=1e-6)
    np.testing.assert_allclose(sums["layers/router_entropy"][0], 0.0, atol=1e-6)
    for top_k in (2, 4):
        of_several = balanced(logits, jnp.ones((1, 4)), top_k=top_k)["balance_loss"][0]
        np.testing.assert_allclose(of_several, 1.0, rtol=1e-6)
    same = jnp.broadcast_to(logits[:, :1], (1, 4, 4))  # All tokens choose the first expert.
    np.testing.assert_allclose(balanced(same, jnp.ones((1, 4)), top_k=1)["balance_loss"][0], 4.0, rtol=1e-6)


@pytest.mark.slow
def test_over_rows_the_loss_is_their_mean_by_tokens():
    logits = jax.random.normal(jax.random.key(3), (2, 9, 6))
    counted = (jnp.arange(9)[None] < jnp.array([[9], [4]])).astype(jnp.float32)
    of_rows = [balanced(logits[i : i + 1], counted[i : i + 1])["balance_loss"][0] for i in range(2)]
    got = balanced(logits, counted, balance_over="row")["balance_loss"][0]
    np.testing.assert_allclose(got, (9 * of_rows[0] + 4 * of_rows[1]) / 13, rtol=1e-6)  # float32 rounding


def test_the_loss_of_sigmoids_is_of_their_shares():
    """Tests equations 17 to 20 of DeepSeek-V3."""
    logits = jax.random.normal(jax.random.key(3), (1, 9, 6))
    scores = np.asarray(jax.nn.sigmoid(logits), np.float64)[0]
    chosen = np.argsort(-scores, axis=-1)[:, :2]
    f = np.array([6 / (2 * 9) * (chosen == e).sum() for e in range(6)])
    want = np.sum(f * np.mean(scores / scores.sum(-1, keepdims=True), axis=0))
    got = balanced(logits, jnp.ones((1, 9)), scores="sigmoid", balance_over="row")["balance_loss"][0]
    np.testing.assert_allclose(got, want, rtol=1e-6)  # float32 rounding


def test_padding_counts_for_nothing():
    logits = jax.random.normal(jax.random.key(3), (2, 9, 6))
    real = (jnp.arange(9)[None] < jnp.array([[9], [4]])).astype(jnp.float32)
    got = balanced(logits, real, z_weight=1.0)
    want = balanced(jnp.concatenate([logits[0], logits[1, :4]])[None], jnp.ones((1, 13)), z_weight=1.0)
    chex.assert_trees_all_close(got, want, rtol=1e-5)  # float32 sums in another order
    assert got["layers/expert_tokens"][0].sum() == 2 * 13


@pytest.mark.first(2)
@needs_transformers
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_balance_loss_is_that_of_transformers_by_choice(top_k):
    import torch
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = np.asarray(jax.random.normal(jax.random.key(4), (2, 9, 6)))
    mask = (np.arange(9)[None] < np.array([[9], [4]])).astype(np.int64)
    flat = torch.from_numpy(logits.reshape(18, 6).copy())
    theirs = load_balancing_loss_func((flat,), 6, top_k, torch.from_numpy(mask))
    mine, _ = balanced(jnp.asarray(logits), jnp.asarray(mask, jnp.float32), top_k=top_k)["balance_loss"]
    np.testing.assert_allclose(top_k * mine, float(theirs), rtol=1e-5)  # float32 rounding
