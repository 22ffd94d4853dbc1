import dataclasses
import math
import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models, zoo
from pretrainax.config import DisentangledPositions, Generator, LearnedPositions, MeshConfig, UserError
from pretrainax.config.validation import validate
from pretrainax.data.objectives import Lengths
from pretrainax.layers.compute import Compute
from pretrainax.models import electra
from pretrainax.models.flops import flops_per_step
from pretrainax.optim.decay import decay_mask
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.sharding.rules import param_specs, tree_shardings
from pretrainax.training import losses
from pretrainax.zoo.deberta import FAMILIES, HUGGINGFACE, deberta_v2, deberta_v3
from tests.golden import make
from tests.golden.case import Case, batch, needs_transformers, weights
from tests.golden.deberta import CASES, tiny
from tests.support.tiers import few

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "deberta_v3_base.py"
PRESETS = [family.prefix + variant for family in FAMILIES for variant in family.sizes]


def count(config):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(models.abstract_params(config)))


def run(config, params, arrays, compute=None, **options):
    model = models.build(config, compute or Compute())
    apply = jax.jit(lambda p, b: model.apply({"params": p}, b, deterministic=True, **options))
    return apply(params, jax.tree.map(jnp.asarray, arrays))


def long_batch(length, config):
    rng = np.random.default_rng(0)
    real = np.arange(length)[None] < np.array([length, length - 70])[:, None]
    return {
        "tokens": np.where(real, rng.integers(3, config.vocab_size, real.shape), 0).astype(np.int32),
        "segment_ids": real.astype(np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), real.shape),
        "targets": rng.integers(3, config.vocab_size, real.shape).astype(np.int32),
        "loss_weights": (real & (rng.random(real.shape) < 0.15)).astype(np.float32),
    }


