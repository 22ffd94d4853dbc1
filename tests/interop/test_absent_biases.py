"""Tests exports of models without biases to classes with biases, which then contain zeros."""

import dataclasses

import pytest

from pretrainax import models
from pretrainax.config import UserError
from pretrainax.interop import directories
from pretrainax.interop.architectures import describe_model
from pretrainax.zoo.convert import rows_of, tensor_locations
from pretrainax.zoo.family import biases
from tests.golden import CASES
from tests.golden.case import needs_transformers, weights
from tests.support.exports import assert_transformers_computes_the_same, write_workdir
from tests.support.huggingface_weights import PUBLISHED, stored
from tests.support.tiers import few

BIASED = [name for name in PUBLISHED if CASES[name].config.use_bias and not CASES[name].config.replaced_token_head]
ABSENT = [{"use_bias": False}, {"qkv_bias": False}, {"use_bias": False, "qkv_bias": True}]


def exported(name, changes, tmp_path):
    config = dataclasses.replace(CASES[name].config, **changes)
    params = weights(config)
    write_workdir(tmp_path / "run", config, params, CASES[name].pad_id)
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    return config, params


@pytest.mark.first(2)
@needs_transformers
@pytest.mark.parametrize("name", few(BIASED))
def test_transformers_computes_the_same_with_zeros(name, tmp_path):
    config, params = exported(name, {"use_bias": False}, tmp_path)
    assert_transformers_computes_the_same(tmp_path / "out", config, params, CASES[name].pad_id)


@pytest.mark.parametrize("changes", ABSENT, ids=str)
def test_each_bias_that_is_absent_is_a_tensor_of_zeros(changes, tmp_path):
    exported("gpt2", changes, tmp_path)
    tensors = stored(tmp_path / "out")
    zeros = {name for name, x in tensors.items() if not x.any()}
    whole = CASES["gpt2"].config
    assert len(tensors) == len(exported_names(whole)) and zeros <= {x for x in tensors if x.endswith(".bias")}
    queries = {x for x in zeros if x.endswith("attn.c_attn.bias")}
    others = zeros - queries
    assert (bool(others), bool(queries)) == ("use_bias" in changes, not changes.get("qkv_bias"))


def exported_names(config):
    family, _, model = describe_model(config, "")
    rows = rows_of(family.names(model), models.abstract_params(model)).values()
    return {name for row, shape in rows for name, _ in tensor_locations(row, shape)}


def test_a_class_without_biases_is_preferred():
    for name in ("llama3", "t5_1_1", "qwen3", "modernbert"):
        config = CASES[name].config
        family, _, model = describe_model(config, "")
        assert biases(model) == biases(config), name
        assert family.model_type == CASES[name].family.huggingface.model_type


def test_biases_that_theirs_has_not_are_refused():
    config = dataclasses.replace(CASES["llama3"].config, use_bias=True)
    with pytest.raises(UserError, match="cannot express config.model.use_bias=True"):
        describe_model(config, "")


def test_nothing_but_biases_is_filled_in():
    config = dataclasses.replace(CASES["gpt2"].config, use_bias=False, norm="rms")
    with pytest.raises(UserError, match="the nearest: .* cannot express config.model.norm='rms'$"):
        describe_model(config, "")


def test_a_class_with_tensors_that_a_model_has_not_is_passed_over():
    config = CASES["distilbert"].config
    # BERT's class could express this model only with zero token types in config.json.
    assert describe_model(config, "")[0].model_type == "distilbert"
    with pytest.raises(UserError, match="cannot express"):
        describe_model(dataclasses.replace(config, norm="rms"), "")
