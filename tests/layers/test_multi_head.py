"""Tests attention with its projections: shapes, finite gradients, and errors for wrong axes."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import MeshConfig, ModelConfig, RotaryPositions, YarnScaling
from pretrainax.layers import multi_head
from pretrainax.layers.attention import Mask, attention
from pretrainax.layers.attention_spec import Weights
from pretrainax.layers.compute import Compute
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.multi_head import MultiHeadAttention
from pretrainax.layers.positions import PositionTerms
from pretrainax.sharding.mesh import make_mesh
from tests.support.attending import assert_close, packed_ids

CONFIG = ModelConfig(vocab_size=8, num_layers=1, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2)
IDS = packed_ids(2, 24), packed_ids(2, 30)
X, SOURCE = (jax.random.normal(jax.random.key(i), (*ids.shape, 32)) for i, ids in enumerate(IDS))
LAYER = MultiHeadAttention(CONFIG, Compute())


@pytest.fixture(scope="module")
def params():
    return LAYER.init(jax.random.key(0), X, SOURCE, Mask(False, *IDS), PositionTerms())


def test_a_scale_of_the_config_keeps_the_factor_of_yarn():
    position = RotaryPositions(64, scaling=YarnScaling(40.0, mscale_all_dim=1.0))
    config = dataclasses.replace(CONFIG, position=position)
    default = multi_head.scale_of(config, PositionTerms())
    assert default == pytest.approx(8**-0.5 * (0.1 * math.log(40.0) + 1.0) ** 2)  # Heads have width 8.
    explicit = dataclasses.replace(config, attention_scale=8**-0.5)
    assert multi_head.scale_of(explicit, PositionTerms()) == pytest.approx(default)


@pytest.mark.slow
def test_what_is_read_may_have_another_length(params):
    y, _ = LAYER.apply(params, X, SOURCE, Mask(False, *IDS), PositionTerms())
    chex.assert_shape(y, (2, 24, 32))
    chex.assert_type(y, jnp.float32)


def test_key_heads_may_be_fewer(params):
    shapes = {name: part["kernel"].shape for name, part in params["params"].items()}
    assert shapes == {"query": (32, 4, 8), "key": (32, 2, 8), "value": (32, 2, 8), "out": (4, 8, 32)}


def test_jit_changes_nothing_of_output_and_gradients(params):
    def loss(params, x, source):
        return jnp.sum(jnp.square(LAYER.apply(params, x, source, Mask(False, *IDS), PositionTerms())[0]))

    both = jax.value_and_grad(loss, (0, 1, 2))
    got, expected = jax.jit(both)(params, X, SOURCE), both(params, X, SOURCE)
    chex.assert_tree_all_finite(got)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    assert_close(got, expected, 1e-5 * scale)  # float32 sums of a few hundred terms in another order


# --- dropout of weights --------------------------------------------------------------------------------------------

RATE = 0.25
DROPPING = MultiHeadAttention(dataclasses.replace(CONFIG, attention_dropout_rate=RATE), Compute())
TRAINED = DROPPING.clone(deterministic=False)


def dropped(params, key, x=X, source=SOURCE, ids=IDS):
    rngs = {"dropout": jax.random.key(key)}
    return TRAINED.apply(params, x, source, Mask(False, *ids), PositionTerms(), rngs=rngs)[0]


def test_weights_are_dropped_after_the_softmax_and_the_others_grow():
    # The values are the identity, so the output equals the weights.
    q, k = (jax.random.normal(jax.random.key(i), (8, 64, 2, 64)) for i in range(2))
    v = jnp.broadcast_to(jnp.eye(64)[:, None], (8, 64, 2, 64))
    drop = lambda w: Dropout(RATE, deterministic=False).apply({}, w, rngs={"dropout": jax.random.key(2)})  # noqa: E731
    terms = {"mask": Mask(causal=True), "scale": 0.1}
    weights, left = attention(q, k, v, **terms), attention(q, k, v, weights=Weights(drop), **terms)
    seen = np.asarray(weights) > 0
    kept = np.asarray(left) > 0
    # float32 rounding; the division follows the sum
    np.testing.assert_allclose(left[kept], weights[kept] / (1 - RATE), rtol=1e-5)
    # There are 33,280 weights, so one standard deviation is 0.0024.
    assert abs((kept & seen).sum() / seen.sum() - (1 - RATE)) < 0.01
    assert not (kept & ~seen).any()


def test_weights_are_dropped_in_training_alone_and_by_their_key(params):
    plain, evaluated = (m.apply(params, X, SOURCE, Mask(False, *IDS), PositionTerms())[0] for m in (LAYER, DROPPING))
    np.testing.assert_array_equal(evaluated, plain)
    one, again, other = (dropped(params, key) for key in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any() and (one != plain).any()


def test_eight_devices_drop_the_weights_that_one_does(params):
    x, source, *ids = (jnp.concatenate([rows, rows]) for rows in (X, SOURCE, *IDS))
    run = jax.jit(lambda *args: dropped(params, 3, *args))
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        split = jax.device_put((x, source, ids), NamedSharding(mesh, P(("data", "fsdp"))))
        found = run(*split)
    assert_close(np.asarray(found), np.asarray(run(x, source, ids)), 1e-5)  # float32 sums in another order


def test_training_takes_the_kernel_with_dropout_and_evaluation_the_fastest(params, monkeypatch):
    chosen = []
    choose = multi_head.choose_backend
    record = lambda *args: chosen.append(choose("auto", "gpu", args[2])[0]) or ("xla", None)  # noqa: E731
    monkeypatch.setattr(multi_head, "choose_backend", record)
    x, source = X.astype(jnp.bfloat16), SOURCE.astype(jnp.bfloat16)
    for layer in (TRAINED, DROPPING):
        call = functools.partial(layer.apply, params, x, source, Mask(False, *IDS), PositionTerms())
        jax.eval_shape(functools.partial(call, rngs={"dropout": jax.random.key(0)}))
    assert chosen == ["tiled", "cudnn"]


@pytest.mark.parametrize(
    "x, source, error, said",
    [
        (X[0], SOURCE, AssertionError, r"x is \[B, T, D\]"),
        (X, SOURCE[:1], AssertionError, "with B of x"),
        # A source may have any width, but its maps must match this width.
        (X, SOURCE[..., :1], ScopeParamShapeError, r'parameter "kernel" in "/key"'),
    ],
)
def test_a_source_that_would_broadcast_is_refused_by_its_axis(params, x, source, error, said):
    with pytest.raises(error, match=said):
        LAYER.apply(params, x, source, Mask(False, *IDS), PositionTerms())
