"""Compares SOAP with the paper's algorithm in NumPy, for one matrix at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pretrainax import models  # noqa: F401 (adds rows to the table of axes)
from pretrainax.optim import SOAP, WarmupConstant
from pretrainax.sharding.param_paths import PyTree

STEPS, RATE = 8, 1e-2
KERNELS = {"query": ("self_attention", (2, 8, 4, 2)), "out": ("self_attention", (2, 4, 2, 8)), "up": ("mlp", (2, 8, 8))}


def tree(arrays: dict[str, np.ndarray]) -> PyTree:
    blocks = {}
    for name, x in arrays.items():
        blocks.setdefault(KERNELS[name][0], {})[name] = {"kernel": x}
    return {"decoder": {"blocks": blocks}}


def drawn(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, (_, shape) in KERNELS.items()}


def paper(optimizer: SOAP, start: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """Returns a matrix [I, O] after updates by algorithm 3, in float64 and with the bases of earlier gradients."""
    w, m, v = start.astype(np.float64), np.zeros_like(start, np.float64), np.zeros_like(start, np.float64)
    sides = [np.zeros((n, n)) for n in start.shape]
    p, q = np.eye(len(start)), np.eye(start.shape[1])
    for t, g in enumerate(np.float64(gradients)):
        if t:
            m = optimizer.b1 * m + (1 - optimizer.b1) * g
            v = optimizer.b2 * v + (1 - optimizer.b2) * (p.T @ g @ q) ** 2
            adam = (
                (p.T @ m @ q) / (1 - optimizer.b1**t) * np.sqrt(1 - optimizer.b2**t) / (np.sqrt(v) + optimizer.epsilon)
            )
            w = w - RATE * p @ adam @ q.T
        sides = [optimizer.b3 * x + (1 - optimizer.b3) * new for x, new in zip(sides, (g @ g.T, g.T @ g), strict=True)]
        if t == 0:
            p, q = (np.linalg.eigh(x)[1][:, ::-1] for x in sides)
        elif t % optimizer.interval == 0:
            orders = [np.argsort(-np.diag(u.T @ x @ u)) for x, u in zip(sides, (p, q), strict=True)]
            v = v[orders[0]][:, orders[1]]
            p, q = (np.linalg.qr(x @ u[:, o])[0] for x, u, o in zip(sides, (p, q), orders, strict=True))
    return w


def updated(optimizer: SOAP, gradients: list[dict[str, np.ndarray]], params: PyTree) -> PyTree:
    built = optimizer.build(WarmupConstant(0).build(RATE, STEPS), params)
    state, update = built.init(params), jax.jit(built.update)
    for number, gradient in enumerate(gradients):
        updates, state = update(tree(gradient), state, params, step=jnp.int32(number))
        params = optax.apply_updates(params, updates)
    return params


def test_updates_are_those_of_the_paper_matrix_by_matrix():
    optimizer = SOAP(interval=3, weight_decay=0.0, clip_norm=None)
    start, gradients = drawn(0), [drawn(seed) for seed in range(1, 1 + STEPS)]
    found = updated(optimizer, gradients, tree(start))["decoder"]["blocks"]
    for name, (part, _) in KERNELS.items():
        for layer in range(2):
            matrices = [x[name][layer].reshape(8, 8) for x in (start, *gradients)]
            wanted = paper(optimizer, matrices[0], matrices[1:])
            got = np.asarray(found[part][name]["kernel"][layer]).reshape(8, 8)
            np.testing.assert_allclose(got, wanted, atol=2e-5)  # float32 eigenvectors with steps of 1e-2


def test_the_first_update_is_decay_alone():
    start = tree(drawn(0))
    found = updated(SOAP(weight_decay=0.5, clip_norm=None), [drawn(1)], start)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, (1 - 0.5 * RATE) * y, rtol=1e-6), found, start)


@pytest.mark.parametrize("longest, sides", [(10_000, 2), (1000, 1), (100, 0)])
def test_a_long_side_has_no_eigenvectors(longest, sides):
    params = {"token_embedding": {"embedding": jax.ShapeDtypeStruct((5000, 128), jnp.float32)}}
    state = jax.eval_shape(SOAP(max_side=longest).build(WarmupConstant(0).build(RATE, STEPS), params).init, params)
    assert sum(x.shape in ((5000, 5000), (128, 128)) for x in jax.tree.leaves(state)) == 2 * sides
