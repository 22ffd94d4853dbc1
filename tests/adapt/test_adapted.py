"""Tests models with parameter-efficient tuning in every family: initial values, merging, and training."""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.adapt import IA3, Adapted, LoRA, PrefixTuning, PromptTuning
from pretrainax.config import MeshConfig, TrainConfig
from pretrainax.data.batch import LENGTH_FIELDS
from pretrainax.layers.compute import Compute, resolve_auto
from pretrainax.layers.stack import layer_by_layer
from pretrainax.optim import AdamW
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import flat, nested
from pretrainax.sharding.rules import PARTITION_RULES, add_partition_rules, axes_of_leaves, tree_shardings
from pretrainax.training import train_step
from tests.golden import CASES, electra
from tests.golden.case import Case, batch, weights
from tests.support import tiny, written
from tests.support.tiers import few

ALL = (".*",)  # all matrices


def noisy(tree):
    """Adds noise to all parameters."""
    keys = {path: jax.random.key(zlib.crc32(path.encode())) for path in flat(tree)}
    return nested({path: x + 0.1 * jax.random.normal(keys[path], x.shape) for path, x in flat(tree).items()})


def logits_of(model, arrays):
    """Returns the compiled function from parameters to the logits of the non-padding tokens of a batch."""
    real = arrays["segment_ids"] > 0

    def logits(variables):
        return model.apply(variables, arrays, deterministic=True).heads["lm"].logits()[real]

    return jax.jit(logits)


def config_of(name):
    return written.CONFIGS[name] if name in written.CONFIGS else CASES[name].config


def adapted(name, tuning, **compute):
    """Returns the model of a case with a tuning, its initial trained parameters, and its frozen parameters."""
    model = Adapted(models.build(config_of(name), Compute(**compute)), tuning, train_heads=False)
    params = weights(config_of(name))
    return model, model.start(params, jax.random.key(0)), model.frozen(params)


def test_matrices_of_a_part_that_is_registered_later_have_rules_for_their_updates():
    rules, experiment = len(PARTITION_RULES), tiny.get_config("gpt")
    try:
        add_partition_rules([(r"blocks/mlp/late/kernel", "layers d_model features")])
        LoRA().adapted(models.build(experiment.model, Compute()), experiment)
        assert axes_of_leaves({"blocks": {"mlp": {"late": {"lora_a": np.zeros((2, 4, 3))}}}}) == [
            ("layers", "d_model", "rank")
        ]
    finally:
        del PARTITION_RULES[rules:]


