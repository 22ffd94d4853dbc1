"""Tests latent attention: its cache is small, and decoding from the cache equals a forward of the whole sequence."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import LatentAttention, LearnedPositions, ModelConfig, RotaryPositions
from pretrainax.layers.attention import Mask
from pretrainax.layers.cache import KeyValues
from pretrainax.layers.compute import Compute
from pretrainax.layers.latent_attention import MultiHeadLatentAttention
from pretrainax.layers.multi_head import MultiHeadAttention
from pretrainax.layers.positions import AttentionPositions, positions_for
from pretrainax.layers.self_attention import self_attention_of
from tests.support import tiny

CONFIG = ModelConfig(
    d_model=16,
    num_heads=4,
    head_dim=10,
    latent_attention=LatentAttention(rank=12, query_rank=14, rotary_dim=4, value_dim=6),
    position=RotaryPositions(32, interleaved=True),
    norm="rms",
    use_bias=False,
    init_stddev=0.5,
)
X = jax.random.normal(jax.random.key(0), (2, 7, 16))
POSITIONS = jnp.broadcast_to(jnp.arange(7)[None], (2, 7))


def terms(config, positions):
    return positions_for(config).terms(AttentionPositions(positions), causal=True, dtype=jnp.float32)


def attend(config, params, x, positions, mask, *cache):
    return MultiHeadLatentAttention(config, Compute()).apply(params, x, x, mask, terms(config, positions), *cache)


def init(config):
    module = MultiHeadLatentAttention(config, Compute())
    return module.init(jax.random.key(1), X, X, Mask(True), terms(config, POSITIONS))


@pytest.mark.slow
@pytest.mark.parametrize("query_rank", [14, None])
def test_token_by_token_as_the_whole_text(query_rank):
    config = dataclasses.replace(
        CONFIG, latent_attention=dataclasses.replace(CONFIG.latent_attention, query_rank=query_rank)
    )
    params = init(config)
    whole, memory = attend(config, params, X, POSITIONS, Mask(True))
    assert memory.values is None
    # For each token, the cache holds the latent and one rotated key, instead of 4 heads of 10 + 6.
    chex.assert_shape(memory.keys, (2, 1, 7, 12 + 4))
    ring = KeyValues(jnp.zeros((2, 1, 7, 16)), None)
    for i in range(7):
        mask = Mask(True, query_positions=POSITIONS[:, i : i + 1])
        step, ring = attend(config, params, X[:, i : i + 1], POSITIONS[:, i : i + 1], mask, ring, jnp.asarray(i))
        # float32 rounding; the products have another order
        np.testing.assert_allclose(step[:, 0], whole[:, i], atol=2e-5)
    np.testing.assert_allclose(ring.keys, memory.keys, atol=1e-5)


def test_as_plain_attention_of_the_keys_and_values_that_latents_make():
    params = init(CONFIG)
    p = jax.tree.map(np.asarray, params["params"])

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + CONFIG.norm_epsilon) * scale

    x = np.asarray(X)
    down = x @ p["key_value_down"]["kernel"]
    latent, turned = norm(down[..., :12], p["key_value_down_norm"]["scale"]), down[..., None, 12:]
    both = np.einsum("btr,rhn->bthn", latent, p["key_value_up"]["kernel"])
    query = norm(x @ p["query_down"]["kernel"], p["query_down_norm"]["scale"])
    query = np.einsum("btr,rhk->bthk", query, p["query_up"]["kernel"])
    rotate = terms(CONFIG, POSITIONS).rotate
    q_turned, k_turned = rotate(jnp.asarray(query[..., 6:]), jnp.asarray(turned))
    logits = np.einsum("bthk,bshk->bhts", query[..., :6], both[..., :6])
    logits = (logits + np.einsum("bthk,bsk->bhts", q_turned, k_turned[:, :, 0])) / np.sqrt(10)
    weights = jax.nn.softmax(jnp.where(np.tri(7, dtype=bool)[None, None], logits, -jnp.inf))
    want = np.einsum("bhts,bshv,hvd->btd", weights, both[..., 6:], p["out"]["kernel"])
    got, _ = attend(CONFIG, params, X, POSITIONS, Mask(True))
    np.testing.assert_allclose(got, want, atol=1e-4)  # float32 rounding with weights of 0.5; results reach 10


def test_the_config_says_which():
    assert self_attention_of(CONFIG) is MultiHeadLatentAttention
    assert self_attention_of(dataclasses.replace(CONFIG, latent_attention=None)) is MultiHeadAttention


def test_flops_are_those_of_the_products():
    maps = 16 * 14 + 14 * 4 * 10 + 16 * (12 + 4) + 12 * 4 * (6 + 6) + 4 * 6 * 16
    assert MultiHeadLatentAttention.flops(CONFIG, 5, 5) == 2 * 5 * maps


@pytest.mark.first(7)
@pytest.mark.parametrize(
    "fields, message",
    [
        ({"rank": 0}, r"latent_attention\.rank is 0, it must be at least 1"),
        ({"rotary_dim": 3}, r"rotary_dim is 3, it must be even"),
        ({"rotary_dim": 10}, r"rotary_dim is 10, it must be below config\.model\.head_dim 10"),
        ({"value_dim": 12}, r"value_dim is 12, it must be at most config\.model\.head_dim 10"),
        ({"position": LearnedPositions()}, r"requires RotaryPositions, config\.model\.position is LearnedPositions"),
        ({"num_kv_heads": 2}, r"requires one key head per head: config\.model\.num_kv_heads is 2, set it to None"),
        ({"qk_norm": True}, r"has its own norms: config\.model\.qk_norm is True"),
        ({"qkv_bias": True}, r"config\.model\.qkv_bias is True, set it to None"),
        ({"qkv_bias": False}, r"config\.model\.qkv_bias is False, set it to None"),
    ],
)
def test_what_does_not_fit_is_one_line(fields, message):
    own = {name: x for name, x in fields.items() if hasattr(CONFIG.latent_attention, name)}
    latent = dataclasses.replace(CONFIG.latent_attention, **own)
    others = {name: x for name, x in fields.items() if name not in own}
    experiment = tiny.get_config("gpt")
    experiment.model = dataclasses.replace(CONFIG, latent_attention=latent, **others)
    assert re.search(message, "; ".join(latent.problems(experiment)))
