"""The inputs of the attention tests, and functions that compute attention and its gradients."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.layers.attention import attention, choose_backend
from pretrainax.layers.attention_spec import AttentionSpec, Weights


def segments(*rows):
    return jnp.asarray(rows, jnp.int32)


# Two documents in a row, followed by padding.
PACKED = dict(query_segment_ids=segments([1, 1, 1, 2, 2, 0]), key_segment_ids=segments([1, 1, 1, 2, 2, 0]))


def arrays(batch, t, s, heads, key_heads, width, has_bias=False, dtype=jnp.float32):
    """Returns q [B, T, H, K], k and v [B, S, G, K], and a bias [1, H, T, S] or None."""
    rng = np.random.default_rng(0)
    shapes = (batch, t, heads, width), (batch, s, key_heads, width), (batch, s, key_heads, width)
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return q, k, v, jnp.asarray(rng.normal(size=(1, heads, t, s)), jnp.float32) if has_bias else None


def run(q, k, v, bias, mask, implementation="xla", scale=0.3, logit_cap=None):
    weights = Weights(logit_cap=logit_cap)
    return attention(q, k, v, mask=mask, bias=bias, scale=scale, implementation=implementation, weights=weights)


def output_and_gradients(args, mask, implementation="xla", **options):
    @jax.jit
    def both(args, mask):
        out, backward = jax.vjp(lambda *args: run(*args, mask, implementation, **options), *args)
        return out, backward(jnp.asarray(np.cos(np.arange(out.size)).reshape(out.shape), out.dtype))

    return both(args, mask)


def assert_close(got, expected, atol):
    """Asserts equal structure, shapes and dtypes, and values within `atol` and a relative error of 1e-7."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    chex.assert_trees_all_close(got, expected, atol=atol, rtol=1e-7)


def packed_ids(batch, length):
    """Returns segment IDs of two documents and padding in each row; the lengths differ between rows."""
    rows = np.zeros((batch, length), np.int32)
    for i in range(batch):
        rows[i, : length // 3 + i] = 1
        rows[i, length // 3 + i : length - 7 * i - 3] = 2
    return jnp.asarray(rows)


USUAL = AttentionSpec(
    head_dim=64,
    query_length=512,
    key_length=512,
    dtype="bfloat16",
    causal=True,
    bias="none",
    window=None,
    has_prefix=False,
    has_positions=False,
    logit_cap=None,
    sequence=1,
)


def choose(requested, platform, **other):
    """Returns the backend for causal attention over 512 tokens; `other` replaces fields of `USUAL`."""
    return choose_backend(requested, platform, dataclasses.replace(USUAL, **other))