# ALBERT shares its layers. T5 has cross-attention and a gated feed-forward without biases. LLaMA has grouped keys.
# DeBERTa's mask decoder runs its last layer twice, and its projections of queries and keys also read its positions.
# The others cover all kinds of mixtures of experts: with shared experts for all tokens, with biases, with alternating
# layers, and with a feed-forward after the experts.
MERGED = {
    "bert_masked_lm": IA3(),
    "albert": LoRA(rank=3, targets=ALL),
    "llama3_2": LoRA(rank=3, fully_trained=("token_embedding", "final_norm")),
    "t5_1_1": LoRA(rank=3, targets=ALL, dora=True),
    "t5gemma_9b_2b": LoRA(rank=3, targets=ALL),
    "llama3": IA3(),
    "deberta_v2": LoRA(rank=3, targets=ALL, dora=True),
    "mixtral": LoRA(rank=3, targets=ALL),
    "olmoe": LoRA(rank=3, targets=ALL, dora=True),
    "qwen3_moe": LoRA(rank=3, targets=ALL),
    "deepseek_v2": LoRA(rank=3, targets=ALL),
    "deepseek_v3": LoRA(rank=3, targets=ALL, dora=True),
    "gpt_oss": LoRA(rank=3, targets=ALL),
    "switch": LoRA(rank=3, targets=ALL, dora=True),
    "switch_c": LoRA(rank=3, targets=ALL),
    "st_moe": LoRA(rank=3, targets=ALL),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", few(MERGED))
def test_a_tuning_starts_as_the_model_and_merges_into_one(name):
    model, start, frozen = adapted(name, MERGED[name])
    arrays = batch(CASES.get(name) or Case(config_of(name), family=None))
    tuned, plain = logits_of(model, arrays), logits_of(model.model, arrays)
    before = plain({"params": weights(config_of(name))})
    # The products are the same, except that DoRA multiplies and divides by the same norm.
    np.testing.assert_allclose(tuned({"params": start, **frozen}), before, atol=1e-4, rtol=0)
    trained = noisy(start)
    after = tuned({"params": trained, **frozen})
    assert np.abs(after - before).max() > 0.1
    merged_model, merged = model.merged(trained, frozen)
    assert merged_model is model.model
    np.testing.assert_allclose(plain({"params": merged}), after, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_both_encoders_of_electra_have_their_updates():
    config, (_, arrays) = electra.joint(), electra.masked_batch()
    model = Adapted(models.build(config, Compute()), LoRA(rank=2), train_heads=False)
    params = weights(config)
    start, frozen = model.start(params, jax.random.key(0)), model.frozen(params)
    assert {path.startswith("generator/") for path in flat(start)} == {True, False}
    trained, run = noisy(start), jax.jit(functools.partial(model.apply, batch=arrays, deterministic=True))
    plain = jax.jit(functools.partial(model.model.apply, batch=arrays, deterministic=True))
    got, before = run({"params": trained, **frozen}).heads, plain({"params": params}).heads
    wanted = plain({"params": model.merged(trained, frozen)[1]}).heads
    for name, logits in (("lm", lambda head: head.logits()), ("replaced", lambda head: head.logits)):
        np.testing.assert_allclose(logits(got[name]), logits(wanted[name]), atol=1e-4, rtol=0)
        assert np.abs(logits(got[name]) - logits(before[name])).max() > 0.1


@pytest.mark.slow
def test_layers_that_lie_one_by_one_have_their_updates():
    model, start, frozen = adapted("gpt2", LoRA(rank=3, targets=ALL))
    logits, params = logits_of(model, batch(CASES["gpt2"])), {**flat(noisy(start)), **flat(frozen["frozen"])}
    wanted, params = logits({"params": nested(params)}), nested(params)
    params["decoder"]["blocks"] = layer_by_layer(params["decoder"]["blocks"])
    np.testing.assert_allclose(logits({"params": params}), wanted, atol=1e-5, rtol=0)


# --- virtual tokens --------------------------------------------------------------------------------------------------


def in_front(ids, arrays, side):
    """Adds these tokens to the start of each row, as part of its text, but without targets."""
    rows, count = len(arrays[f"{side}tokens"]), len(ids)
    front = {"tokens": np.tile(ids, (rows, 1)), "segment_ids": np.ones((rows, count))}
    front["positions"] = np.tile(np.arange(count), (rows, 1))
    longer = dict(arrays, **{f"{side}positions": arrays[f"{side}positions"] + count})
    for name, x in front.items():
        longer[f"{side}{name}"] = np.concatenate([x, longer[f"{side}{name}"]], axis=1).astype(np.int32)
    return longer


def without_targets(arrays):
    """Removes the targets, because a batch of `in_front` has no targets for the added tokens."""
    return {name: x for name, x in arrays.items() if name not in ("targets", "loss_weights")}


IDS = np.array([7, 40, 11])


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "side"), (("gpt2", ""), ("t5_1_1", "encoder_")))
def test_a_prompt_of_embeddings_is_read_as_their_tokens_are(name, side):
    model, _, frozen = adapted(name, PromptTuning(len(IDS)))
    arrays, params = batch(CASES[name]), weights(CASES[name].config)
    prompt = {"token_embedding": {"prompt": jnp.asarray(params["token_embedding"]["embedding"][IDS])}}
    got = logits_of(model, arrays)({"params": prompt, **frozen})
    longer = in_front(IDS, arrays, side)
    real = np.pad(arrays["segment_ids"] > 0, ((0, 0), (longer["tokens"].shape[1] - arrays["tokens"].shape[1], 0)))
    plain = models.build(CASES[name].config, Compute())
    wanted = plain.apply({"params": params}, without_targets(longer), deterministic=True)
    np.testing.assert_allclose(got, wanted.heads["lm"].logits()[real], atol=1e-4, rtol=0)


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "tuning"), (("gpt2", PromptTuning(3)), ("t5_1_1", PrefixTuning(3))))
def test_the_lengths_of_rows_include_the_virtual_tokens(name, tuning):
    model, start, frozen = adapted(name, tuning)
    arrays = batch(CASES[name])
    lengths = {field: arrays[ids].sum(1, dtype=np.int32) for field, ids in LENGTH_FIELDS.items() if ids in arrays}
    got, wanted = (logits_of(model, x)({"params": start, **frozen}) for x in (arrays | lengths, arrays))
    np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=0)


