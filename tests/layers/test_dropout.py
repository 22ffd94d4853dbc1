import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import MeshConfig
from pretrainax.layers.dropout import Dropout, apply_dropout
from pretrainax.layers.hashed_keys import hashed_key
from pretrainax.sharding.mesh import make_mesh

RATE = 0.1
X = jax.random.normal(jax.random.key(1), (8, 16, 64))
KEYS = {"of JAX": jax.random.key(0), "hashed": hashed_key(jax.random.key(0))}
ALL_KEYS = pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)


@ALL_KEYS
def test_a_share_is_dropped_and_the_rest_grows(key):
    y = np.asarray(apply_dropout(RATE, X, key))
    left = y != 0
    assert abs(left.mean() - (1 - RATE)) < 5 * np.sqrt(RATE * (1 - RATE) / X.size)
    np.testing.assert_allclose(y[left], np.asarray(X)[left] / (1 - RATE), rtol=2**-23)  # one rounding


def test_what_is_left_of_bfloat16_grows_by_what_is_dropped():
    """Tests that each number is rounded once: 1 / (1 - rate), rounded to bfloat16, would be wrong by 0.2 %."""
    x = X.astype(jnp.bfloat16)
    y = apply_dropout(RATE, x, KEYS["hashed"])
    assert y.dtype == jnp.bfloat16
    left = np.asarray(y != 0)
    expected = (np.asarray(x, np.float32) / np.float32(1 - RATE)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(y)[left], expected[left])


@ALL_KEYS
def test_the_backward_draws_the_same_numbers_and_keeps_none_of_them(key):
    y, backward = jax.vjp(functools.partial(apply_dropout, RATE, key=key), X)
    np.testing.assert_array_equal(backward(X)[0], y)
    assert [leaf.shape for leaf in jax.tree.leaves(backward)] == [()]  # The only residual is the key.


def test_a_gradient_can_be_differentiated_again():
    gradient = jax.grad(lambda x: apply_dropout(RATE, x**3, KEYS["hashed"]).sum())
    _, along = jax.jvp(gradient, (X,), (jnp.ones_like(X),))
    left = np.asarray(apply_dropout(RATE, X, KEYS["hashed"]) != 0)
    np.testing.assert_allclose(along, np.where(left, 6 * X / (1 - RATE), 0), rtol=1e-6)  # float32: a few roundings


def test_module_drops_in_training_alone_and_by_its_key():
    run = lambda seed, **how: Dropout(RATE, **how).apply({}, X, rngs={"dropout": jax.random.key(seed)})  # noqa: E731
    np.testing.assert_array_equal(run(0, deterministic=False), run(0, deterministic=False))
    assert (run(0, deterministic=False) != run(1, deterministic=False)).any()
    assert Dropout(RATE, deterministic=True).apply({}, X) is X
    assert Dropout(0.0, deterministic=False).apply({}, X) is X
    np.testing.assert_array_equal(Dropout(RATE).apply({}, X, deterministic=True), X)


@pytest.mark.slow
def test_eight_devices_drop_what_one_does():
    run = jax.jit(functools.partial(apply_dropout, RATE))
    expected = np.asarray(run(X, KEYS["hashed"]))
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P(("data", "fsdp"), None, "tensor")))
        found = run(x, KEYS["hashed"])
        text = run.lower(x, KEYS["hashed"]).compile().as_text()
    np.testing.assert_array_equal(np.asarray(found), expected)
    assert not [word for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if word in text]