@pytest.mark.slow
@needs_transformers
def test_published_buckets_past_the_last_one_are_those_of_transformers():
    case = CASES["deberta"]
    config = dataclasses.replace(case.config, num_layers=2, position=DisentangledPositions())
    case = Case(config, case.family)
    arrays = long_batch(640, config)  # The row has five blocks of queries, and distances beyond max_distance 512.
    oracle = make.oracle(case)
    theirs = make.forward(case, oracle, arrays)
    theirs["loss"].backward()
    real, params = arrays["segment_ids"] > 0, weights(config)
    got = run(config, params, arrays).heads["lm"].logits()
    # float32 sums in another order.
    np.testing.assert_allclose(got[real], theirs["logits"].detach().numpy()[real], atol=2e-4, rtol=0)

    model, arrays = models.build(config, Compute()), jax.tree.map(jnp.asarray, arrays)

    def loss(p):
        outputs = model.apply({"params": p}, arrays, deterministic=True)
        return losses.objective(outputs, arrays, losses.counts(arrays))[0]

    mine, reference = jax.jit(jax.grad(loss))(params), make.state_of(case, oracle, gradients=True)
    whole = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(reference)))
    for path, a, b in zip(parameter_names(mine), jax.tree.leaves(mine), jax.tree.leaves(reference), strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * max(np.linalg.norm(b), 1e-4 * whole), path


@pytest.mark.first(6)
@needs_transformers
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_as_many_parameters_as_transformers(name):
    import torch
    import transformers

    config = electra.discriminator_config(zoo.preset(name))
    masked_lm = {"masked_lm_head": True, "replaced_token_head": False, "replaced_token_context": False}
    for heads in (masked_lm, masked_lm | {"masked_lm_head": False}):
        ours = dataclasses.replace(config, **heads)
        json = HUGGINGFACE.write_config(ours)
        with torch.device("meta"):
            model = getattr(transformers, json["architectures"][0])(transformers.AutoConfig.for_model(**json))
        model.tie_weights()
        assert count(ours) == sum(p.numel() for p in model.parameters())


# These are millions of parameters from the README of the released code; for v2, they include the whole model.
@pytest.mark.parametrize(
    "name, backbone, embedding",
    [
        ("deberta_v3_xsmall", 22, 49),
        ("deberta_v3_small", 44, 98),
        ("deberta_v3_base", 86, 98),
        ("deberta_v3_large", 304, 131),
        ("deberta_v3_multilingual_base", 86, 193),
        ("deberta_v2_xlarge", 900 - 197, 197),
        ("deberta_v2_xxlarge", 1500 - 197, 197),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, backbone, embedding):
    config = electra.discriminator_config(zoo.preset(name))
    table = config.vocab_size * config.d_model
    assert abs(table / 1e6 - embedding) <= 0.5
    # The README rounds the sizes of v3 to the million (small has an error of 0.6), and those of v2 to the hundred
    # million.
    assert abs((count(config) - table) / 1e6 - backbone) <= (0.6 if "v3" in name else 100)


@pytest.mark.parametrize("name", PRESETS)
def test_each_parameter_has_a_sharding_and_a_decay(name):
    shapes = models.abstract_params(zoo.preset(name))
    param_specs(shapes)
    decays = dict(zip(parameter_names(shapes), jax.tree.leaves(decay_mask(shapes)), strict=True))
    assert decays["encoder/relative_embedding/embedding"] and not decays["encoder/relative_embedding/norm/scale"]


def test_only_the_last_block_sees_absolute_positions():
    config, arrays = CASES["deberta_v2"].config, batch(CASES["deberta_v2"])
    moved = arrays | {"positions": arrays["positions"] + 3}
    states = []
    for rows in (arrays, moved):
        outputs, kept = run(config, weights(config), rows, mutable=["intermediates"])
        states.append((kept["intermediates"]["encoder"]["blocks"]["hidden"][0], outputs.heads["lm"].logits()))
    np.testing.assert_array_equal(states[0][0][:-1], states[1][0][:-1])
    assert np.abs(states[0][1] - states[1][1]).max() > 0.1


@pytest.mark.first(1)
@pytest.mark.parametrize("compute", [Compute(remat="block"), Compute(remat="dots"), Compute(scan_unroll=4)], ids=str)
@pytest.mark.parametrize("name", few(["deberta_v2", "deberta_v3"], ["deberta_v3"]))
def test_how_it_runs_does_not_change_gradients(name, compute):
    config, arrays = CASES[name].config, jax.tree.map(jnp.asarray, batch(CASES[name]))

    def gradient(compute):
        def loss(p):
            outputs = models.build(config, compute).apply({"params": p}, arrays, deterministic=True)
            return losses.objective(outputs, arrays, losses.counts(arrays))[0]

        return jax.jit(jax.grad(loss))(weights(config))

    for path, a, b in zip(
        parameter_names(weights(config)), *map(jax.tree.leaves, (gradient(Compute()), gradient(compute))), strict=True
    ):
        # float32 sums in another order; gradients are up to 1.
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deberta_v2", "deberta_v3"])
def test_dropout_is_everywhere_and_follows_its_key(name):
    config = dataclasses.replace(CASES[name].config, dropout_rate=0.2)
    model, arrays = models.build(config, Compute()), jax.tree.map(jnp.asarray, batch(CASES[name]))

    def drop(seed):
        rngs = {"dropout": jax.random.key(seed)}
        outputs = model.apply({"params": weights(config)}, arrays, deterministic=False, rngs=rngs)
        return jax.tree.leaves(outputs.heads)[0]

    np.testing.assert_array_equal(drop(0), drop(0))
    assert not np.allclose(drop(0), drop(1))


def whole(**changes):
    """Returns a tiny pretrained model: generator with mask decoder, discriminator, disentangled embeddings."""
    config = tiny(deberta_v3(), **changes)
    generator = Generator(2, 16, 32, 2, share_embeddings="gradient_disentangled")
    return dataclasses.replace(config, generator=generator)


def test_the_mask_decoder_is_the_generators():
    config = whole()
    params = models.abstract_params(config)
    assert "position_embedding" in params["generator"] and "position_embedding" not in params
    assert set(params["embedding_difference"]) == {"token_embedding"}
    assert electra.generator_config(config).enhanced_mask_decoder
    assert not electra.discriminator_config(config).enhanced_mask_decoder
    parts = [electra.discriminator(config, weights(config)), electra.generator(config, weights(config))]
    for part, values in parts:
        assert set(parameter_names(models.abstract_params(part))) == set(parameter_names(values))
    joined = electra.join(config, parts[0][1], parts[1][1])
    assert parameter_names(joined) == parameter_names(params)


@pytest.mark.first(1)
@pytest.mark.parametrize("mesh", [dict(data=8), dict(fsdp=4, tensor=2), dict(data=2, fsdp=2, tensor=2)], ids=str)
@pytest.mark.parametrize("name", few(["deberta_convolution", "deberta_v2", "deberta_v3"], ["deberta_v3"]))
def test_split_over_devices_it_is_the_same(name, mesh):
    config = dataclasses.replace(CASES[name].config, vocab_size=100)
    arrays = {key: np.concatenate([x] * 3)[:8] for key, x in batch(CASES[name]).items()}

    def loss(params, arrays):
        outputs = models.build(config, Compute()).apply({"params": params}, arrays, deterministic=True)
        return losses.objective(outputs, arrays, losses.counts(arrays))[0]

    step, params = jax.value_and_grad(loss), weights(config)
    value, gradient = jax.jit(step)(params, jax.tree.map(jnp.asarray, arrays))
    mesh = make_mesh(MeshConfig(**{"data": 1} | mesh))
    with jax.set_mesh(mesh):
        split = jax.device_put(params, tree_shardings(mesh, params))
        got, got_gradient = jax.jit(step)(split, put_batch(arrays, mesh))
    np.testing.assert_allclose(got, value, rtol=1e-5)  # float32 sums in another order
    for path, a, b in zip(
        parameter_names(params), jax.tree.leaves(got_gradient), jax.tree.leaves(gradient), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4, err_msg=path)


# --- mistakes, and costs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("input_convolution", 2, "config.model.input_convolution is 2, it must be odd"),
        ("position.num_buckets", 1, "config.model.position.num_buckets is 1, it must be at least 2"),
        ("position.max_distance", 100, "config.model.position.max_distance is 100, it must be at least 130"),
        ("num_kv_heads", 4, "require one key head per head, config.model.num_kv_heads is 4"),
        ("norm_at", "pre", "config.model.enhanced_mask_decoder requires an encoder with norm_at='post'"),
        ("num_layers", 1, "at least 2 layers"),
        ("position", LearnedPositions(), "requires DisentangledPositions, config.model.position is LearnedPositions"),
        ("generator", None, "config.model.enhanced_mask_decoder requires a masked_lm_head or a generator"),
        ("replaced_token_head", False, "config.model.replaced_token_context requires a replaced_token_head"),
    ],
)
def test_what_cannot_work_is_said_before_it_runs(path, value, message):
    experiment = runpy.run_path(str(CONFIG))["get_config"]()
    validate(experiment)
    *parents, name = path.split(".")
    setattr(experiment.model.position if parents else experiment.model, name, value)
    with pytest.raises(UserError, match=re.escape(message)):
        validate(experiment)


