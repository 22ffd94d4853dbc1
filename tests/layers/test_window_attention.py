"""Compares window attention in blocks with masked attention over all pairs, and tests its linear cost."""

import dataclasses
import functools
import importlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import (
    Classify,
    Extract,
    LearnedPositions,
    MeshConfig,
    ModelConfig,
    RelativePositionBuckets,
    RotaryPositions,
    SlidingWindows,
    UserError,
)
from pretrainax.layers.attention import Mask, attention, choose_backend
from pretrainax.layers.attention_mask import FORBIDDEN
from pretrainax.layers.attention_spec import KeyBlocks, collect_attention_specs
from pretrainax.layers.attention_work import all_pairs
from pretrainax.layers.compute import Compute
from pretrainax.layers.sparse_attention import WindowAttention
from pretrainax.layers.sparse_attention.windows import (
    first_token_attention,
    first_token_logits,
    first_tokens,
    question_attention,
    question_logits,
    window_attention,
)
from pretrainax.sharding.arrays import check_mesh
from pretrainax.sharding.mesh import make_mesh
from tests.support import tiny
from tests.support.runs import ROOT

ROWS = jnp.asarray([[1] * 9 + [2] * 10 + [0] * 4, [1] * 23])  # two documents and padding; one document
SCALE = 0.5
CONFIG = ModelConfig(
    family="encoder",
    vocab_size=64,
    num_layers=2,
    d_model=16,
    d_ff=32,
    num_heads=2,
    position=LearnedPositions(64),
    layer_pattern=("local",),
    window=6,
    sparse_attention=SlidingWindows(),
    masked_lm_head=True,
)


def vectors(length, seed=0):
    """Returns queries, keys and values, [2, T, 2, 4]."""
    return jnp.asarray(np.random.RandomState(seed).standard_normal((3, 2, length, 2, 4)).astype(np.float32))


def read(q, k, v, allowed):
    """Computes full attention with the mask `allowed`, [B, T, S]."""
    logits = jnp.einsum("bthk,bshk->bhts", q, k) * SCALE
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(allowed[:, None], logits, FORBIDDEN)), v)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.first(1)
# block sizes that divide the length or not, and windows beyond the row
@pytest.mark.parametrize("window", [2, 5, 6, 16, 100])
def test_blocks_read_what_a_mask_leaves_of_all_pairs(window):
    q, k, v = vectors(23)
    mask = Mask(False, ROWS, ROWS, window=window)
    expected = attention(q, k, v, mask=mask, scale=SCALE)
    # The sums are equal, but contain fewer zeros.
    np.testing.assert_allclose(window_attention(q, k, v, mask, None, SCALE, None), expected, atol=1e-6)


def test_the_first_token_of_each_text_is_known_of_its_row():
    rows = jnp.asarray([[1, 1, 1, 2, 2, 0], [3, 4, 4, 4, 4, 4]])
    assert first_tokens(rows).tolist() == [[0, 0, 0, 3, 3, 5], [0, 1, 1, 1, 1, 1]]


@pytest.mark.first(1)
@pytest.mark.parametrize("window", [2, 6, 16, 100])
def test_others_see_the_first_token_once_and_their_window(window):
    q, k, v = vectors(23)
    mask, first = Mask(False, ROWS, ROWS, window=window), first_tokens(ROWS)
    is_first = first == jnp.arange(23)[None]
    allowed = mask.materialize(23, 23)[:, 0] | (first[:, :, None] == jnp.arange(23)[None, None])
    got = window_attention(q, k, v, mask, first_token_logits(q, k, v, first, SCALE), SCALE, None)
    np.testing.assert_allclose(got[~is_first], read(q, k, v, allowed)[~is_first], atol=1e-6)  # as above


@pytest.mark.slow
@pytest.mark.parametrize("window, count", [(2, 4), (6, 4), (6, 9), (100, 23)])
def test_others_see_the_question_once_and_their_window_and_it_sees_all_of_its_text(window, count):
    q, k, v = vectors(23)
    # The first row's first document has a question of 4 tokens; the second row has no question.
    asked = jnp.arange(23)[None] < jnp.asarray([[4], [0]])
    mask = Mask(False, ROWS, ROWS, window=window, prefix=asked.astype(jnp.int32))
    same = ROWS[:, :, None] == ROWS[:, None]
    allowed = mask.materialize(23, 23)[:, 0] | (asked[:, None] & same)
    got = window_attention(q, k, v, mask, question_logits(q, k, v, mask, count, SCALE), SCALE, None)
    np.testing.assert_allclose(got, read(q, k, v, allowed), atol=1e-6)  # as above
    got = question_attention(q, k, v, mask, count, SCALE, None)
    np.testing.assert_allclose(got, read(q, k, v, same)[:, :count], atol=1e-6)  # as above