def test_a_prefix_of_the_keys_and_values_of_tokens_is_seen_as_they_are():
    """The first tokens of a causal model attend to no later token, and their keys are rotated by their positions."""
    model, start, frozen = adapted("llama3", PrefixTuning(len(IDS)))
    arrays, params = batch(CASES["llama3"]), weights(CASES["llama3"].config)
    longer, plain = without_targets(in_front(IDS, arrays, "")), model.model
    chosen = lambda module, method: module.name in ("key", "value") and method == "__call__"  # noqa: E731
    run = jax.jit(lambda p: plain.apply({"params": p}, longer, deterministic=True, capture_intermediates=chosen))
    outputs, kept = run(params)
    made = kept["intermediates"]["decoder"]["blocks"]["self_attention"]
    path = "decoder/blocks/self_attention"
    prefix = {f"{path}/{name}/prefix": made[name]["__call__"][0][:, 0, : len(IDS)] for name in ("key", "value")}
    assert {name: x.shape for name, x in prefix.items()} == {name: x.shape for name, x in flat(start).items()}
    got = logits_of(model, arrays)({"params": nested(prefix), **frozen})
    wanted = outputs.heads["lm"].logits()[:, len(IDS) :][arrays["segment_ids"] > 0]
    np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5_1_1", "t5gemma_9b_2b"])
def test_prefixes_of_an_encoder_decoder_are_in_all_its_attentions(name):
    model, start, frozen = adapted(name, PrefixTuning(3, hidden=4))
    kinds = {path.split("/")[1] for path in flat(start)}
    assert kinds == {"encoder_self_attention", "decoder_self_attention", "decoder_cross_attention"}
    logits = logits_of(model, batch(CASES[name]))
    trained = noisy(start)
    gradients = jax.jit(jax.grad(lambda p: jnp.square(logits({"params": p, **frozen})).sum()))(trained)
    assert all(float(jnp.abs(g).max()) > 0 for g in flat(gradients).values())
    left, parts = model.merged(trained, frozen)
    assert left is model and not [path for path in flat(parts) if path.startswith("prefix/")]
    before = logits({"params": trained, **frozen})
    np.testing.assert_allclose(logits({"params": parts}), before, atol=1e-5, rtol=0)


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_update_is_the_same_on_one_device_and_on_eight():
    """Checks micro-batches with rematerialized blocks, on a mesh that shards the matrices."""
    case, updated = CASES["bert_masked_lm"], []
    rows = {name: np.concatenate([x, x, x[:2]]) for name, x in batch(case).items()}
    config = dataclasses.replace(case.config, vocab_size=100, dropout_rate=0.0, attention_dropout_rate=0.0)
    for devices, sizes in ((1, {}), (8, {"data": 2, "fsdp": 2, "tensor": 2})):
        mesh = make_mesh(MeshConfig(**sizes), jax.devices()[:devices])
        model = Adapted(models.build(config, Compute(remat="block")), LoRA(rank=2, targets=ALL), train_heads=False)
        train = resolve_auto(TrainConfig(global_batch_size=8, accumulate=2 if devices == 1 else 1))
        with jax.set_mesh(mesh):
            whole = weights(config)
            whole = jax.device_put(whole, tree_shardings(mesh, whole))
            params, frozen = noisy(model.start(whole, jax.random.key(0))), model.frozen(whole)
            optimizer = AdamW(epsilon=1e-3).build(lambda step: jnp.float32(0.1), params)
            state = train_step.state_from(params, optimizer, mesh)
            step = train_step.make_train_step(model, optimizer, lambda step: jnp.float32(0.1), train, mesh)
            state, metrics = step(state, put_batch(rows, mesh), frozen)
        assert metrics["finite"]
        assert all(path.rpartition("/")[2] in ("lora_a", "lora_b") for path in flat(state.params))
        updated.append(jax.device_get(flat(state.params)))
    for path, x in updated[0].items():
        np.testing.assert_allclose(updated[1][path], x, atol=1e-4, rtol=0, err_msg=path)