def test_flops_by_hand():
    lengths, width, length = Lengths(raw=126, inputs=128, targets=20), 16, 128
    config = tiny(deberta_v2())
    maps, logits_and_sum = 8 * length * width**2, 4 * length**2 * width
    positions, feed_forward = 4 * length**2 * width, 4 * length * width * 32
    block = maps + logits_and_sum + positions + feed_forward
    head = 2 * 20 * width * (width + 99)
    # There are three blocks and a second pass of the last block; the convolution covers three tokens.
    expected = 3 * (4 * block + 2 * length * 3 * width**2 + head)
    assert flops_per_step(config, 1, lengths.inputs, lengths.targets) == expected


# --- config.json ---------------------------------------------------------------------------------------------------

# The values of the authors' experiments/language_model/rtd_base.json and xxlarge.json, in the form of config.json.
V3_BASE = {
    "model_type": "deberta-v2",
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "layer_norm_eps": 1e-7,
    "max_relative_positions": -1,
    "position_biased_input": False,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "type_vocab_size": 0,
    "vocab_size": 128_100,
}
V2_XXLARGE = V3_BASE | {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_attention_heads": 24,
    "attention_head_size": 64,
    "num_hidden_layers": 48,
    "conv_kernel_size": 3,
    "conv_act": "gelu",
}


def test_released_configs_are_the_presets():
    assert HUGGINGFACE.read_config(V3_BASE) == electra.discriminator_config(deberta_v3("base"))
    assert HUGGINGFACE.read_config(V2_XXLARGE) == deberta_v2("xxlarge")


def test_architectures_say_which_head():
    for architecture, head in (("DebertaV2ForMaskedLM", True), ("DebertaV2Model", False)):
        config = HUGGINGFACE.read_config(V3_BASE | {"architectures": [architecture]})
        assert (config.masked_lm_head, config.replaced_token_head, config.enhanced_mask_decoder) == (head, False, False)


@needs_transformers
@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_and_rewrites_our_config_json(name):
    import transformers

    json = HUGGINGFACE.write_config(CASES[name].config)
    theirs = transformers.AutoConfig.for_model(**json).to_dict()
    assert HUGGINGFACE.read_config(theirs) == HUGGINGFACE.read_config(json)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"relative_attention": False}, "relative_attention False"),
        ({"share_att_key": None}, "share_att_key None"),
        ({"position_biased_input": True}, "position_biased_input True"),
        ({"norm_rel_ebd": "none"}, "norm_rel_ebd 'none'"),
        ({"pos_att_type": "c2p"}, "pos_att_type 'c2p'"),
        ({"position_buckets": -1}, "position_buckets -1"),
        ({"type_vocab_size": 2}, "type_vocab_size 2"),
        ({"legacy": False}, "legacy False"),
        ({"embedding_size": 128}, "embedding_size 128"),
        ({"attention_head_size": 32}, "attention_head_size 32"),
        ({"conv_kernel_size": 3}, "conv_act 'tanh'"),
        ({"conv_kernel_size": 3, "conv_act": "gelu", "conv_groups": 2}, "conv_groups 2"),
        ({"architectures": ["DebertaForMaskedLM"]}, "DebertaForMaskedLM"),
    ],
)
def test_what_would_compute_something_else_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        HUGGINGFACE.read_config(V3_BASE | changes)


def test_a_model_with_its_generator_is_not_written():
    with pytest.raises(UserError, match="config.model.generator"):
        HUGGINGFACE.write_config(deberta_v3("base"))
