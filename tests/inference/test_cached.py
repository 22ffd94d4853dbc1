"""Cached steps give the logits of the whole text, for every model that generates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import (
    DecoderSizes,
    DisentangledPositions,
    LatentAttention,
    LearnedPositions,
    LongRopeScaling,
    MeshConfig,
    MixtureOfExperts,
    ModelConfig,
    RelativePositionBuckets,
    RotaryPositions,
    UserError,
)
from pretrainax.inference.cached import CachedModel
from pretrainax.inference.loaded import LoadedModel
from pretrainax.layers.compute import Compute
from pretrainax.sharding.mesh import make_mesh
from tests.golden import CASES
from tests.golden.case import LENGTHS, batch, weights
from tests.golden.make import golden
from tests.support import written, written_elmo
from tests.support.tiers import few
from tests.support.tiny import get_config

WRITERS = [name for name, case in CASES.items() if case.config.family != "encoder"]
SIZES = dict(vocab_size=100, num_layers=3, d_model=16, d_ff=32, num_heads=4)
# A combination that no model of the zoo has: local and global layers, and positions that are not rotary.
DECODER = ModelConfig(
    position=LearnedPositions(32), layer_pattern=("local", "global"), window=4, num_kv_heads=2, **SIZES
)
ENCODER_DECODER = dataclasses.replace(
    DECODER,
    **dict(family="encoder_decoder", position=RelativePositionBuckets(8, 10), qk_norm=True, num_decoder_layers=2),
    **dict(separate_embeddings=True, decoder=DecoderSizes(d_model=24, d_ff=40, num_heads=6, num_kv_heads=2)),
)
# Experts in every second layer, followed by a feed-forward layer (ST-MoE).
TURNS = dataclasses.replace(
    ENCODER_DECODER, num_layers=4, experts=MixtureOfExperts(num_experts=3, every=2, dense_after=24)
)


def loaded(config, **mesh):
    sizes = MeshConfig(**{"data": 1, **mesh})
    devices = int(np.prod([sizes.data, sizes.pipeline, sizes.fsdp, sizes.sequence, sizes.tensor]))
    on = make_mesh(sizes, jax.devices()[:devices])
    experiment = dataclasses.replace(get_config("gpt"), model=config)
    return LoadedModel(experiment, models.build(config, Compute()), weights(config), None, on, "a test's model")


def stepped(model, texts, prompts):
    """Returns the logits after each prompt and after each token that follows it in its text: [B, steps + 1, V].

    The rows change places before each step: in step n, row r is the text (r + n) mod B.

    Args:
      texts: complete rows, as a batch.
      prompts: number of tokens of each prompt, [B]. The first text determines the number of steps of all rows.
    """
    real, rows = (texts["segment_ids"] > 0).sum(1), len(prompts)
    steps = int(real[0] - prompts[0])
    of_prompt = np.arange(prompts.max() + 1)[None] < prompts[:, None]  # one position of padding in each row
    given = {name: x if "encoder" in name else x[:, : of_prompt.shape[1]] for name, x in texts.items()}
    given |= {name: np.where(of_prompt, given[name], 0) for name in ("tokens", "segment_ids")}
    following = np.take_along_axis(texts["tokens"], prompts[:, None] + np.arange(steps), axis=1)
    turned = np.stack([np.roll(following[:, n], -n - 1) for n in range(steps)])
    cached = CachedModel(model)

    @jax.jit
    def run(params, batch, tokens):
        def step(state, tokens):
            logits, state = cached.step(params, cached.take(state, (jnp.arange(rows) + 1) % rows), tokens)
            return state, logits

        first, state = cached.start(params, batch, steps)
        return first, jax.lax.scan(step, state, tokens)[1]  # the scan requires constant shapes

    with jax.set_mesh(model.mesh), jax.default_matmul_precision("highest"):
        first, others = run(cached.params, given, turned)
    assert first.dtype == others.dtype == jnp.float32
    others = [np.roll(logits, n + 1, axis=0) for n, logits in enumerate(np.asarray(others))]
    return np.stack([np.asarray(first), *others], axis=1)


def places(logits, prompts, steps):
    """Returns the logits of complete rows after each prompt and after each step."""
    return np.take_along_axis(logits, (prompts[:, None] - 1 + np.arange(steps + 1))[:, :, None], axis=1)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", few(WRITERS))
def test_each_step_has_the_logits_of_the_whole_text_in_transformers(name):
    case, steps = CASES[name], 4  # the shortest text begins with one token; windows have 4 tokens too
    prompts = np.array(LENGTHS) - steps
    expected = places(golden(name)["logits"], prompts, steps)
    found, same = stepped(loaded(case.config), batch(case), prompts), np.ones((len(prompts), steps + 1), bool)
    if isinstance(scaling := getattr(case.config.position, "scaling", None), LongRopeScaling):
        # Up to the original length, LongRoPE scales a text with other factors than the longer whole text, so its logits
        # differ. test_generate_is_argmax.py compares these with a pass over the text so far.
        is_long = prompts[:, None] + np.arange(steps + 1) > scaling.original_length
        same = is_long == (np.array(LENGTHS) > scaling.original_length)[:, None]
        assert same.any()
    np.testing.assert_allclose(found[same], expected[same], atol=1e-4)


# --- rows, windows, prefixes -----------------------------------------------------------------------------------------

PROMPTS, STEPS = np.array([6, 3, 1, 5]), 9  # shorter and longer than the window; each text passes the window twice


def texts(config, prompts=PROMPTS, prefix=False):
    def rows(lengths):
        shape = len(lengths), max(lengths)
        real = np.arange(shape[1])[None] < np.array(lengths)[:, None]
        tokens = np.where(real, np.random.default_rng(0).integers(3, 100, shape), 0).astype(np.int32)
        positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        return {"tokens": tokens, "segment_ids": real.astype(np.int32), "positions": positions}

    out = rows(prompts + STEPS)
    if config.family == "encoder_decoder":
        out |= {f"encoder_{name}": x for name, x in rows((5, 8, 2, 7)[: len(prompts)]).items()}
    if prefix:
        out["prefix_mask"] = (np.arange(out["tokens"].shape[1])[None] < prompts[:, None]).astype(np.int32)
    return out


def whole(config, arrays):
    with jax.default_matmul_precision("highest"):
        return np.asarray(loaded(config)(arrays).heads["lm"].logits())


EIGHT = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.first(1)
@pytest.mark.parametrize("mesh", few([{}, EIGHT], [EIGHT]), ids=("one_device", "eight"))
@pytest.mark.parametrize(
    "config",
    few([DECODER, ENCODER_DECODER, TURNS], [DECODER, ENCODER_DECODER]),
    ids=("decoder", "encoder_decoder", "experts in turns"),
)
def test_windows_are_passed_on_one_device_as_on_eight(config, mesh):
    got = stepped(loaded(config, **mesh), texts(config), PROMPTS)
    np.testing.assert_allclose(got, places(whole(config, texts(config)), PROMPTS, STEPS), atol=1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", few(["palm", "grok", "deepseek", "st_moe"], ["palm", "grok"]))
def test_each_step_of_a_model_that_transformers_lacks_has_the_logits_of_the_whole_text(name):
    config = dataclasses.replace(written.CONFIGS[name], vocab_size=100)
    if config.experts is not None:  # no capacity limit: dropped tokens would depend on the other tokens
        config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, capacity=None))
    got = stepped(loaded(config), texts(config), PROMPTS)
    np.testing.assert_allclose(got, places(whole(config, texts(config)), PROMPTS, STEPS), atol=1e-4)


def long_rope(config, original_length, planes=2):
    scaling = LongRopeScaling((1.0,) * planes, (5.0, 20.0)[:planes], factor=4.0, original_length=original_length)
    return dataclasses.replace(config, position=RotaryPositions(32, theta=100.0, scaling=scaling))


def prefixes(config, arrays, prompts):
    """Returns logits after each prompt and step, from forward passes over only the tokens so far: [B, steps + 1, V]."""
    model, found = loaded(config), []
    run = jax.jit(lambda batch: model.model.apply({"params": model.params}, batch, deterministic=True))
    for step in range(STEPS + 1):
        seen = prompts[:, None] + step > np.arange(arrays["tokens"].shape[1])
        rows = arrays | {name: np.where(seen, arrays[name], 0) for name in ("tokens", "segment_ids", "positions")}
        with jax.set_mesh(model.mesh), jax.default_matmul_precision("highest"):
            logits = np.asarray(run(rows).heads["lm"].logits())
        found.append(np.take_along_axis(logits, (prompts + step - 1)[:, None, None], axis=1)[:, 0])
    return np.stack(found, axis=1)


LATENT = dataclasses.replace(
    DECODER, num_kv_heads=None, latent_attention=LatentAttention(rank=12, query_rank=14, rotary_dim=4, value_dim=6)
)
GLOBAL = dataclasses.replace(DECODER, layer_pattern=("global",), window=None)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "config, original_length, mesh, prefix",
    few(
        [
            *((GLOBAL, length, {}, False) for length in (2, 5, 6, 7, 8, 14)),
            (GLOBAL, 8, {}, True),
            (DECODER, 8, {}, False),
            (DECODER, 8, EIGHT, True),
            (ENCODER_DECODER, 8, {}, False),
            (ENCODER_DECODER, 6, EIGHT, False),
            (LATENT, 8, {}, False),
        ],
        [(GLOBAL, 6, {}, False), (DECODER, 8, EIGHT, True), (ENCODER_DECODER, 8, {}, False), (LATENT, 8, {}, False)],
    ),
)
def test_a_row_that_outgrows_the_old_context_is_turned_again_and_no_other_row_is(config, original_length, mesh, prefix):
    """The prompts have 6, 3, 1 and 5 tokens, and 9 follow: rows pass the old context in different steps, or never."""
    config = long_rope(config, original_length)
    arrays = texts(config, prefix=prefix)
    expected = prefixes(config, arrays, PROMPTS)
    # A scaling that never switches to its long factors gives other logits.
    assert np.abs(expected - prefixes(long_rope(config, 31), arrays, PROMPTS)).max() > 0.1
    np.testing.assert_allclose(stepped(loaded(config, **mesh), arrays, PROMPTS), expected, atol=1e-4)


def test_only_the_last_segment_of_a_row_counts():
    """Tokens of an earlier segment do not count towards the length at which LongRoPE changes its factors."""
    config, before = long_rope(DECODER, 8), {"tokens": [7, 8, 9], "segment_ids": [1, 1, 1], "positions": [0, 1, 2]}
    arrays = texts(config)
    behind = arrays | {"segment_ids": 2 * arrays["segment_ids"]}
    behind = {name: np.concatenate([np.array([before[name]] * len(x), np.int32), x], 1) for name, x in behind.items()}
    got = stepped(loaded(config), behind, PROMPTS + 3)
    np.testing.assert_allclose(got, prefixes(config, arrays, PROMPTS), atol=1e-4)


def test_padding_of_a_batch_makes_no_row_long():
    config, arrays = long_rope(GLOBAL, 8), texts(GLOBAL)
    full = whole(config, arrays)
    for row, length in enumerate(PROMPTS + STEPS):
        alone = {name: x[row : row + 1, :length] for name, x in arrays.items()}
        np.testing.assert_allclose(full[row, :length], whole(config, alone)[0], atol=1e-4)
    few_tokens = arrays | {"segment_ids": np.where(np.arange(15) < 8, arrays["segment_ids"], 0)}
    short = {name: x[:, :8] for name, x in arrays.items()}
    np.testing.assert_allclose(whole(config, few_tokens)[:, :8], whole(config, short), atol=1e-4)


@pytest.mark.slow
def test_a_prefix_is_seen_from_both_sides():
    arrays = texts(DECODER, prefix=True)
    expected = whole(DECODER, arrays)
    assert np.abs(expected - whole(DECODER, texts(DECODER))).max() > 0.1
    np.testing.assert_allclose(stepped(loaded(DECODER), arrays, PROMPTS), places(expected, PROMPTS, STEPS), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("config", [DECODER, ENCODER_DECODER], ids=("decoder", "encoder_decoder"))
def test_one_row_becomes_two_that_go_different_ways(config):
    prompt = np.array([6])
    arrays = texts(config, prompt)
    model = loaded(config)
    cached, end = CachedModel(model), int(prompt[0])
    given = {name: x if "encoder" in name else x[:, :end] for name, x in arrays.items()}
    forked = {name: np.repeat(x, 2, axis=0) for name, x in arrays.items()}
    forked["tokens"][1, end:] = forked["tokens"][0, end:][::-1]

    @jax.jit
    def run(params, batch, tokens):
        first, state = cached.start(params, batch, STEPS)
        alone, _ = cached.step(params, state, tokens[0, :1])
        state = cached.take(state, jnp.array([0, 0]))
        _, logits = jax.lax.scan(lambda s, tokens: cached.step(params, s, tokens)[::-1], state, tokens)
        return first, alone, logits

    with jax.set_mesh(model.mesh), jax.default_matmul_precision("highest"):
        first, alone, logits = run(cached.params, given, forked["tokens"][:, end:].T)
    expected = whole(config, forked)
    np.testing.assert_allclose(first, expected[:1, end - 1], atol=1e-4)
    np.testing.assert_allclose(alone, expected[:1, end], atol=1e-4)
    np.testing.assert_allclose(logits, expected[:, end:].swapaxes(0, 1), atol=1e-4)


# --- costs and errors ------------------------------------------------------------------------------------------------


def test_a_step_copies_no_ring_and_turns_no_matrix():
    model = loaded(DECODER)
    cached = CachedModel(model)

    def run(params, state, tokens):
        return jax.lax.fori_loop(0, 8, lambda _, x: (cached.step(params, *x)[1], x[1]), (state, tokens))

    for rows in (1, 3):
        arrays = {name: x[:1].repeat(rows, 0) for name, x in texts(DECODER).items()}
        with jax.set_mesh(model.mesh):
            params = cached.params
            _, state = jax.eval_shape(lambda params, batch: cached.start(params, batch, 8), params, arrays)
            tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)
            text = jax.jit(run, donate_argnums=1).lower(params, state, tokens).compile().as_text()
        moved = [line for line in text.splitlines() if " copy(" in line or " transpose(" in line]
        large = {str(list(block.self_attention.keys.shape)).replace(" ", "") for block in state.memory.blocks} | {
            "[16,100]"
        }
        assert not [line for line in moved if any(shape in line.split("(")[0] for shape in large)]


def test_matrices_are_kept_as_products_cast_them_and_all_else_in_float32():
    model = loaded(TURNS)
    low = dataclasses.replace(model, model=models.build(TURNS, Compute(dtype="bfloat16")))
    kept = {
        jax.tree_util.keystr(path): x.dtype for path, x in jax.tree_util.tree_leaves_with_path(CachedModel(low).params)
    }
    low = {path for path, dtype in kept.items() if dtype == jnp.bfloat16}
    assert low == {path for path in kept if path.endswith("['kernel']") and "['router']" not in path}
    assert any("['router']" in path for path in kept.keys() - low)


@pytest.mark.parametrize(
    "changes, mesh, said",
    [
        ({"family": "encoder"}, {}, "a test's model is an encoder, which writes no text: it fills masks, embeds"),
        (
            vars(written_elmo.CONFIG),
            {},
            "is a recurrent model, which does not support generation",
        ),
        ({"position": DisentangledPositions()}, {}, "config.model.position DisentangledPositions"),
        ({"input_convolution": 3}, {}, "config.model.input_convolution 3"),
        ({}, {"sequence": 2}, "config.mesh.sequence is 2, generation needs 1"),
        ({}, {"pipeline": 2}, "config.mesh.pipeline is 2, generation needs 1"),
    ],
)
def test_what_cannot_be_stepped_through_is_refused(changes, mesh, said):
    config = dataclasses.replace(DECODER, **{"num_kv_heads": None} | changes)
    with pytest.raises(UserError, match=said):
        CachedModel(loaded(config, **mesh))
