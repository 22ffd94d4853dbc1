"""Weights of transformers' models give the same logits and loss here."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make

from pretrainax import models
from pretrainax.layers.compute import Compute
from pretrainax.losses import loss_sums
from pretrainax.zoo.convert import from_huggingface


def ours(name, arrays):
    """Logits and loss of our model with the weights and the batch of `arrays`."""
    family = make.FAMILIES[name]
    state = {key.removeprefix("state/"): value for key, value in arrays.items() if key.startswith("state/")}
    batch = {key.removeprefix("batch/"): value for key, value in arrays.items() if key.startswith("batch/")}
    params = from_huggingface(family.huggingface_names(family.config), state, family.config)
    model = models.build(family.config, Compute())
    outputs = jax.jit(lambda p, b: model.apply({"params": p}, b, deterministic=True))(params, batch)
    total, count = loss_sums(outputs, jnp.asarray(batch["targets"]), jnp.asarray(batch["loss_weights"]))["loss"]
    return outputs.logits(), total / count


def check_same(name, arrays):
    logits, loss = ours(name, arrays)
    real = arrays["batch/segment_ids"] > 0  # what a padding token predicts means nothing
    # float32 sums in another order: at most 1e-5 was seen, at logits of up to 4
    np.testing.assert_allclose(logits[real], arrays["logits"][real], rtol=0, atol=2e-4)
    np.testing.assert_allclose(loss, arrays["loss"], rtol=1e-5)  # the same, averaged over tokens


@pytest.mark.parametrize("name", make.FAMILIES)
def test_same_as_golden_file(name):
    check_same(name, make.golden(name))


@pytest.mark.parametrize("name", make.FAMILIES)
def test_same_as_transformers(name):
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed (extra parity)")
    check_same(name, make.reference(name))


def test_gathered_head_gives_the_same_logits_at_its_positions():
    arrays = make.golden("bert")
    everywhere, _ = ours("bert", arrays)
    positions = np.array([[0, 3, 11], [8, 2, 1], [4, 0, 0]], np.int32)
    gathered = {key: value[:, :3] for key, value in arrays.items() if key in ("batch/targets", "batch/loss_weights")}
    logits, _ = ours("bert", arrays | gathered | {"batch/masked_positions": positions})
    # the same sums, in products of another shape
    np.testing.assert_allclose(logits, np.take_along_axis(everywhere, positions[:, :, None], 1), atol=1e-4)
