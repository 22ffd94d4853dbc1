"""Tests the GPU kernels of experts in Pallas' interpreter; test_mixture_compile.py compiles them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.layers.feed_forward import gpu_products, products

ROWS = 700
SIZES = {
    "even": [140] * 5,
    "none of some": [0, 300, 0, 0, 400],
    "rows of none": [1, 127, 128, 129, 0],
    "all of one": [0, 0, ROWS, 0, 0],
    "nothing": [0] * 5,
}


def dense(sizes):
    """Returns [S, E]: 1 where a row belongs to an expert, else 0."""
    return np.repeat(np.eye(6, 5, dtype=np.float32), [*sizes, ROWS - sum(sizes)], axis=0)


def inputs(dtype, inner=96, outer=200):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (ROWS, inner), (5, inner, outer), (ROWS, outer)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.first(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_row_meets_the_matrix_of_its_expert(interpreted, sizes, dtype):
    x, kernel, gradient = inputs(dtype)
    of = dense(sizes)
    # float32 rounds sums of 96 and 200 products of size 1 by 1e-6 each. bfloat16 rounds the result, which is less than
    # 128, to 8 bits.
    atol = {"float32": 1e-4, "bfloat16": 0.25}[dtype]
    with jax.default_matmul_precision("highest"):
        y = gpu_products.product(x, kernel, jnp.array(sizes))
        dx = gpu_products.product(gradient, kernel, jnp.array(sizes), transposed=True)
    chex.assert_type([y, dx], dtype)
    x, kernel, gradient = (np.asarray(a, np.float64) for a in (x, kernel, gradient))
    chex.assert_trees_all_close(np.float64(y), np.einsum("SE,SD,EDF->SF", of, x, kernel), atol=atol, rtol=0)
    chex.assert_trees_all_close(np.float64(dx), np.einsum("SE,SF,EDF->SD", of, gradient, kernel), atol=atol, rtol=0)


@pytest.mark.first(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_gradient_of_a_matrix_is_summed_over_its_rows_in_float32(interpreted, sizes, dtype):
    x, _, gradient = inputs(dtype)
    total = gpu_products.summed_over_rows(x, gradient, jnp.array(sizes))
    chex.assert_type(total, "float32")
    x, gradient = (np.asarray(a, np.float64) for a in (x, gradient))
    # float32 rounds sums of 700 products of size 1 by 1e-6 each. Products of bfloat16 operands are exact in float32.
    chex.assert_trees_all_close(
        np.float64(total), np.einsum("SE,SD,SF->EDF", dense(sizes), x, gradient), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("capability, has_kernel", [((7, 5), False), ((8, 0), True)])
def test_a_gpu_too_old_for_triton_takes_the_products_of_a_cpu(capability, has_kernel, monkeypatch):
    monkeypatch.setattr(products, "platform", lambda: "gpu")
    monkeypatch.setattr(products, "gpu_capability", lambda: capability)
    sizes, layout = jnp.array(SIZES["even"]), products.Layout(None, 1)
    value = lambda x, kernel: products.expert_product(layout, x, kernel, sizes).sum()  # noqa: E731
    text = str(jax.make_jaxpr(jax.grad(value, (0, 1)))(*inputs("float32")[:2]))
    assert ("pallas_call" in text) == has_kernel


@pytest.mark.slow
def test_every_row_is_in_one_block():
    for sizes in SIZES.values():
        first, last, expert = (np.asarray(a) for a in gpu_products.blocks_of(jnp.array(sizes), ROWS))
        owner = np.concatenate([np.repeat(expert[j], last[j] - first[j]) for j in range(len(first))])
        np.testing.assert_array_equal(owner, np.repeat(np.arange(6), [*sizes, ROWS - sum(sizes)]))
        assert (last - first).max() <= 128
