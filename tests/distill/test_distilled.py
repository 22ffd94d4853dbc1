"""Tests a student with its teacher: the states read from both, the losses, and the training."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import MeshConfig, TrainConfig
from pretrainax.distill import (
    PROJECTIONS,
    TEACHER,
    DistilBERT,
    Distillation,
    Distilled,
    MiniLM,
    TinyBERT,
    states,
)
from pretrainax.layers.compute import Compute, resolve_auto
from pretrainax.layers.linear import Linear
from pretrainax.optim import AdamW
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.sharding.rules import tree_shardings
from pretrainax.training import losses, train_step
from pretrainax.training.metrics import add_up, summarize
from tests.distill import by_hand
from tests.golden import CASES
from tests.golden.case import batch, weights

ALL = Distillation("a folder", soft=1.0, hidden=1.0, embeddings=1.0, attention=1.0, relations=1.0)
PARTS = {"soft_loss", "hidden_loss", "embedding_loss", "attention_loss", "relation_loss"}


def config_of(name, **changed):
    return dataclasses.replace(CASES[name].config, dropout_rate=0.0, attention_dropout_rate=0.0, **changed)


def flat(tree):
    return dict(zip(parameter_names(tree), jax.tree.leaves(tree), strict=True))


# --- the states of a model -------------------------------------------------------------------------------------------


# T5 1.1 has a bias in two stacks. Gemma 2 has grouped, rotated keys, a softcap, and a window in some layers. Qwen3 has
# norms of queries and keys. ALBERT shares one layer.
@pytest.mark.first(2)
@pytest.mark.parametrize("name", ("t5_1_1", "gemma2", "qwen3", "albert"))
def test_logits_are_those_that_attention_takes_its_softmax_of(name):
    """The values weighted by the softmax of the logits are the input of the output projection."""
    model = models.build(config_of(name), Compute(attention="xla"))

    def read_by_out(call, args, kwargs, context):
        if isinstance(context.module, Linear) and context.module.name == "out":
            context.module.sow("intermediates", "read", args[0])
        return call(*args, **kwargs)

    def run(params):
        with nn.intercept_methods(read_by_out):
            found = model.apply({"params": params}, batch(CASES[name]), deterministic=True, mutable=["intermediates"])
        taken = states.run_with_states(model, params, batch(CASES[name]), vectors=True, logits=True, deterministic=True)
        return found[1]["intermediates"], taken[1]

    read, stacks = jax.jit(run)(weights(model.config))
    assert len(stacks) == len(model.config.stacks)
    for (stack, own), found in zip(model.config.stacks.items(), stacks, strict=True):
        assert len(found.hidden) == own.num_layers
        values = found.vectors["value"]  # [L, B, S, G, K]
        seen = jnp.einsum("LBGRTS,LBSGK->LBTGRK", jax.nn.softmax(found.logits, axis=-1), values)
        wanted = read[stack]["blocks"]["self_attention"]["out"]["read"][0]
        np.testing.assert_allclose(seen.reshape(-1), wanted.reshape(-1), atol=2e-5)


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["t5_1_1", "t5gemma_9b_2b"])
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient_goes_to_a_teacher(name):
    """Checks both stacks of an encoder-decoder, also with different widths and heads."""
    model = models.build(config_of(name), Compute(attention="xla"))
    distilled, arrays, params = Distilled(model, model, ALL, 7), batch(CASES[name]), weights(model.config)

    def loss(params, teacher):
        variables = {"params": params, TEACHER: teacher}
        outputs = distilled.apply(variables, arrays, deterministic=False, rngs={"dropout": jax.random.key(0)})
        return losses.objective(outputs, arrays, losses.counts(arrays), chunk=1024)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (same, sums), _ = run(params, params)
    means = {name: float(total) / float(count) for name, (total, count) in sums.items()}
    assert PARTS | {"distillation_loss"} <= means.keys()
    np.testing.assert_allclose([means[name] for name in PARTS], 0, atol=1e-6)
    np.testing.assert_allclose(same, 0.5 * means["loss"], rtol=1e-5)
    other = jax.tree.map(lambda x: 1.1 * x, params)
    (value, sums), (mine, theirs) = run(params, other)
    means = {name: float(total) / float(count) for name, (total, count) in sums.items()}
    assert all(means[name] > 1e-5 for name in PARTS)
    np.testing.assert_allclose(value, 0.5 * means["loss"] + sum(means[name] for name in PARTS), rtol=1e-5)
    assert all(float(jnp.abs(g).max()) == 0 for g in jax.tree.leaves(theirs))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(mine))
    alone = lambda params, of=distilled: of.apply({"params": params}, arrays, deterministic=True)  # noqa: E731
    assert str(jax.make_jaxpr(alone)(params)) == str(jax.make_jaxpr(lambda p: alone(p, model))(params))


KINDS = {
    "default": Distillation("a folder"),
    "all": ALL,
    "distilbert": DistilBERT("a folder"),
    "tinybert": TinyBERT("a folder"),
    "minilm": MiniLM("a folder", relation_heads=2),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_validation_has_the_loss_that_an_update_trains(kind):
    """Compares the metrics of two batches with `by_numpy`: means over predictions or tokens, and weighted sums."""
    config, distillation = config_of("bert_masked_lm"), KINDS[kind]
    model = models.build(config, Compute(attention="xla"))
    arrays, params = batch(CASES["bert_masked_lm"]), weights(config)
    teacher = jax.tree.map(lambda x: 1.1 * x, params)
    train, mesh = (
        resolve_auto(TrainConfig(global_batch_size=len(arrays["tokens"]))),
        make_mesh(MeshConfig(), jax.devices()[:1]),
    )
    distilled = Distilled(model, model, distillation, 8)
    with jax.set_mesh(mesh):
        validate = train_step.make_eval_step(distilled, train, mesh)
        sums, _ = jax.device_get(validate(params, put_batch(arrays, mesh), {TEACHER: teacher}))
    metrics = summarize(add_up([sums, sums]))
    wanted = by_numpy(model, distillation, params, teacher, arrays)
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, err_msg=name)
    variables, keys = {"params": params, TEACHER: teacher}, {"dropout": jax.random.key(0)}
    outputs = distilled.apply(variables, arrays, deterministic=False, rngs=keys)
    trained, _ = losses.objective(outputs, arrays, losses.counts(arrays), **train_step.loss_options(train))
    np.testing.assert_allclose(metrics["combined_loss"], trained, rtol=1e-5)


def by_numpy(model, distillation, params, teacher, arrays):
    """Computes the terms of a distillation and their weighted sums, from the outputs and states of two models."""
    found = []
    for values in (params, teacher):
        outputs, (stack,) = states.run_with_states(model, values, arrays, vectors=True, logits=True, deterministic=True)
        found.append((np.asarray(outputs.logits, np.float64), jax.tree.map(lambda x: np.asarray(x, np.float64), stack)))
    (student_logits, student), (teacher_logits, taught) = found
    real, weight = arrays["segment_ids"] > 0, np.asarray(arrays["loss_weights"], np.float64)
    over_tokens = lambda x: (x * real).sum() / real.sum()  # noqa: E731
    square = lambda a, b: over_tokens(np.square(a - b).mean(-1))  # noqa: E731
    t = distillation.temperature
    soft = t**2 * by_hand.kl(by_hand.softmax(teacher_logits / t), by_hand.softmax(student_logits / t))
    own = -np.log(np.take_along_axis(by_hand.softmax(student_logits), arrays["targets"][..., None], -1))[..., 0]
    cosine = lambda a, b: 1 - (a * b).sum(-1) / np.sqrt(np.square(a).sum(-1) * np.square(b).sum(-1))  # noqa: E731
    layers = [-1] if distillation.hidden_layers == "last" else range(len(student.hidden))
    hidden = cosine if distillation.distance == "cosine" else lambda a, b: np.square(a - b).mean(-1)
    seen = arrays["segment_ids"][:, :, None] == arrays["segment_ids"][:, None]

    def relation(x, heads):
        x = x.reshape(*x.shape[:2], heads, -1)
        products = np.einsum("BTAK,BSAK->BATS", x, x) / np.sqrt(x.shape[-1])
        return by_hand.softmax(np.where(seen[:, None], products, -1e9))

    def divergence(a, b):
        return np.where(b > 0, b * (np.log(np.maximum(b, 1e-300)) - np.log(np.maximum(a, 1e-300))), 0).sum(-1)

    heads = distillation.relation_heads or student.vectors["query"].shape[-2]
    logits = [np.where(seen[:, None, None], x, 0) for x in (student.logits, taught.logits)]
    of_logits = np.square(logits[0] - logits[1]).sum(-1) / seen.sum(-1)[:, None, None]
    values = {
        "soft_loss": (distillation.soft, (soft * weight).sum() / weight.sum()),
        "hidden_loss": (
            distillation.hidden,
            sum(over_tokens(hidden(student.hidden[i], taught.hidden[i])) for i in layers),
        ),
        "embedding_loss": (distillation.embeddings, square(student.embedded, taught.embedded)),
        "attention_loss": (distillation.attention, over_tokens(of_logits.mean((2, 3)).sum(0))),
        "relation_loss": (
            distillation.relations,
            sum(
                over_tokens(divergence(relation(x[-1], heads), relation(taught.vectors[k][-1], heads)).mean(1))
                for k, x in student.vectors.items()
            ),
        ),
    }
    used = {name: value for name, (factor, value) in values.items() if factor}
    total = sum(factor * value for factor, value in values.values())
    loss = (own * weight).sum() / weight.sum()
    return used | {"loss": loss, "distillation_loss": total, "combined_loss": distillation.hard * loss + total}


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_update_is_the_same_on_one_device_and_on_eight():
    """Checks micro-batches whose rows differ in their targets and tokens, with projections to a wider teacher."""
    case, updated = CASES["bert_masked_lm"], []
    rows = {name: np.concatenate([x, x, x[:2]]) for name, x in batch(case).items()}
    ours = config_of("bert_masked_lm", vocab_size=100)
    theirs = config_of("bert_masked_lm", vocab_size=100, d_model=2 * ours.d_model, num_layers=2 * ours.num_layers)
    for devices, sizes in ((1, {}), (8, {"data": 2, "fsdp": 2, "tensor": 2})):
        mesh = make_mesh(MeshConfig(**sizes), jax.devices()[:devices])
        student, teacher = (models.build(c, Compute(attention="xla", remat="block")) for c in (ours, theirs))
        model = Distilled(student, teacher, ALL, 8)
        train = resolve_auto(TrainConfig(global_batch_size=8, accumulate=2 if devices == 1 else 1))
        with jax.set_mesh(mesh):
            start = jax.jit(lambda p, m=model: m.start(p, jax.random.key(0)))(weights(ours))
            frozen = weights(theirs)
            params, frozen = (jax.device_put(x, tree_shardings(mesh, x)) for x in (start, frozen))
            optimizer = AdamW(epsilon=1e-3).build(lambda step: jnp.float32(0.1), params)
            state = train_step.state_from(params, optimizer, mesh)
            step = train_step.make_train_step(model, optimizer, lambda step: jnp.float32(0.1), train, mesh)
            state, metrics = step(state, put_batch(rows, mesh), {TEACHER: frozen})
        assert metrics["finite"] and set(state.params[PROJECTIONS]) == {"hidden", "embedded"}
        sums = jax.device_get(metrics["sums"])
        updated.append((flat(jax.device_get(state.params)), {name: sums[name] for name in PARTS}))
    for name, (total, count) in updated[0][1].items():
        np.testing.assert_allclose(updated[1][1][name], (total, count), rtol=1e-4, err_msg=name)
    for path, x in updated[0][0].items():
        np.testing.assert_allclose(updated[1][0][path], x, atol=1e-4, rtol=0, err_msg=path)
