import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import (
    LearnedPositions,
    ModelConfig,
    RelativePositionBuckets,
    RotaryPositions,
    SinusoidalPositions,
    UserError,
)
from pretrainax.layers.compute import Compute
from pretrainax.training import losses
from tests.golden import CASES
from tests.golden.case import batch as batch_of
from tests.support.tiers import few

_SMALL = dict(vocab_size=50, num_layers=2, d_model=16, d_ff=32, num_heads=4)
CONFIGS = {
    "encoder": ModelConfig(
        family="encoder",
        norm_at="post",
        position=LearnedPositions(16),
        embedding_norm=True,
        num_token_types=2,
        masked_lm_head=True,
        **_SMALL,
    ),
    "encoder_decoder": ModelConfig(
        family="encoder_decoder",
        position=RelativePositionBuckets(num_buckets=8, max_distance=10),
        norm="rms",
        use_bias=False,
        attention_scale=1.0,
        scale_tied_logits=True,
        init_stddev=None,
        **_SMALL,
    ),
    "decoder": ModelConfig(
        family="decoder",
        position=RotaryPositions(16),
        norm="rms",
        gated=True,
        activation="silu",
        use_bias=False,
        num_kv_heads=2,
        tie_embeddings=False,
        init_stddev=0.5,  # so that the attention weights are not uniform
        **_SMALL,
    ),
}
# Two documents and padding, at positions 0-3, 4-6 and 7.
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 0]] * 2, np.int32)
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2, 0]] * 2, np.int32)


def batch(family):
    rng = np.random.default_rng(0)

    def rows():
        return {"tokens": rng.integers(0, 50, (2, 8)).astype(np.int32), "segment_ids": SEGMENTS, "positions": POSITIONS}

    out = rows()
    if family == "encoder_decoder":
        out |= {f"encoder_{name}": value for name, value in rows().items()}
    return out


def features(config, params, batch):
    model = models.build(config, Compute())
    return np.asarray(
        jax.jit(lambda b: model.apply({"params": params}, b, deterministic=True).heads["lm"].features)(batch)
    )


@pytest.fixture(scope="module", params=CONFIGS)
def case(request):
    """Returns (family, config, parameters, batch, features)."""
    config, inputs = CONFIGS[request.param], batch(request.param)
    params = models.build(config, Compute()).init(jax.random.key(0), inputs, deterministic=True)["params"]
    return request.param, config, params, inputs, features(config, params, inputs)


def changed_places(case, name, place):
    """Returns the positions in the first row whose features change with the token at `place`.

    The features of the second row must not change.
    """
    _, config, params, inputs, before = case
    tokens = inputs[name].copy()
    tokens[0, place] = (tokens[0, place] + 1) % 50
    differs = (features(config, params, inputs | {name: tokens}) != before).any(-1)
    assert not differs[1].any()
    return set(np.flatnonzero(differs[0]))


@pytest.mark.parametrize(
    "place, bidirectional, causal",
    [
        (0, {0, 1, 2, 3}, {0, 1, 2, 3}),
        (2, {0, 1, 2, 3}, {2, 3}),
        (4, {4, 5, 6}, {4, 5, 6}),
        (6, {4, 5, 6}, {6}),
        (7, {7}, {7}),  # padding
    ],
)
def test_a_token_changes_only_what_may_see_it(case, place, bidirectional, causal):
    assert changed_places(case, "tokens", place) == (bidirectional if case[0] == "encoder" else causal)


@pytest.mark.parametrize("case", ["encoder_decoder"], indirect=True)
@pytest.mark.parametrize("place, expected", [(0, {0, 1, 2, 3}), (3, {0, 1, 2, 3}), (5, {4, 5, 6}), (7, {7})])
def test_an_encoded_token_changes_only_its_segment(case, place, expected):
    assert changed_places(case, "encoder_tokens", place) == expected


def test_lengths_of_texts_say_what_segments_of_one_text_a_row_do(case):
    family, config, params, inputs, _ = case
    lengths = np.array([5, 8], np.int32)
    ids = (np.arange(8) < lengths[:, None]).astype(np.int32)
    sides = ("", "encoder_") if family == "encoder_decoder" else ("",)
    inputs = inputs | {f"{side}segment_ids": ids for side in sides}
    told = inputs | {f"{side}text_lengths": lengths for side in sides}
    np.testing.assert_array_equal(features(config, params, told), features(config, params, inputs))


def test_a_packed_text_has_the_features_it_has_alone(case):
    _, config, params, inputs, before = case
    alone = {name: value[:, 4:7] for name, value in inputs.items()}
    # The sums have 3 float32 terms here, and 8 terms there, of which the mask removes 5.
    np.testing.assert_allclose(features(config, params, alone), before[:, 4:7], atol=2e-5)