def test_the_merged_update_is_alpha_over_the_rank_times_the_product():
    """Checks Hu et al. 2021, section 4.1: the scale is 2; division by the square root of the rank would give 4."""
    tuning = LoRA(rank=4, alpha=8.0, targets=("mlp/down",))
    model, start, frozen = adapted("gpt2", tuning)
    trained, kernels = flat(noisy(start)), flat(weights(config_of("gpt2")))
    merged = flat(model.merged(nested(trained), frozen)[1])
    path = "decoder/blocks/mlp/down"
    product = np.einsum("lir,lro->lio", trained[f"{path}/lora_a"], trained[f"{path}/lora_b"])
    np.testing.assert_allclose(merged[f"{path}/kernel"] - kernels[f"{path}/kernel"], 2.0 * product, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_no_gradient_passes_through_the_norm_of_dora():
    """Checks Liu et al. 2024, section 4.3.

    The norm counts as a constant, so the gradient of the direction is m / ‖V‖ times the gradient of the merged kernel.
    """
    tuning, path = LoRA(rank=4, targets=("mlp/down",), dora=True), "decoder/blocks/mlp/down"
    model, start, frozen = adapted("gpt2", tuning)
    arrays, trained = batch(CASES["gpt2"]), noisy(start)
    tuned, plain = logits_of(model, arrays), logits_of(model.model, arrays)
    merged = model.merged(trained, frozen)[1]
    weighting = jax.random.normal(jax.random.key(1), plain({"params": merged}).shape)
    of_update = flat(jax.grad(lambda p: (tuned({"params": p, **frozen}) * weighting).sum())(trained))
    of_kernel = flat(jax.grad(lambda p: (plain({"params": p}) * weighting).sum())(merged))[f"{path}/kernel"]
    values = flat(trained)
    a, b, m = (values[f"{path}/{name}"] for name in ("lora_a", "lora_b", "magnitude"))
    direction = flat(weights(config_of("gpt2")))[f"{path}/kernel"] + tuning.scale * np.einsum("lir,lro->lio", a, b)
    norm = np.linalg.norm(direction, axis=1)  # over the inputs, for each output
    of_direction = of_kernel * (m / norm)[:, None]
    expected = {
        "lora_a": tuning.scale * np.einsum("lio,lro->lir", of_direction, b),
        "lora_b": tuning.scale * np.einsum("lir,lio->lro", a, of_direction),
        "magnitude": (of_kernel * direction).sum(axis=1) / norm,
    }
    for name, gradient in expected.items():
        largest = np.abs(gradient).max()  # float32 sums in another order
        np.testing.assert_allclose(of_update[f"{path}/{name}"], gradient, atol=1e-4 * largest, rtol=0, err_msg=name)


@pytest.mark.slow
def test_dropout_is_of_what_an_update_reads_and_of_training_alone():
    """Dropout (Hu et al. 2021) leaves W x unchanged, and is inactive in inference."""
    config = dataclasses.replace(config_of("gpt2"), dropout_rate=0.0, attention_dropout_rate=0.0)
    arrays, key = batch(CASES["gpt2"]), jax.random.key(0)

    def logits(rate, training, of=None, seed=0):
        model = Adapted(models.build(config, Compute()), LoRA(rank=3, targets=ALL, dropout=rate), train_heads=False)
        start, frozen = model.start(weights(config), key), model.frozen(weights(config))
        rngs = {"dropout": jax.random.key(seed)} if training else None
        variables = {"params": (of or (lambda params: params))(start), **frozen}
        return model.apply(variables, arrays, deterministic=not training, rngs=rngs).heads["lm"].logits()

    whole = logits(0.0, training=False, of=noisy)
    np.testing.assert_array_equal(logits(0.5, training=False, of=noisy), whole)
    one, other = (logits(0.5, training=True, of=noisy, seed=seed) for seed in (0, 1))
    assert np.abs(one - whole).max() > 0.1 and np.abs(one - other).max() > 0.1
    # The initial update is zero for any input; 1e-5: the two programs round differently.
    np.testing.assert_allclose(logits(0.5, training=True), logits(0.0, training=False), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_vectors_of_outputs_are_merged_into_their_biases_too():
    """Checks (x W + b) * v = x (W v) + b v; `down` scales its input instead, (x * v) W + b."""
    rng, key, down = np.random.RandomState(0), "s/blocks/self_attention/key", "s/blocks/mlp/down"
    params = {f"{key}/kernel": (1, 3, 2, 4), f"{key}/bias": (1, 2, 4), f"{key}/ia3": (1, 2, 4)}
    params |= {f"{down}/kernel": (1, 5, 3), f"{down}/bias": (1, 3), f"{down}/ia3": (1, 5)}
    params = {path: rng.standard_normal(shape) for path, shape in params.items()}
    merged = IA3().merged(params)
    np.testing.assert_allclose(merged[f"{key}/kernel"][0], params[f"{key}/kernel"][0] * params[f"{key}/ia3"], rtol=1e-6)
    np.testing.assert_allclose(merged[f"{key}/bias"], params[f"{key}/bias"] * params[f"{key}/ia3"], rtol=1e-6)
    np.testing.assert_allclose(
        merged[f"{down}/kernel"][0], np.diag(params[f"{down}/ia3"][0]) @ params[f"{down}/kernel"][0], rtol=1e-6
    )
    np.testing.assert_array_equal(merged[f"{down}/bias"], params[f"{down}/bias"])
    assert merged.keys() == {f"{path}/{name}" for path in (key, down) for name in ("kernel", "bias")}
