"""Tests the multipliers of config.transfer: the published rules, and cases for which a naive form of them is wrong."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pretrainax import models, zoo
from pretrainax.config import (
    CheckpointConfig,
    DecoderSizes,
    Experiment,
    Generator,
    MixtureOfExperts,
    Transfer,
    UserError,
    from_json,
    resized,
    to_json,
)
from pretrainax.layers.compute import Compute
from pretrainax.optim import Adafactor, AdamW, Lamb, Muon, Sophia
from pretrainax.optim.transfer import Multipliers, multipliers_of, scaled_initially
from pretrainax.sharding.param_paths import flat, nested, parameter_names
from pretrainax.sharding.rules import axes_of_leaves
from tests.support import tables, tiny
from tests.support.tiers import few

M, L = 4, 3  # ratios of width and depth to the base model


def model_of(variant="gpt", **fields):
    """Returns a model whose base model, `tiny`, has a width of 32 and 2 layers."""
    base = dataclasses.replace(tiny.get_config(variant).model, **fields)
    return resized(base, 32 * M, 2 * L)


def multipliers(model, base_width=32, base_depth=2):
    params = models.abstract_params(model)
    found = multipliers_of(model, Transfer(base_width, base_depth), params)
    return dict(zip(parameter_names(params), jax.tree.leaves(found), strict=True))


def factors(model, path, **base):
    found = multipliers(model, **base)[path]
    return found.init, found.update


ATTENTION, MLP = "decoder/blocks/self_attention", "decoder/blocks/mlp"


@pytest.mark.parametrize(
    "path, init, update",
    [
        (f"{ATTENTION}/query/kernel", M**-0.5, 1 / M),  # hidden
        (f"{MLP}/up/kernel", M**-0.5, 1 / M),
        (f"{ATTENTION}/out/kernel", M**-0.5 / L, 1 / M / L),  # hidden; the last matrix of a branch
        (f"{MLP}/down/kernel", M**-0.5 / L, 1 / M / L),
        (f"{MLP}/down/bias", 1 / L, 1 / L),
        (f"{MLP}/up/bias", 1, 1),  # vectors
        (f"{MLP}_norm/scale", 1, 1),
        ("token_embedding/embedding", 1, 1),  # inputs
        ("position_embedding/embedding", 1, 1),
        ("decoder/final_norm/scale", 1 / M, 1 / M),  # This norm has the factor of tied logits.
        ("decoder/final_norm/bias", 1 / M, 1 / M),
    ],
)
def test_a_decoder_has_the_factors_of_mup_and_completep(path, init, update):
    assert factors(model_of(), path) == (init, update)


def test_the_output_matrix_that_is_not_tied_has_its_own_factor():
    found = multipliers(model_of(tie_embeddings=False))
    assert (found["unembedding/kernel"].init, found["unembedding/kernel"].update) == (1 / M, 1 / M)
    assert found["decoder/final_norm/scale"].update == 1


def test_a_masked_lm_has_the_factor_of_tied_logits_in_the_norm_of_its_head():
    found = multipliers(model_of("bert", norm_at="post"))
    assert found["masked_lm_head/norm/scale"].update == 1 / M
    assert found["masked_lm_head/dense/kernel"].update == 1 / M
    assert found["encoder/blocks/mlp_norm/scale"].update == 1


def test_a_post_norm_decoder_has_the_factor_of_tied_logits_in_the_norm_of_its_last_block():
    update = multipliers(model_of(norm_at="post"))[f"{MLP}_norm/scale"].update
    np.testing.assert_array_equal(update[:, 0], [1] * (2 * L - 1) + [1 / M])


def test_t5_initializers_which_depend_on_the_width_already_are_not_scaled_twice():
    model = model_of("t5", init_stddev=None, tie_embeddings=False)
    found = multipliers(model)
    assert found["encoder/blocks/self_attention/query/kernel"].init == 1
    assert found["unembedding/kernel"].init == M**-0.5
    # These parameters have an initial standard deviation of 1 / sqrt(D). They are a vector, with one number per head.
    assert (found["encoder/relative_bias/embedding"].init, found["encoder/relative_bias/embedding"].update) == (
        M**0.5,
        1,
    )


def test_logits_that_t5_divides_by_the_root_of_the_width_get_the_rest_of_the_factor():
    model = model_of("t5", scale_tied_logits=True)
    assert multipliers(model)["decoder/final_norm/scale"].update == M**-0.5
    assert multipliers(model)["encoder/final_norm/scale"].update == 1


def test_cross_attention_is_hidden_in_each_projection():
    found = multipliers(model_of("t5"))
    for name in ("query", "key", "value"):
        assert found[f"decoder/blocks/cross_attention/{name}/kernel"].update == 1 / M
    assert found["decoder/blocks/cross_attention/out/kernel"].update == 1 / M / L


def test_a_decoder_of_other_sizes_is_scaled_by_the_same_factor():
    sizes = DecoderSizes(d_model=24, d_ff=48, num_heads=8, num_kv_heads=4, head_dim=4)
    model = model_of("t5", separate_embeddings=True, decoder=sizes)
    assert model.decoder == DecoderSizes(d_model=24 * M, d_ff=48 * M, num_heads=8 * M, num_kv_heads=4 * M, head_dim=4)
    assert multipliers(model)[f"{MLP}/up/kernel"].update == 1 / M


def test_grouped_keys_are_hidden_and_a_single_key_head_is_an_output():
    grouped = multipliers(model_of(num_kv_heads=2))
    assert (grouped[f"{ATTENTION}/key/kernel"].init, grouped[f"{ATTENTION}/key/kernel"].update) == (M**-0.5, 1 / M)
    single = dataclasses.replace(model_of(), num_kv_heads=1)  # The base model also has one key head.
    assert factors(single, f"{ATTENTION}/key/kernel") == (1 / M, 1 / M)


def test_experts_are_hidden_and_the_router_is_an_output():
    found = multipliers(model_of(experts=MixtureOfExperts(num_experts=4)))
    assert (found[f"{MLP}/router/kernel"].init, found[f"{MLP}/router/kernel"].update) == (1 / M, 1 / M)
    assert (found[f"{MLP}/experts_up/kernel"].init, found[f"{MLP}/experts_up/kernel"].update) == (M**-0.5, 1 / M)
    assert found[f"{MLP}/experts_down/kernel"].update == 1 / M / L


def test_factorized_embeddings_do_not_grow_so_their_logits_have_no_factor():
    found = multipliers(model_of("bert", embedding_dim=16, share_layers=True))
    assert (found["embedding_projection/kernel"].init, found["embedding_projection/kernel"].update) == (1, 1)
    assert found["masked_lm_head/norm/scale"].update == 1
    assert (found["masked_lm_head/dense/kernel"].init, found["masked_lm_head/dense/kernel"].update) == (1 / M, 1 / M)
    assert found["encoder/blocks/mlp/down/kernel"].update == 1 / M / L  # One block is applied 6 times.


def test_both_encoders_of_electra_are_scaled():
    generator = Generator(num_layers=2, d_model=16, d_ff=32, num_heads=2)
    found = multipliers(model_of("bert", generator=generator, replaced_token_head=True, masked_lm_head=False))
    assert found["generator/encoder/blocks/mlp/up/kernel"].update == 1 / M
    assert found["generator/encoder/blocks/mlp/down/kernel"].update == 1 / M / L
    assert found["generator/masked_lm_head/norm/scale"].update == 1 / M
    assert found["generator/embedding_projection/kernel"].update == 1 / M
    assert found["replaced_token_head/output/kernel"].init == 1 / M


def test_scaled_embeddings_have_equal_products_with_the_root_of_the_width():
    found = multipliers(model_of(scale_embeddings=True))
    assert found["token_embedding/embedding"].update == M**-0.5
    assert found["decoder/final_norm/scale"].update == M**-0.5  # The product with the embedding table gives 1 / M.


def test_residual_initializers_that_depend_on_the_depth_are_not_scaled_twice():
    init = multipliers(model_of(scale_residual_init=True))[f"{MLP}/down/kernel"].init
    assert init == pytest.approx(M**-0.5 / L * L**0.5)  # rounding errors


def test_a_norm_at_the_end_of_each_branch_has_the_factor_of_the_depth():
    for norm_at, name in (("after", "mlp_norm"), ("both", "mlp_post_norm")):
        found = multipliers(model_of(norm_at=norm_at))
        assert found[f"decoder/blocks/{name}/scale"].update == 1 / L
        assert found[f"{MLP}/down/kernel"].update == 1 / M


def test_a_gain_of_one_plus_the_parameter_starts_with_the_factor():
    model = model_of(norm="rms_plus_one")
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), models.abstract_params(model))
    scaled = scaled_initially(params, multipliers_of(model, Transfer(32, 2), params))
    assert float(flat(scaled)["decoder/final_norm/scale"][0]) == 1 / M - 1
    assert float(flat(scaled)[f"{MLP}_norm/scale"][0, 0]) == 0


INITIALIZED = {
    "gpt": model_of(scale_residual_init=True),
    "bert": model_of("bert", norm_at="post", pair_head=True),
    "t5": model_of("t5", init_stddev=None, scale_tied_logits=True, attention_scale=1.0),
}


def drawn(config):
    shapes = tables.example_shapes(config)
    shapes |= {f"encoder_{name}": shapes[name] for name in ("tokens", "positions", "segment_ids")}
    model, batch = models.build(config, Compute()), {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}
    return jax.jit(lambda key: model.init({"params": key}, batch, deterministic=True)["params"])(jax.random.key(0))


@pytest.mark.parametrize("name", few(INITIALIZED, ["t5"]))
def test_initial_values_have_the_size_that_the_rules_say(name):
    """Compares `spread` with the values that initializers draw."""
    model, transfer = INITIALIZED[name], Transfer(32, 2)
    params = drawn(model)
    scaled = flat(scaled_initially(params, multipliers_of(model, transfer, params)))
    base = flat(drawn(transfer.base(model)))
    for path, found in multipliers(model).items():
        large, small = (math.sqrt(float(jnp.mean(jnp.square(x[path])))) for x in (scaled, base))
        if small > 0:
            # The tolerance is five standard errors of the RMS of the smaller sample.
            assert large / small == pytest.approx(found.spread, rel=5 / math.sqrt(2 * base[path].size)), path


SCALED = {
    "gpt": tiny.get_config("gpt").model,
    "untied": dataclasses.replace(tiny.get_config("gpt").model, tie_embeddings=False),
    "bert": tiny.get_config("bert").model,
    "t5": tiny.get_config("t5").model,
    "post": dataclasses.replace(tiny.get_config("gpt").model, norm_at="post"),
}


@pytest.mark.parametrize("name", few(SCALED, ["gpt", "untied"]))
def test_the_output_scale_trains_as_a_factor_of_the_logits(name):
    """Tests that parameters that contain the factor give the logits of `logit_scale`, also after updates of AdamW."""
    model, scale = SCALED[name], 4.0
    batch = {path: jnp.ones(x.shape, x.dtype) for path, x in tables.example_shapes(model).items()}
    plain, params = dataclasses.replace(model, logit_scale=scale), drawn(model)
    multipliers = multipliers_of(model, Transfer(model.d_model, model.num_layers, scale), params)

    def logits(config, params):
        with jax.default_matmul_precision("highest"):
            model = models.build(config, Compute())
            return model.apply({"params": params}, batch, deterministic=True).heads["lm"].logits()

    def trained(config, params, *transfer):
        optimizer = AdamW(weight_decay=0.1, b2=0.95, clip_norm=None).build(lambda step: 1e-3, params, *transfer)
        state = optimizer.init(params)
        for step in range(3):
            gradients = jax.grad(lambda params: jnp.square(logits(config, params) - 1.0).mean())(params)
            updates, state = optimizer.update(gradients, state, params, step=step)
            params = optax.apply_updates(params, updates)
        return logits(config, params)

    scaled = scaled_initially(params, multipliers)
    np.testing.assert_allclose(logits(model, scaled), logits(plain, params), atol=1e-5)  # float32 rounding
    np.testing.assert_allclose(trained(model, scaled, multipliers), trained(plain, params), atol=1e-4)
    assert np.abs(trained(plain, params) - logits(plain, params)).max() > 0.01


# --- optimizers ---

UP, NORM = f"{MLP}/up/kernel", f"{MLP}_norm/scale"
SHAPES = {
    UP: (2, 8, 16),
    f"{ATTENTION}/query/kernel": (2, 8, 4, 2),
    f"{ATTENTION}/out/kernel": (2, 4, 2, 8),
    NORM: (2, 8),
}
_rng = np.random.default_rng(0)
PARAMS, GRADIENTS = ({path: _rng.normal(size=shape) for path, shape in SHAPES.items()} for _ in range(2))
FACTOR, SPREAD = 0.25, 0.5


def scaled_by(update=1.0, spread=1.0, gradient=1.0, growth=1):
    """Returns equal multipliers for each parameter; in the base model, the axes of width are `growth` times smaller."""

    def base_shape(path, shape):
        grows = [axis in ("d_model", "d_ff", "num_heads") for axis in axes_of_leaves({path: np.zeros(shape)})[0]]
        return tuple(size // growth if g else size for size, g in zip(shape, grows, strict=True))

    return nested(
        {
            path: Multipliers("hidden", 1.0, update, spread, gradient, 1.0, shape, base_shape(path, shape))
            for path, shape in SHAPES.items()
        }
    )


def updated(optimizer, multipliers=None, gradient=1.0):
    """Returns the first update with a learning rate of 1, without config.layers."""
    params, gradients = (nested({k: jnp.float32(x) for k, x in tree.items()}) for tree in (PARAMS, GRADIENTS))
    gradients = jax.tree.map(lambda g: gradient * g, gradients)
    transfer = () if multipliers is None else (multipliers,)
    built = optimizer.build(lambda step: 1.0, params, *transfer)
    return flat(built.update(gradients, built.init(params), params, step=0)[0])


OPTIMIZERS = {
    "adamw": AdamW(weight_decay=0.1),
    "adamw_relative": AdamW(weight_decay=0.1, scale_by_parameter_rms=True),
    "adafactor": Adafactor(weight_decay=0.1),
    "lamb": Lamb(weight_decay=0.1),
    "muon": Muon(weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_factors_of_1_change_no_bit(name):
    plain, scaled = (updated(OPTIMIZERS[name], multipliers) for multipliers in (None, scaled_by()))
    for path in SHAPES:
        np.testing.assert_array_equal(plain[path], scaled[path])


@pytest.mark.parametrize("name", ["adamw", "adamw_relative", "adafactor"])
def test_the_factor_applies_to_the_update_and_not_to_weight_decay(name):
    optimizer = OPTIMIZERS[name]
    free = updated(dataclasses.replace(optimizer, weight_decay=0.0))
    factor = FACTOR if name == "adamw" else FACTOR / SPREAD  # A relative update already has the factor of the RMS.
    found = updated(optimizer, scaled_by(FACTOR, SPREAD))
    expected = factor * free[UP] - 0.1 * PARAMS[UP]
    np.testing.assert_allclose(found[UP], expected, rtol=1e-5, atol=1e-6)  # float32 rounding


def test_epsilon_has_the_same_effect_on_smaller_gradients():
    optimizer = AdamW(epsilon=0.3, clip_norm=None)
    np.testing.assert_allclose(  # float32 rounding
        updated(optimizer, scaled_by(gradient=8.0), gradient=1 / 8)[UP], updated(optimizer)[UP], rtol=1e-6
    )


def test_lamb_scales_the_update_after_its_normalization_and_its_decay_before():
    optimizer = Lamb(weight_decay=0.1)
    found = updated(optimizer, scaled_by(FACTOR, SPREAD))
    more_decay = updated(dataclasses.replace(optimizer, weight_decay=0.1 / FACTOR))
    np.testing.assert_allclose(found[UP], FACTOR / SPREAD * more_decay[UP], rtol=1e-5)  # float32 rounding
    np.testing.assert_allclose(found[NORM], FACTOR * updated(optimizer)[NORM], rtol=1e-5)  # This is Adam's update.


@pytest.mark.parametrize(
    "fields, path, factor",
    [
        ({}, UP, 1),  # sqrt(outputs / inputs) does not depend on the width.
        ({"update_rms": 0.2}, UP, 4**-0.5),  # sqrt(max(inputs, outputs)) grows with the square root of the width.
        # The number of inputs grows, and the number of outputs per head does not.
        ({"split_heads": True}, f"{ATTENTION}/query/kernel", 4**-0.5),
        ({"split_heads": True}, f"{ATTENTION}/out/kernel", 1 / 4),  # The updates of 4 times as many heads add up.
    ],
)
def test_muon_has_updates_of_equal_spectral_norm(fields, path, factor):
    optimizer = Muon(**fields)
    found = updated(optimizer, scaled_by(FACTOR, SPREAD, growth=4))
    np.testing.assert_allclose(found[path], factor * updated(optimizer)[path], rtol=1e-5)  # float32 rounding
    np.testing.assert_allclose(found[NORM], FACTOR * updated(optimizer)[NORM], rtol=1e-5)  # This is Adam's update.


# --- the config ---


def problems(**fields):
    experiment = tiny.get_config("gpt")
    for name, value in fields.items():
        setattr(experiment, name, value)
    return list(experiment.transfer.problems(experiment))


def test_a_base_width_that_does_not_divide_the_heads_is_refused():
    assert problems(transfer=Transfer(12)) == [
        "config.transfer: 3/8 of config.model.num_heads 4 is not a whole number: change it, or choose sizes of another "
        "proportion"
    ]


def test_an_optimizer_without_rules_is_refused():
    assert "has no rule for Sophia" in problems(transfer=Transfer(8), optimizer=Sophia())[0]


def test_trained_parameters_are_refused():
    assert (
        "checkpoint.init_from is set" in problems(transfer=Transfer(8), checkpoint=CheckpointConfig(init_from="run"))[0]
    )


def test_a_size_below_1_is_refused():
    assert problems(transfer=Transfer(0)) == ["config.transfer.base_width is 0, it must be at least 1"]


def test_config_json_omits_the_field_unless_it_is_set():
    experiment = tiny.get_config("gpt")
    assert "transfer" not in to_json(experiment)
    experiment.transfer = Transfer(8, 1)
    assert from_json(Experiment, to_json(experiment)).transfer == Transfer(8, 1)


def test_an_output_scale_that_is_not_positive_is_refused():
    said = problems(transfer=Transfer(8, output_scale=0.0))
    assert said == ["config.transfer.output_scale is 0.0, it must be above 0"]


def test_the_header_names_the_factors():
    experiment = tiny.get_config("gpt")
    said = Transfer(16, 1, 4.0).describe(experiment)
    assert said.startswith(
        "from width 16 (× 2) and 1 layer (× 2); Adam's updates of hidden matrices × 0.5, logits × 4 "
    )


def test_a_resized_model_keeps_the_size_of_a_head():
    large = resized(zoo.preset("gpt2_124m"), 1536, 24)
    assert (large.d_ff, large.num_heads, large.dim_per_head, large.num_layers) == (6144, 24, 64, 24)
    with pytest.raises(UserError, match="1/24 of config.model.num_heads 12"):
        resized(zoo.preset("gpt2_124m"), 32)
