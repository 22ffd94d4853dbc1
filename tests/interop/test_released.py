"""Tests released files of each family: config.json with all its keys, and the names of the tensors."""

import dataclasses

import jax
import numpy as np
import pytest

from pretrainax import models, zoo
from pretrainax.interop.architectures import described_model
from pretrainax.interop.weights import DirectoryWeights
from pretrainax.layers.compute import Compute
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.zoo.family import differences
from tests.golden.case import batch, needs_transformers, weights
from tests.support.huggingface_weights import assert_same
from tests.support.released import RELEASED, config_of, names_of, write_release
from tests.support.tiers import few


def read(directory):
    """Returns all parameters of a directory."""
    source = DirectoryWeights(str(directory))
    source.verify()
    leaves = [
        source.read(path, (slice(None),) * x.ndim)
        for path, x in zip(parameter_names(source.abstract), jax.tree.leaves(source.abstract), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(source.abstract), leaves)


def test_every_family_that_transformers_has_is_here():
    types = {family.huggingface.model_type for family in zoo.FAMILIES if family.huggingface is not None}
    assert types == {config_of(name)["model_type"] for name in RELEASED}


def test_the_names_of_a_release_are_spelled_out():
    names = names_of(RELEASED["gpt2"], 12)
    assert len(names) == len(set(names)) == 160  # the number of tensors in the file
    assert {"wte.weight", "h.0.attn.bias", "h.11.attn.c_attn.weight", "ln_f.bias"} <= set(names)


@pytest.mark.first(14)
@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_is_that_of_the_preset(name):
    release = RELEASED[name]
    _, described = described_model(config_of(name))
    assert differences(described, dataclasses.replace(zoo.preset(release.preset), **release.changes)) == []


@pytest.mark.first(14)
@pytest.mark.parametrize("name", RELEASED)
def test_released_names_are_read(name, tmp_path):
    case = write_release(tmp_path / "source", name)
    assert_same(read(tmp_path / "source"), weights(case.config))


@pytest.mark.first(1)
@needs_transformers
@pytest.mark.parametrize(
    "name", few(name for name in RELEASED if name not in ("deberta-v3", "deepseek-moe"))
)  # transformers has no class for them
def test_transformers_computes_the_same_of_a_released_directory(name, tmp_path):
    import torch
    import transformers

    from tests.golden import make

    case = write_release(tmp_path / "source", name)
    wanted = getattr(transformers, case.family.huggingface.class_of(case.config))
    theirs, info = wanted.from_pretrained(
        tmp_path / "source", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    arrays = batch(case)
    with torch.no_grad():
        reference = make.forward(case, theirs.eval(), arrays)
    model, params = models.build(case.config, Compute()), read(tmp_path / "source")
    with jax.default_matmul_precision("highest"):
        heads = model.apply({"params": params}, arrays, deterministic=True).heads
    logits = heads["lm"].logits() if "lm" in heads else heads["replaced"].logits
    real = arrays["segment_ids"] > 0
    key = "logits" if "lm" in heads else "replaced_logits"
    np.testing.assert_allclose(logits[real], reference[key].numpy()[real], atol=2e-4, rtol=0)  # as in all parity tests
