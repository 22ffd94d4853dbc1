"""Steps with what was kept of the tokens before give the logits of the whole text, for every model that writes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import DisentangledPositions, MeshConfig, ModelConfig, RotaryPositions, UserError
from pretrainax.inference.cached import CachedModel
from pretrainax.inference.loaded import LoadedModel
from pretrainax.layers.compute import Compute
from pretrainax.sharding.mesh import make_mesh
from tests.golden import CASES
from tests.golden.case import weights

PROMPTS = np.array([6, 3, 1, 5])  # tokens of each row, shorter and longer than the windows, which are 4
PADDED, STEPS = 7, 9  # a window is passed twice
ENCODED = np.array([5, 8, 2, 7])
WRITERS = {name: case.config for name, case in CASES.items() if case.config.family != "encoder"}
TURNS = np.arange(STEPS)


def loaded(config, devices=1, **mesh):
    mesh = make_mesh(MeshConfig(**mesh), jax.devices()[:devices])
    return LoadedModel(None, models.build(config, Compute()), weights(config), None, mesh, "a test's model")


def rows(config, lengths, padded):
    """Whole rows of a batch, right-padded."""
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, (len(lengths), padded)).astype(np.int32)
    real = np.arange(padded)[None] < lengths[:, None]
    positions = np.broadcast_to(np.arange(padded, dtype=np.int32), real.shape)
    return {"tokens": np.where(real, tokens, 0), "segment_ids": real.astype(np.int32), "positions": positions}


def texts(config, prefix=False):
    batch = rows(config, PROMPTS + STEPS, PADDED + STEPS)
    if config.family == "encoder_decoder":
        batch |= {f"encoder_{name}": x for name, x in rows(config, ENCODED, 9).items()}
    if prefix:
        batch["prefix_mask"] = (np.arange(PADDED + STEPS)[None] < PROMPTS[:, None]).astype(np.int32)
    return batch


def prompts(batch):
    """The first tokens of each text, right-padded."""
    cut = {name: x if name.startswith("encoder_") else x[:, :PADDED] for name, x in batch.items()}
    real = np.arange(PADDED)[None] < PROMPTS[:, None]
    return cut | {name: np.where(real, cut[name], 0) for name in ("tokens", "segment_ids")}


def all_logits(config, prefix):
    """The logits after the last token of the prompt and of each that follows, in one pass: [B, STEPS + 1, V]."""
    with jax.default_matmul_precision("highest"):
        logits = loaded(config)(texts(config, prefix)).heads["lm"].logits()
    return np.take_along_axis(np.asarray(logits), (PROMPTS[:, None] - 1 + np.arange(STEPS + 1))[:, :, None], axis=1)


def stepped(model, prefix=False):
    """The same, token by token; the rows change places before each step: in step n, row r is the text (r + n) mod B."""
    batch = texts(model.model.config, prefix)
    following = np.take_along_axis(batch["tokens"], PROMPTS[:, None] + TURNS, axis=1)  # [B, STEPS]
    turned = [np.roll(following[:, n], -n - 1) for n in TURNS]
    cached = CachedModel(model)

    @jax.jit
    def run(params, batch, tokens):
        def step(state, tokens):
            logits, state = cached.step(params, cached.take(state, jnp.array([1, 2, 3, 0])), tokens)
            return state, logits

        first, state = cached.start(params, batch, STEPS)
        return first, jax.lax.scan(step, state, tokens)[1]

    with jax.set_mesh(model.mesh), jax.default_matmul_precision("highest"):
        first, others = run(cached.params, prompts(batch), np.stack(turned))
    assert first.dtype == others.dtype == jnp.float32
    others = [np.roll(logits, n + 1, axis=0) for n, logits in enumerate(np.asarray(others))]
    return np.stack([np.asarray(first), *others], axis=1)


@pytest.mark.parametrize("name", WRITERS)
def test_each_step_gives_the_logits_of_the_whole_text(name):
    np.testing.assert_allclose(stepped(loaded(WRITERS[name])), all_logits(WRITERS[name], False), atol=1e-4)