def test_the_first_token_sees_all_of_its_text():
    q, k, v = vectors(23)
    first = first_tokens(ROWS)
    is_first = first == jnp.arange(23)[None]
    got = first_token_attention(q, k, v, first, SCALE, None)
    expected = read(q, k, v, ROWS[:, :, None] == ROWS[:, None])
    np.testing.assert_allclose(got[is_first], expected[is_first], atol=1e-6)  # as above
    assert not got[~is_first].any()


def batch(segment_ids):
    ids = jnp.asarray(segment_ids, jnp.int32)
    tokens = jax.random.randint(jax.random.key(0), ids.shape, 3, 64)
    return {
        "tokens": tokens,
        "segment_ids": ids,
        "positions": jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape),
        "question": jnp.broadcast_to(jnp.arange(ids.shape[1])[None] < 2, ids.shape).astype(jnp.int32),
    }


def model_and_params(**fields):
    config = dataclasses.replace(CONFIG, **fields)
    model = models.build(config, Compute())
    variables = model.init(jax.random.key(1), batch([[1] * 8]), deterministic=True)
    # The parameters are large enough that each term has an effect.
    return model, {"params": jax.tree.map(lambda x: 3 * x, variables["params"])}


def output(model, params, arrays, **options):
    found = model.apply(params, arrays, deterministic=not options, mutable=["intermediates"], **options)
    return found[1]["intermediates"]["encoder"]["output"][0]


@pytest.mark.slow
def test_a_token_knows_of_one_far_away_by_the_first():
    arrays = batch([[1] * 40])
    changed = arrays | {"tokens": arrays["tokens"].at[0, 39].set(1)}

    def moved(model, params):
        return np.abs(output(model, params, arrays) - output(model, params, changed))[0].max(-1)

    one_by_one = moved(*model_and_params(sparse_attention=SlidingWindows("none")))
    # Each of the two layers reaches three tokens in each direction.
    assert not one_by_one[:33].any() and one_by_one[33:].all()
    assert moved(*model_and_params()).all()  # The first token attends to all tokens, and all tokens attend to it.
    asking = dict(sparse_attention=SlidingWindows("question", 2), head=Extract(), masked_lm_head=False)
    assert moved(*model_and_params(**asking)).all()  # The question tokens work in the same way.


@pytest.mark.slow
def test_training_drops_weights():
    model, params = model_and_params(attention_dropout_rate=0.5)
    arrays = batch([[1] * 20])
    one, other = (output(model, params, arrays, rngs={"dropout": jax.random.key(i)}) for i in range(2))
    assert np.abs(one - other).max() > 0.1
    assert np.isfinite(one).all()


# --- cost -------------------------------------------------------------------------------------------------------------


def test_pairs_are_those_of_three_blocks_and_of_the_first_token():
    blocks = WindowAttention.blocks(dataclasses.replace(CONFIG, window=512), 4096)
    assert blocks == KeyBlocks(256, sides=1, global_tokens=2)
    assert blocks.pairs(4096) == 4096 * (3 * 256 + 2)
    assert blocks.pairs(4000) == 4096 * 3 * 256 + 2 * 4000  # The last block is padded.
    assert blocks.pairs(100) == 100**2 + 2 * 100  # The row fits into one block of the row's length.
    asking = dataclasses.replace(CONFIG, window=512, sparse_attention=SlidingWindows("question"))
    assert [WindowAttention.blocks(asking, length).global_tokens for length in (4096, 20)] == [2 * 65, 2 * 20]


