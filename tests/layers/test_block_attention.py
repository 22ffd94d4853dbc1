"""Tests attention by random blocks: the blocks that each block attends to, the random draws, and linear cost."""

import dataclasses
import functools
import importlib
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import (
    Classify,
    Embed,
    LearnedPositions,
    ModelConfig,
    RandomBlocks,
    RotaryPositions,
    SinusoidalPositions,
)
from pretrainax.layers.attention import Mask, attention
from pretrainax.layers.attention_mask import pad
from pretrainax.layers.attention_spec import KeyBlocks
from pretrainax.layers.compute import Compute
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.sparse_attention import BlockAttention
from pretrainax.layers.sparse_attention.blocks import key_blocks, random_blocks
from tests.golden.case import needs_transformers
from tests.support import tiny
from tests.support.runs import ROOT

CONFIG = ModelConfig(
    family="encoder",
    vocab_size=64,
    num_layers=2,
    d_model=8,
    d_ff=32,
    num_heads=2,
    position=LearnedPositions(64),
    sparse_attention=RandomBlocks(size=3, random=1),
    masked_lm_head=True,
)


def test_a_block_meets_its_neighbours_the_ends_and_what_is_drawn():
    fixed = key_blocks(CONFIG, 24, None)[0]
    assert fixed.tolist() == [
        [0, -1, 1, 2, 7, 0],  # The left neighbour is the first block, which is already in the list.
        *([0, i - 1, i, i + 1, 7, 0] for i in range(2, 6)),
        [0, 5, 6, -1, 7, 0],
    ]
    drawn = key_blocks(CONFIG, 24, 1)
    np.testing.assert_array_equal(drawn[:, :, :5], np.broadcast_to(fixed[:, :5], (2, 6, 5)))
    np.testing.assert_array_equal(drawn[:, :, 5:], random_blocks(1, 2, 24, 3, 1, 64))


