"""Tests generator and discriminator: drawn tokens, the source of each gradient, and equal results on any devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import DisentangledPositions, Generator, MeshConfig, TrainConfig, UserError
from pretrainax.layers.compute import Compute, resolve_auto
from pretrainax.models import electra
from pretrainax.models.heads import logit_passes, logit_products
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.optim.optimizers import AdamW
from pretrainax.optim.schedules import WarmupConstant
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.sharding.rules import tree_shardings
from pretrainax.training import losses, train_step
from tests.golden.case import VOCABULARY, weights
from tests.golden.electra import LENGTH, ROWS, SLOTS, everywhere, joint, masked_batch
from tests.support.tiers import few

SHARING = list(electra.SHARED)


def objective(config, batch, rngs=None):
    """Returns a function params -> (objective, (sums, outputs))."""
    model, batch = models.build(config, Compute()), jax.tree.map(jnp.asarray, batch)

    def function(params):
        outputs = model.apply({"params": params}, batch, deterministic=rngs is None, rngs=rngs)
        loss, sums = losses.objective(outputs, batch, losses.counts(batch))
        return loss, (sums, outputs)

    return function


def run(config, batch, rngs=None):
    """Returns (objective, (sums, outputs)) for the parameters of `weights`."""
    with jax.default_matmul_precision("highest"):
        return jax.jit(objective(config, batch, rngs))(weights(config))


# --- sampling ------------------------------------------------------------------------------------------------------


def says(token, rows=ROWS, places=SLOTS):
    """Returns predictions that are certain of one token."""
    bias = jnp.where(jnp.arange(VOCABULARY) == token, 1000.0, 0.0)
    return LanguageModelOutput(jnp.zeros((rows, places, 1)), jnp.zeros((1, VOCABULARY)), bias)


def test_replacements_are_drawn_from_the_softmax():
    rows, length, vocabulary = 400, 500, 20
    logits = np.random.default_rng(1).normal(size=vocabulary).astype(np.float32)
    generated = LanguageModelOutput(jnp.ones((rows, length, 1)), jnp.asarray(logits)[None], None)
    zeros = jnp.zeros((rows, length), jnp.int32)
    batch = {"tokens": zeros, "targets": zeros, "loss_weights": jnp.ones((rows, length))}
    tokens, replaced = jax.jit(electra.sample_replacements)(generated, batch, jax.random.key(7))
    p, n = np.asarray(jax.nn.softmax(logits)), rows * length
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=vocabulary)
    # All 20 counts of a multinomial are within 4 deviations. One in 800 keys would fail, but the key is fixed.
    assert (np.abs(counts - n * p) < 4 * np.sqrt(n * p * (1 - p))).all()
    # Neighbours along the row and along the batch are equal as often as independent draws.
    same = np.sum(p**2)
    for a, b in ((tokens[:, 1:], tokens[:, :-1]), (tokens[1:], tokens[:-1])):
        assert abs(np.mean(a == b) - same) < 4 * np.sqrt(same * (1 - same) / a.size)
    np.testing.assert_array_equal(replaced, tokens != 0)


def test_an_accelerator_writes_no_float32_logits_to_sample(monkeypatch):
    for module in (logit_passes, logit_products):
        monkeypatch.setattr(module, "in_one_pass", lambda: True)
    features = jnp.zeros((ROWS, SLOTS, 4), jnp.bfloat16)
    generated = LanguageModelOutput(features, jnp.zeros((4, VOCABULARY)), jnp.zeros(VOCABULARY))
    steps = str(jax.make_jaxpr(electra.sample_replacements)(generated, masked_batch()[1], jax.random.key(7)))
    assert re.findall(r"(\w+)\[[\d,]*\] = dot_general", steps) == ["bf16"]


@pytest.mark.parametrize("form", ["gathered", "everywhere"])
def test_masked_tokens_are_replaced_and_all_others_are_the_originals(form):
    originals, batch = masked_batch()
    masked = everywhere(batch)["loss_weights"] > 0
    places = SLOTS if form == "gathered" else LENGTH
    batch = batch if form == "gathered" else everywhere(batch)
    tokens, replaced = electra.sample_replacements(says(7, places=places), batch)
    np.testing.assert_array_equal(tokens, np.where(masked, 7, originals))
    assert not replaced[:, 0].any() and (tokens[:, 0] == originals[:, 0]).all()  # Empty slots point to the first token.
    np.testing.assert_array_equal(replaced, masked & (originals != 7))


def test_a_draw_that_hits_the_original_is_an_original():
    _, batch = masked_batch()
    hit = batch["targets"][3, 2]
    tokens, replaced = electra.sample_replacements(says(int(hit)), batch)
    place = batch["masked_positions"][3, 2]
    assert batch["tokens"][3, place] == 5 and tokens[3, place] == hit and not replaced[3, place]
    assert replaced.sum() == (batch["targets"] != hit)[batch["loss_weights"] > 0].sum() > 0


@pytest.mark.slow
def test_both_forms_of_a_batch_draw_the_same_and_cost_the_same():
    config, (_, batch) = joint(), masked_batch()
    loss, (sums, gathered) = run(config, batch)
    other, (other_sums, whole) = run(config, everywhere(batch))
    np.testing.assert_array_equal(gathered.heads["replaced"].replaced, whole.heads["replaced"].replaced)
    np.testing.assert_allclose(other, loss, rtol=1e-5)  # float32 sums in products of other shapes
    assert int(other_sums["replaced_loss"][1]) == int(sums["replaced_loss"][1]) == batch["segment_ids"].sum()


def test_without_a_key_a_row_gets_its_replacements_in_any_batch():
    config, (_, batch) = joint(), masked_batch()
    _, (_, outputs) = run(config, batch)
    some = [5, 2, 7]
    _, (_, alone) = run(config, {name: x[some] for name, x in batch.items()})
    np.testing.assert_array_equal(alone.heads["replaced"].replaced, outputs.heads["replaced"].replaced[np.array(some)])


def test_keys_decide_what_is_drawn():
    config, (_, batch) = joint(), masked_batch()
    logits = {}
    for seed in (1, 2):
        _, (_, outputs) = run(config, batch, {"sample": jax.random.key(seed), "dropout": jax.random.key(0)})
        logits[seed] = outputs.heads["replaced"].logits
    assert (logits[1] != logits[2]).any()


def test_a_batch_without_a_loss_is_predicted_by_the_generator():
    config, (_, batch) = joint(), masked_batch()
    batch = {name: x for name, x in batch.items() if name != "loss_weights"}
    model, params = models.build(config, Compute()), weights(config)
    inner, own = electra.generator(config, params)
    expected = models.build(inner, Compute()).apply({"params": own}, batch, deterministic=True)
    outputs = model.apply({"params": params}, batch, deterministic=True)
    np.testing.assert_array_equal(outputs.heads["lm"].features, expected.heads["lm"].features)
    assert outputs.heads.keys() == {"lm"}


# --- the source of each gradient -------------------------------------------------------------------------------------


def reached(config, part):
    """Returns the parameters with a gradient from "loss" or "replaced_loss" alone; "generator" is one name."""
    _, batch = masked_batch()
    batch = jax.tree.map(jnp.asarray, batch)

    def objective(params):
        outputs = models.build(config, Compute()).apply({"params": params}, batch, deterministic=True)
        name = {"loss": "lm", "replaced_loss": "replaced"}[part]
        alone = outputs.replace(heads={name: outputs.heads[name]})
        return losses.objective(alone, batch, losses.counts(batch))[0]

    gradients = jax.jit(jax.grad(objective))(weights(config))
    named = zip(parameter_names(gradients), jax.tree.leaves(gradients), strict=True)
    return {name.split("/")[0] if "difference" not in name else name for name, g in named if jnp.any(g != 0)}


OWN = {"encoder", "embedding_projection", "replaced_token_head"}
EMBEDDINGS = {"token_embedding", "position_embedding", "token_type_embedding", "embedding_norm"}
DIFFERENCES = {f"embedding_difference/{name}_embedding/embedding" for name in ("token", "position")}


@pytest.mark.slow
def test_shared_embeddings_learn_from_both_and_the_generator_from_its_own_loss():
    config = joint("all")
    assert reached(config, "loss") == {"generator"} | EMBEDDINGS
    assert reached(config, "replaced_loss") == OWN | EMBEDDINGS


@pytest.mark.slow
def test_disentangled_tables_learn_from_the_generator_and_differences_from_the_discriminator():
    config = joint("gradient_disentangled")
    assert reached(config, "loss") == {"generator", "token_embedding", "position_embedding"}
    assert reached(config, "replaced_loss") == OWN | DIFFERENCES | {"token_type_embedding", "embedding_norm"}


# --- one tree, two encoders ----------------------------------------------------------------------------------------


def deberta():
    """Returns a config with a mask decoder in the generator, so that only the generator has absolute positions."""
    position = DisentangledPositions(num_buckets=4, max_distance=8, max_length=20)
    sizes = dict(embedding_dim=None, generator=Generator(2, 32, 64, 4), num_token_types=0)
    heads = dict(enhanced_mask_decoder=True, replaced_token_context=True)
    return joint("gradient_disentangled", position=position, **sizes, **heads)


@pytest.mark.slow
@pytest.mark.parametrize("config", [*map(joint, SHARING), deberta()], ids=[*SHARING, "deberta"])
def test_fresh_parameters_are_those_of_a_plain_encoder_and_a_generator_beside_it(config):
    _, batch = masked_batch()
    params = models.build(config, Compute()).init(jax.random.key(0), batch, deterministic=True)["params"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert shapes == models.abstract_params(config)
    for part in (electra.discriminator, electra.generator):
        plain, own = part(config, params)
        assert plain.generator is None and config.generator is not None
        assert jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), own) == models.abstract_params(plain)
    beside = {"generator", "embedding_difference"}
    assert params.keys() - beside == models.abstract_params(electra.discriminator_config(config)).keys()
    assert not any(x.any() for x in jax.tree.leaves(params.get("embedding_difference", {})))


@pytest.mark.parametrize("config", [*map(joint, SHARING), deberta()], ids=[*SHARING, "deberta"])
def test_taken_apart_and_joined_is_the_same(config):
    params = weights(config)
    joined = electra.join(config, electra.discriminator(config, params)[1], electra.generator(config, params)[1])
    assert parameter_names(joined) == parameter_names(params)
    for name, a, b in zip(parameter_names(params), jax.tree.leaves(params), jax.tree.leaves(joined), strict=True):
        # (x + d) - x equals d except for the rounding of x + d.
        np.testing.assert_allclose(b, a, atol=2e-7 if "difference" in name else 0, rtol=0, err_msg=name)


def test_a_mask_decoder_is_the_generators():
    config, (_, batch) = deberta(), masked_batch()
    shapes = models.abstract_params(config)
    assert "position_embedding" in shapes["generator"] and shapes["embedding_difference"].keys() == {"token_embedding"}
    loss, (sums, _) = run(config, batch)
    of_discriminator = {f"replaced_{name}" for name in ("loss", "accuracy", "precision", "recall")}
    spreads = {"hidden_spread", "generator_hidden_spread", "prediction_spread", "target_spread"}
    assert np.isfinite(loss) and sums.keys() == {"loss", "accuracy"} | of_discriminator | spreads


def test_two_models_that_were_not_pretrained_together_do_not_join():
    config = joint("all")
    _, one = electra.discriminator(config, weights(config))
    _, other = electra.generator(config, weights(config))
    other = other | {"token_embedding": jax.tree.map(lambda x: x + 1, other["token_embedding"])}
    with pytest.raises(UserError, match="token_embedding.*share_embeddings='all'"):
        electra.join(config, one, other)


def test_the_generator_takes_what_is_its_own_from_the_config_of_the_model():
    config = electra.generator_config(joint("all", num_kv_heads=2, head_dim=8))
    assert (config.d_model, config.num_heads, config.kv_heads, config.dim_per_head) == (12, 2, 2, 6)
    assert config.embedding_dim == 16 and config.masked_lm_head and not config.replaced_token_head
    wide = electra.generator_config(joint("all", generator=Generator(2, 16, 32, 2)))
    assert wide.embedding_dim is None  # The generator is as wide as the embeddings, so it needs no projection.


@pytest.mark.parametrize(
    "change, message",
    [
        ({"d_model": 30}, "generator.d_model 30 is not a multiple of config.model.generator.num_heads 4"),
        ({"num_layers": 0}, "generator.num_layers is 0"),
        ({"share_embeddings": "al"}, "generator.share_embeddings is 'al', did you mean 'all'"),
        ({"loss_weight": 0.0}, "generator.loss_weight is 0.0"),
        (None, "config.model.replaced_token_head requires config.model.generator"),
    ],
)
def test_a_wrong_generator_is_named(change, message):
    from pretrainax.config.validation import validate
    from tests.support.tiny import get_config

    experiment = get_config("bert")
    experiment.model = joint(vocab_size=512)
    experiment.model.generator = change and Generator(**{"num_layers": 2, "d_model": 32} | change)
    with pytest.raises(UserError, match=message):
        validate(experiment)


# --- any mesh ------------------------------------------------------------------------------------------------------

ON_EIGHT = [
    (dict(data=8), "gradient_disentangled"),
    (dict(data=1, fsdp=8), "all"),
    (dict(data=2, fsdp=2, tensor=2), "all"),
    (dict(data=2, fsdp=2, tensor=2), "gradient_disentangled"),
]
WIDTH = 16  # width of the embeddings


def one_step(sharing, mesh, certain=False, **fields):
    """Returns the parameters and the metrics after an update of the real training step, and the compiled program.

    Args:
      certain: the generator predicts one token with certainty, and there is no dropout.
    """
    config = joint(sharing, vocab_size=104, dropout_rate=0.0 if certain else 0.1)
    config.generator = Generator(2, 16, 32, 2, share_embeddings=sharing)
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    mesh, batch = make_mesh(MeshConfig(**mesh), devices), masked_batch()[1]
    train = resolve_auto(TrainConfig(steps=1, global_batch_size=ROWS, **fields))
    model, schedule = models.build(config, Compute()), WarmupConstant(warmup_steps=1).build(1e-3, 1)
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):  # Optax adds integers to floats.
        shapes = train_step.global_shapes(batch, ROWS)
        # tests/training/test_train_step.py explains this epsilon.
        optimizer = AdamW(epsilon=1e-3).build(schedule, train_step.abstract_params(model, shapes))
        state = train_step.make_init(model, optimizer, shapes, mesh)(0)
        if certain:
            bias = state.params["generator"]["unembedding"]["bias"]
            state.params["generator"]["unembedding"]["bias"] = jax.device_put(bias.at[7].set(1000.0), bias.sharding)
        step = train_step.make_train_step(model, optimizer, schedule, train, mesh)
        batch = put_batch(batch, mesh)
        program = step.lower(state, batch).compile()
        state, metrics = program(state, batch, None, step.arguments)
    return *jax.device_get((state.params, metrics)), program.as_text()


def check_same(found, expected):
    (params, metrics, _), (others, one, _) = found, expected
    assert metrics["sums"]["replaced_accuracy"] == one["sums"]["replaced_accuracy"]
    # float32 sums in another order.
    np.testing.assert_allclose(metrics["sums"]["replaced_loss"], one["sums"]["replaced_loss"], rtol=2e-5)
    np.testing.assert_allclose(metrics["gradient_norm"], one["gradient_norm"], rtol=2e-5)
    for name, a, b in zip(parameter_names(params), *map(jax.tree.leaves, (others, params)), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-7, err_msg=name)  # Updates are up to 1e-3.


@functools.cache
def on_one_device(sharing, certain=False):
    return one_step(sharing, dict(data=1), certain)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "sharing"), ON_EIGHT, ids=str)
def test_eight_devices_draw_and_learn_what_one_does(sharing, mesh):
    found = one_step(sharing, mesh)
    check_same(found, on_one_device(sharing))
    exchanged = re.findall(r"= (.*?) (all-gather|all-to-all|collective-permute)\(", found[2])
    shapes = [tuple(map(int, x.split(","))) for text, _ in exchanged for x in re.findall(r"\[([\d,]+)\]", text)]
    # Devices exchange tables with the vocabulary as an axis, but no logits.
    assert {shape for shape in shapes if {52, 104} & set(shape)} <= {(104, WIDTH), (52, WIDTH), (WIDTH, 52)}


def test_a_generator_that_a_mesh_does_not_divide_is_named():
    mesh = make_mesh(MeshConfig(data=1, tensor=8))
    with pytest.raises(UserError, match="config.model.generator.num_heads 2 is not a multiple of config.mesh.tensor 8"):
        tree_shardings(mesh, models.abstract_params(joint()))


@pytest.mark.slow
def test_micro_batches_change_nothing_but_the_draw():
    found = one_step("all", dict(data=2), certain=True, accumulate=4)
    check_same(found, on_one_device("all", certain=True))


@pytest.mark.slow
@pytest.mark.parametrize("sharing", few(SHARING, ["all"]))
def test_in_bfloat16_losses_are_float32_and_near(sharing):
    config, (_, batch) = joint(sharing), masked_batch()
    model, batch = models.build(config, Compute(dtype="bfloat16")), jax.tree.map(jnp.asarray, batch)
    params = models.build(config, Compute()).init(jax.random.key(0), batch, deterministic=True)["params"]

    def objective(params):
        outputs = model.apply({"params": params}, batch, deterministic=True)
        return losses.objective(outputs, batch, losses.counts(batch))[0]

    loss, gradients = jax.jit(jax.value_and_grad(objective))(params)
    assert loss.dtype == jnp.float32 and all(g.dtype == jnp.float32 for g in jax.tree.leaves(gradients))
    # Fresh models know nothing, so the losses are log V and 50 log 2.
    np.testing.assert_allclose(loss, np.log(VOCABULARY) + 50 * np.log(2), rtol=0.02)