@pytest.mark.slow
def test_the_spec_says_so():
    model, _ = model_and_params()
    with collect_attention_specs() as specs:
        jax.eval_shape(lambda: model.init(jax.random.key(0), batch([[1] * 12]), deterministic=True))
    (spec,) = specs
    assert all_pairs(spec).tolist() == [12 * 9 + 2 * 12]
    with pytest.raises(
        UserError, match="does not support blocks, and config.model.sparse_attention is set; set it to 'auto'"
    ):
        choose_backend("tpu_splash", "tpu", dataclasses.replace(spec, dropout_rate=0.0))


@functools.cache
def cost(length):
    sys.path.append(str(ROOT / "benchmarks"))
    return importlib.import_module("long_rows").cost_of(dataclasses.replace(CONFIG, d_model=32, window=512), length)


@pytest.mark.parametrize("kind", [0, 1], ids=["FLOPs", "bytes"])
def test_four_times_the_length_costs_four_times_as_much(kind):
    short, longer, longest = (cost(length)[kind] for length in (1024, 4096, 16_384))
    # The edges of a longer row have a smaller share of the cost.
    assert longer / short == pytest.approx(4, rel=0.05) and longest / longer == pytest.approx(4, rel=0.05)


# --- unsupported settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"family": "decoder"}, "requires an encoder, config.model.family is 'decoder': set it to None"),
        ({"position": RelativePositionBuckets()}, "config.model.position is RelativePositionBuckets: use Learned"),
        ({"num_kv_heads": 1}, "requires one key head per head: config.model.num_kv_heads is 1, set it to None"),
        ({"qk_norm": True}, "does not support config.model.qk_norm, which is True: set it to False"),
        (
            {"attention_logit_cap": 5.0},
            "does not support config.model.attention_logit_cap, which is 5.0: set it to None",
        ),
        ({"layer_pattern": ("local", "global")}, r"layer_pattern is \('local', 'global'\), set it to \('local',\)"),
        (
            {"sparse_attention": SlidingWindows("none"), "head": Classify(2, "single"), "masked_lm_head": False},
            "global_tokens is 'none', and config.model.head Classify reads the first token, which only attends to "
            "its window of 6: set it to 'first'",
        ),
        (
            {"sparse_attention": SlidingWindows("none"), "pair_head": True},
            "global_tokens is 'none', and config.model.pair_head reads the first token",
        ),
        (
            {"sparse_attention": SlidingWindows("none"), "head": Extract(), "masked_lm_head": False},
            "global_tokens is 'none', and config.model.head Extract would see the question only within "
            "a window of 6: set it to 'question'",
        ),
        (
            {"sparse_attention": SlidingWindows("question")},
            "global_tokens is 'question', which requires config.model.head Extract: set it to 'first'",
        ),
        (
            {"sparse_attention": SlidingWindows(longest_question=0)},
            "longest_question is 0, it must be at least 1",
        ),
        (
            {"window": 33},
            "config.model.window is 33, and config.model.sparse_attention splits it evenly around a token: set "
            "it to 32, which is equivalent, or to 34",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(fields, message):
    experiment = tiny.get_config("gpt")
    experiment.model = dataclasses.replace(CONFIG, **fields)
    lines = list(experiment.model.sparse_attention.problems(experiment))
    assert len(lines) == 1 and re.search(message, lines[0])


def test_a_head_that_pools_all_tokens_needs_no_global_one():
    experiment = tiny.get_config("gpt")
    head = Classify(2, "single", pooling="mean")
    experiment.model = dataclasses.replace(CONFIG, sparse_attention=SlidingWindows("none"), head=head)
    assert not list(experiment.model.sparse_attention.problems(experiment))


@pytest.mark.slow
def test_rotary_positions_turn_the_global_maps_too():
    model, params = model_and_params(position=RotaryPositions(64))
    arrays = batch([[1] * 20])
    later = arrays | {"positions": arrays["positions"] + 5}
    # Positions are relative, so a shift of all positions changes nothing; float32 rounding of angles.
    np.testing.assert_allclose(output(model, params, later), output(model, params, arrays), atol=1e-4)


@pytest.mark.slow
def test_a_mesh_that_splits_the_length_is_refused():
    experiment = tiny.get_config("gpt")
    experiment.model = CONFIG
    with pytest.raises(UserError, match="config.model.sparse_attention is set, .* set config.mesh.sequence=2 to 1"):
        check_mesh(experiment, make_mesh(MeshConfig(data=1, sequence=2), jax.devices()[:2]))
