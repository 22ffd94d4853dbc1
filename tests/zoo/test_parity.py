"""Each published architecture computes what its reference does: logits, hidden states, gradients, three updates."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import MeshConfig, RandomBlocks, TrainConfig
from pretrainax.layers.compute import Compute, for_this_machine
from pretrainax.optim.decay import decay_mask
from pretrainax.optim.optimizers import AdamW
from pretrainax.optim.schedules import WarmupConstant
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training import train_step
from pretrainax.zoo.convert import from_huggingface, to_huggingface
from tests.golden import CASES, make
from tests.golden.case import batch, needs_transformers, packed, weights
from tests.support.parity import differences, ours
from tests.support.tiers import few

# Three updates of each family's kind of model; what a brick's gradient is, logits and gradients of all say
UPDATED = ["bert", "electra_small", "llama3", "deepseek_v3", "t5_1_1"]


def check(found: dict[str, float]) -> None:
    # float32 sums in another order; hidden states reach 10 and logits 30 with weights as large as these
    assert found["logits"] <= 2e-4, found
    assert found["hidden"] <= 2e-4, found
    assert found["gradient"] <= 1e-3, found
    assert found["loss"] <= 1e-5, found


@pytest.mark.parametrize("name", CASES)
def test_as_the_golden_file(name):
    check(differences(name, make.golden(name)))


@needs_transformers
@pytest.mark.parametrize("name", few(CASES))
def test_as_transformers(name):
    check(differences(name, make.reference(name)))


# The blocks of BigBird are those of a row, whatever texts there are in it.
@pytest.mark.parametrize(
    "name",
    few(n for n, x in CASES.items() if not (x.config.pair_head or isinstance(x.config.sparse_attention, RandomBlocks))),
)
def test_packed_rows_give_the_logits_of_rows_of_their_own(name):
    arrays, config = batch(CASES[name]), CASES[name].config
    model = models.build(config, Compute())
    outputs = jax.jit(lambda p, b: model.apply({"params": p}, b, deterministic=True))(weights(config), packed(arrays))
    key = "replaced_logits" if config.replaced_token_head else "logits"
    got = outputs.heads["replaced"].logits if config.replaced_token_head else outputs.heads["lm"].logits()
    # the same sums with more zeros in them
    np.testing.assert_allclose(got[0], ours(name)[key][arrays["segment_ids"] > 0], atol=2e-4, rtol=0)


STEPS = 3
LEARNING_RATE = 1e-3
ADAMW = {"b1": 0.9, "b2": 0.95, "epsilon": 1e-6, "weight_decay": 0.1}
CLIP = 1.0


def updated(case):
    """Our parameters after three updates of the real training step."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    config = dataclasses.replace(case.config, dropout_rate=0.0, attention_dropout_rate=0.0)
    model, arrays = models.build(config, Compute()), batch(case)
    schedule = WarmupConstant(warmup_steps=1).build(LEARNING_RATE, STEPS)
    with jax.set_mesh(mesh):
        params = jax.tree.map(jnp.asarray, weights(case.config))
        optimizer = AdamW(learning_rate=LEARNING_RATE, clip_norm=CLIP, **ADAMW).build(schedule, params)
        state = train_step.TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
        train = for_this_machine(TrainConfig(steps=STEPS, global_batch_size=3))
        step = train_step.make_train_step(model, optimizer, schedule, train, mesh)
        for _ in range(STEPS):
            state, metrics = step(state, put_batch(arrays, mesh))
            assert metrics["finite"]
    return state.params


@needs_transformers
@pytest.mark.parametrize("name", few(CASES, UPDATED))
def test_three_updates_land_where_torch_does(name):
    import torch

    case = CASES[name]
    model, table = make.oracle(case), case.family.huggingface.names(case.config)
    decays = jax.tree.map(lambda d, x: np.full(x.shape, d), decay_mask(weights(case.config)), weights(case.config))
    named = dict(model.named_parameters(remove_duplicate=False))
    decayed = {n: bool(x.any()) for n, x in to_huggingface(table, decays).items()}
    if case.config.experts is not None:  # some have other names in the class than in files
        known = {id(named[n]) for n in decayed if n in named}  # by one name of a tied one
        decayed |= {n: p.ndim > 1 for n, p in model.named_parameters() if id(p) not in known}
    groups = [[p for n, p in named.items() if decayed.get(n) is d] for d in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(ADAMW["b1"], ADAMW["b2"]),
        eps=ADAMW["epsilon"],
        weight_decay=ADAMW["weight_decay"],
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        make.forward(case, model, batch(case))["loss"].backward()
        torch.nn.utils.clip_grad_norm_([*groups[0], *groups[1]], CLIP)
        optimizer.step()
    theirs = make.state_of(case, model)
    # of steps of up to 3e-3: an epsilon of 1e-6 keeps Adam from blowing up gradients that are rounding alone
    chex.assert_trees_all_close(updated(case), theirs, atol=1e-4, rtol=0)
    moved = jax.tree.map(lambda b, start: float(np.abs(b - start).max()), theirs, weights(case.config))
    assert max(jax.tree.leaves(moved)) > STEPS * LEARNING_RATE / 2


@pytest.mark.parametrize("name", CASES)
def test_config_json_says_the_same_architecture(name):
    case = CASES[name]
    json = case.family.huggingface.write_config(case.config)  # which reads back what it wrote, and compares
    assert case.family.huggingface.read_config(json).family == case.config.family


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_is_the_same_bit_for_bit(name):
    config, table = CASES[name].config, CASES[name].family.huggingface.names(CASES[name].config)
    params = weights(config)
    again = from_huggingface(table, to_huggingface(table, params), config)
    for path, a, b in zip(parameter_names(params), jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        assert a.tobytes() == np.asarray(b).tobytes(), path


def test_gathered_head_gives_the_same_logits_at_its_positions():
    case = CASES["bert_masked_lm"]
    model, arrays = models.build(case.config, Compute()), batch(case)
    positions = np.array([[0, 3, 11], [8, 2, 1], [4, 0, 0]], np.int32)
    gathered = model.apply(
        {"params": weights(case.config)}, arrays | {"masked_positions": positions}, deterministic=True
    )
    everywhere = ours("bert_masked_lm")["logits"]
    # the same sums, in products of another shape
    np.testing.assert_allclose(
        gathered.heads["lm"].logits(), np.take_along_axis(everywhere, positions[:, :, None], 1), atol=1e-4
    )