@pytest.mark.first(2)
@pytest.mark.parametrize("family", CONFIGS)
def test_abstract_params_are_those_of_the_model(family):
    config = CONFIGS[family]
    params = models.build(config, Compute()).init(jax.random.key(0), batch(family), deterministic=True)["params"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert shapes == models.abstract_params(config)


@pytest.mark.parametrize("position", [LearnedPositions(16), SinusoidalPositions()], ids=lambda p: type(p).__name__)
def test_an_untied_output_matrix_has_the_width_of_factorised_embeddings(position):
    config = dataclasses.replace(CONFIGS["encoder"], position=position, embedding_dim=8, tie_embeddings=False)
    params = models.abstract_params(config)
    assert params["unembedding"]["kernel"].shape == (8, 50) and params["embedding_projection"]["kernel"].shape == (
        8,
        16,
    )


def test_parameters_are_float32_and_features_in_the_compute_dtype():
    model = models.build(CONFIGS["decoder"], Compute(dtype="bfloat16"))
    outputs, variables = model.init_with_output(jax.random.key(0), batch("decoder"), deterministic=True)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    assert (outputs.heads["lm"].features.dtype, outputs.heads["lm"].logits().dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.first(1)
def test_bfloat16_is_near_float32(case):
    _, config, params, inputs, _ = case

    def logits(dtype):
        outputs = models.build(config, Compute(dtype=dtype)).apply({"params": params}, inputs, deterministic=True)
        return np.asarray(outputs.heads["lm"].logits())

    exact = logits("float32")
    # bfloat16 keeps 8 bits, so errors are about 1 % of the logits, or more if they add up.
    assert np.abs(logits("bfloat16") - exact).mean() < 0.03 * np.abs(exact).mean()


def test_token_types_default_to_zero():
    config, inputs = CONFIGS["encoder"], batch("encoder")
    params = models.build(config, Compute()).init(jax.random.key(0), inputs, deterministic=True)["params"]
    zeros, ones = np.zeros((2, 8), np.int32), np.ones((2, 8), np.int32)
    without = features(config, params, inputs)
    np.testing.assert_array_equal(features(config, params, inputs | {"token_types": zeros}), without)
    assert not np.allclose(features(config, params, inputs | {"token_types": ones}), without)


@pytest.mark.first(2)
@pytest.mark.parametrize("position", [LearnedPositions(16), SinusoidalPositions(), RotaryPositions(16)])
def test_positions_come_from_the_batch(position):
    config, inputs = dataclasses.replace(CONFIGS["decoder"], position=position), batch("decoder")
    params = models.build(config, Compute()).init(jax.random.key(0), inputs, deterministic=True)["params"]
    others = np.arange(8, dtype=np.int32)[None].repeat(2, 0) ** 2 % 16
    before, after = features(config, params, inputs), features(config, params, inputs | {"positions": others})
    assert not np.allclose(before[:, 4:7], after[:, 4:7])


@pytest.mark.first(1)
def test_every_parameter_gets_a_gradient(case):
    _, config, params, inputs, _ = case
    model = models.build(config, Compute())
    # A plain sum would not depend on the values that a norm removes.
    weights = jax.random.normal(jax.random.key(3), (2, 8, 50))

    def loss(params):
        return jnp.sum(
            weights
            * jax.nn.log_softmax(model.apply({"params": params}, inputs, deterministic=True).heads["lm"].logits())
        )

    gradients = jax.jit(jax.grad(loss))(params)
    # The bias of a key adds the same number to all logits of a query, and the softmax removes it.
    zero = {path for path, g in jax.tree_util.tree_leaves_with_path(gradients) if not np.abs(g).max() > 1e-6}
    assert {jax.tree_util.keystr(path) for path in zero} <= {"['encoder']['blocks']['self_attention']['key']['bias']"}


def test_unknown_family_names_those_there_are():
    with pytest.raises(UserError, match="config.model.family is 'decodr', did you mean 'decoder'"):
        models.build(ModelConfig(family="decodr"), Compute())


# --- encoder and decoder separately ---------------------------------------------------------------------------------


@pytest.mark.first(1)
def test_what_is_encoded_once_is_decoded_again(variant):
    config, inputs = CONFIGS["encoder_decoder"], batch("encoder_decoder")
    model = models.build(config, Compute())
    params = model.init(jax.random.key(0), inputs, deterministic=True)

    def encode(inputs):
        return model.apply(params, inputs, deterministic=True, method="encode")

    def decode(inputs, encoded):
        return model.apply(params, inputs, encoded, deterministic=True, method="decode").heads["lm"].features

    encode, decode = variant(encode), variant(decode)
    encoded = encode({name: x for name, x in inputs.items() if name.startswith("encoder")})
    chex.assert_shape(encoded.x, (2, 8, config.d_model))
    chex.assert_tree_all_finite(encoded)
    of_decoder = {name: x for name, x in inputs.items() if not name.startswith("encoder")}
    expected = model.apply(params, inputs, deterministic=True).heads["lm"].features
    chex.assert_trees_all_close(decode(of_decoder, encoded), expected, atol=1e-5)  # float32, compiled separately


def test_a_decoder_decodes():
    config, inputs = CONFIGS["decoder"], batch("decoder")
    model = models.build(config, Compute())
    outputs, params = model.init_with_output(jax.random.key(0), inputs, deterministic=True)
    again = model.apply(params, inputs, deterministic=True, method="decode")
    chex.assert_trees_all_close(again, outputs)
    assert outputs.state is None and not outputs.sums


@pytest.mark.parametrize("name", ("positions", "segment_ids"))
def test_an_axis_that_would_broadcast_is_named(name):
    inputs = batch("decoder")
    inputs[name] = inputs[name][:1]
    with pytest.raises(AssertionError, match=r"are \[B, T\]"):
        models.build(CONFIGS["decoder"], Compute()).init(jax.random.key(0), inputs, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["mixtral", "deepseek_v3", "switch"], ["deepseek_v3"]))
def test_of_any_depth_a_model_with_experts_is_the_same_program(name):
    """Tests that depth does not affect compile time: a scan runs layers or periods, after the dense first layers."""
    arrays = batch_of(CASES[name])

    def lines(depth):
        config = dataclasses.replace(CASES[name].config, num_layers=depth)
        model = models.build(config, Compute())

        def objective(params):
            outputs = model.apply({"params": params}, arrays, deterministic=True)
            return losses.objective(outputs, arrays, losses.counts(arrays))[0]

        return jax.jit(jax.grad(objective)).lower(models.abstract_params(config)).as_text().count("\n")

    assert lines(8) == lines(64)