@pytest.mark.parametrize("length", [96, 768, 2048, 8192])
def test_nothing_is_drawn_that_is_met_already(length):
    for layer in range(3):
        drawn = random_blocks(layer, 4, length, 8, 3, length)
        assert drawn.shape == (4, length // 8 - 2, 3)
        own = np.arange(1, length // 8 - 1)[None, :, None]
        assert (np.abs(drawn - own) > 1).all() and (drawn > 0).all() and (drawn < 5 + 2 * 3 - 1).all()
        assert all(len(set(blocks)) == 3 for blocks in drawn.reshape(-1, 3).tolist())


def test_layers_and_heads_draw_their_own():
    drawn = [random_blocks(layer, 4, 768, 8, 3, 768) for layer in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any() and (drawn[0][0] != drawn[0][1]).any()


@needs_transformers
@pytest.mark.parametrize(
    "length, size, count, longest",
    [
        (1024, 64, 3, 4096),
        (3072, 64, 3, 4096),
        (4096, 64, 3, 4096),
        (2048, 64, 3, 4096),
        (1024, 32, 2, 1024),
        (96, 8, 1, 128),
    ],
)
def test_what_is_drawn_is_what_transformers_draws_in_training(length, size, count, longest):
    import transformers
    from transformers.models.big_bird import modeling_big_bird

    config = transformers.BigBirdConfig(
        hidden_size=16,
        num_attention_heads=4,
        block_size=size,
        num_random_blocks=count,
        max_position_embeddings=longest,
    )
    theirs = modeling_big_bird.BigBirdBlockSparseAttention(config).train()
    for layer in range(3):
        np.random.seed(layer)
        if length in (1024, 3072, 4096):
            drawn = [
                theirs._bigbird_block_rand_mask(longest, longest, size, size, count, last_idx=1024) for _ in range(4)
            ]
        else:
            plan = theirs._get_rand_attn_plan(length, size, count)
            drawn = theirs._bigbird_block_rand_mask_with_head(length, length, size, size, 4, *plan)
        expected = np.stack(drawn)[:, : length // size - 2]
        np.testing.assert_array_equal(random_blocks(layer, 4, length, size, count, longest), expected)


def allowed_pairs(table, length, size):
    """Returns how often each query attends to each key, [H, T, T], from the table of a row of whole blocks."""
    heads, between, _ = table.shape
    met = np.zeros((heads, between + 2, between + 2))
    met[:, [0, -1]] = 1
    for head in range(heads):
        for i, blocks in enumerate(table[head]):
            np.add.at(met[head, i + 1], blocks[blocks >= 0], 1)
    return met.repeat(size, 1).repeat(size, 2)[:, :length, :length]


@pytest.mark.first(2)
@pytest.mark.parametrize("drawn, deterministic", [("always", True), ("training", True), ("training", False)])
@pytest.mark.parametrize("length", [24, 26])
def test_queries_read_the_keys_of_their_blocks(length, drawn, deterministic):
    settings = dataclasses.replace(CONFIG.sparse_attention, drawn=drawn)
    module = BlockAttention(dataclasses.replace(CONFIG, sparse_attention=settings), Compute(), deterministic)
    q, k, v = jnp.asarray(np.random.RandomState(0).standard_normal((3, 2, length, 2, 4)).astype(np.float32))
    ids = jnp.asarray([[1] * 10 + [2] * (length - 13) + [0] * 3, [1] * length])
    mask = Mask(False, ids, ids, layer=jnp.asarray(1))
    got = module.attend(jnp.zeros((2, length, 8)), (q, k, v), mask, PositionTerms(), 0.5)
    is_first = drawn == "training" and deterministic
    table = key_blocks(CONFIG, length + -length % 3, None if is_first else 1)
    met = allowed_pairs(table, length, 3) * np.asarray(ids[:, None, :, None] == ids[:, None, None, :])
    weights = met * np.exp(np.einsum("bthk,bshk->bhts", q, k) * 0.5)
    expected = np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(got, expected, atol=2e-6)  # float32 rounding; the sums have another order


def test_of_few_blocks_each_meets_all():
    assert BlockAttention.blocks(CONFIG, 21) is None
    q, k, v = jnp.asarray(np.random.RandomState(0).standard_normal((3, 1, 21, 2, 4)).astype(np.float32))
    mask = Mask(False, jnp.ones((1, 21), int), jnp.ones((1, 21), int))
    got = BlockAttention(CONFIG, Compute()).attend(jnp.zeros((1, 21, 8)), (q, k, v), mask, PositionTerms(), 0.5)
    np.testing.assert_array_equal(got, attention(q, k, v, mask=mask, scale=0.5))


def test_pairs_are_those_of_the_blocks_and_of_the_ends():
    config = dataclasses.replace(CONFIG, sparse_attention=RandomBlocks())
    assert BlockAttention.blocks(config, 4096) == KeyBlocks(64, sides=1, extra_blocks=5, global_tokens=2 * 64)
    assert pad(jnp.zeros((1, 700)), 1, 64).shape == (1, 704)


@functools.cache
def cost(length):
    sys.path.append(str(ROOT / "benchmarks"))
    config = dataclasses.replace(CONFIG, d_model=32, sparse_attention=RandomBlocks(), position=LearnedPositions(16_384))
    return importlib.import_module("long_rows").cost_of(config, length)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1], ids=["FLOPs", "bytes"])
def test_four_times_the_length_costs_four_times_as_much(kind):
    short, longer, longest = (cost(length)[kind] for length in (1024, 4096, 16_384))
    # In a longer row, the blocks at the ends have a smaller share of the cost.
    assert longer / short == pytest.approx(4, rel=0.15) and longest / longer == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"sparse_attention": RandomBlocks(size=0)}, "size is 0, it must be at least 1"),
        ({"sparse_attention": RandomBlocks(random=-1)}, "random is -1, it must be at least 0"),
        ({"layer_pattern": ("local",), "window": 4}, "layer_pattern is .*, set it to \\('global',\\)"),
        ({"head": Embed(2), "masked_lm_head": False}, "config.model.head Embed has several documents per row: use"),
        ({"head": Classify(1, "choice"), "masked_lm_head": False}, "config.model.head Classify has several documents"),
        ({"position": SinusoidalPositions()}, "which SinusoidalPositions does not have: use LearnedPositions"),
    ],
)
def test_what_does_not_fit_is_one_line(fields, message):
    experiment = tiny.get_config("gpt")
    experiment.model = dataclasses.replace(CONFIG, **fields)
    lines = list(experiment.model.sparse_attention.problems(experiment))
    assert len(lines) == 1 and re.search(message, lines[0])


@pytest.mark.slow
def test_rotary_positions_have_a_longest_row_too():
    experiment = tiny.get_config("gpt")
    experiment.model = dataclasses.replace(CONFIG, position=RotaryPositions(64))
    assert not list(experiment.model.sparse_attention.problems(experiment))
