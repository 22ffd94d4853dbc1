"""Models that differ from a published model in one field: transformers computes the export, or a line rejects it."""

import dataclasses
import random

import pytest

from pretrainax import models
from pretrainax.config import LongContextScaling, RotaryPositions, UserError
from pretrainax.inference.verification.settings import their_config
from pretrainax.interop import directories
from pretrainax.interop.architectures import describe_model, described_model
from pretrainax.zoo.convert import rows_of, tensor_locations, their_shape
from pretrainax.zoo.family import differences
from tests.golden import CASES
from tests.golden.case import VOCABULARY, needs_transformers, weights
from tests.support.exports import assert_transformers_computes_the_same, write_workdir
from tests.support.varied import variations

pytestmark = needs_transformers
# Classes of the authors' code, which transformers does not have.
AUTHORS = ("MaskedLanguageModel", "ReplacedTokenDetectionModel")
FAST = ("bert", "modernbert", "llama3", "gemma3", "gpt_oss", "deepseek_v3", "t5_1_1")
EXPORTED = [name for name, case in CASES.items() if case.family.huggingface is not None]


def described(model):
    """Returns the family and config.json of the export, and the exported model; None if one line rejects it."""
    try:
        return describe_model(model, None)
    except UserError as e:
        assert "\n" not in str(e) and ("config.model" in str(e)), e
        return None


def assert_loadable(family, config_json, model):
    """Asserts that the class of transformers exists and has the tensors of the export.

    Its config must also describe the same model.
    """
    import torch
    import transformers

    (name,) = config_json["architectures"]
    if name in AUTHORS:
        return
    file = dict(config_json)
    theirs = transformers.AutoConfig.for_model(file.pop("model_type"), **file)
    with torch.device("meta"):
        tensors = getattr(transformers, name)(theirs).state_dict()
    expected = models.abstract_params(model)
    for row, shape in rows_of(family.names(model), expected).values():
        for tensor, index in tensor_locations(row, shape):  # the class stores all experts in one tensor
            found = tuple(tensors[tensor].shape) if tensor in tensors else None
            assert found in (None, their_shape(row, shape[len(index) :])), tensor
    again = described_model(their_config(config_json))[1]
    assert differences(again, model) == []


@pytest.mark.parametrize(
    "name, count",
    [*((name, 8) for name in FAST), *(pytest.param(name, 999, marks=pytest.mark.slow) for name in EXPORTED)],
)
def test_an_export_is_loadable_or_refused(name, count):
    varied, outcomes = list(variations(CASES[name].config)), []
    for change, model in random.Random(name).sample(varied, min(count, len(varied))):
        if (export := described(model)) is not None:
            try:
                assert_loadable(*export)
            except Exception as e:
                raise AssertionError(f"{name}, {change}: {export[1]['architectures']}") from e
        outcomes.append(export is not None)
    assert len(varied) > 20 and any(outcomes)


def _is_computable(change, model):
    """Returns True if the batch of the parity tests fits a model, and transformers has a class with logits."""
    fits = model.vocab_size >= VOCABULARY and (model.position.max_length or 99) >= 16 and "offset" not in change
    has_logits = model.head is None and not model.replaced_token_head
    return fits and has_logits and described(model)[1]["architectures"][0] not in AUTHORS


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_computes_the_same_of_varied_models(name, tmp_path):
    found = [(change, model) for change, model in variations(CASES[name].config) if described(model) is not None]
    random.Random(name).shuffle(found)
    for i, (change, model) in enumerate([x for x in found if _is_computable(*x)][:3]):
        params, folder = weights(model), tmp_path / str(i)
        write_workdir(folder, model, params, CASES[name].pad_id)
        directories.export_workdir(str(folder), str(folder / "out"))
        try:
            assert_transformers_computes_the_same(folder / "out", model, params, CASES[name].pad_id)
        except AssertionError as e:
            raise AssertionError(f"{name}, {change}") from e


# --- exports that transformers could not load, or loaded as other models ---------------------------------------------


def varied(name, **changes):
    """Returns a tiny model of tests/golden with other fields; the prefix experts_ marks fields of its experts."""
    config = CASES[name].config
    of_experts = {key.removeprefix("experts_"): x for key, x in changes.items() if key.startswith("experts_")}
    changes = {key: x for key, x in changes.items() if not key.startswith("experts_")}
    if of_experts:
        changes["experts"] = dataclasses.replace(config.experts, **of_experts)
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("gpt_oss", {"position": RotaryPositions(20, theta=40.0)}),  # null used to mean YaRN
        ("deepseek_v3", {"experts_shared_experts": None}),
        ("deepseek_v3", {"experts_d_ff": None}),
        pytest.param("deepseek_v2", {"experts_shared_experts": None, "experts_d_ff": None}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"experts_d_ff": None}, marks=pytest.mark.slow),
        pytest.param("modernbert", {"layer_pattern": ("global",), "window": None}, marks=pytest.mark.slow),
        pytest.param("olmo2", {"head_dim": 6}, marks=pytest.mark.slow),
    ],
)
def test_transformers_computes_the_same(name, changes, tmp_path):
    model = varied(name, **changes)
    params = weights(model)
    write_workdir(tmp_path / "run", model, params, CASES[name].pad_id)
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    assert_transformers_computes_the_same(tmp_path / "out", model, params, CASES[name].pad_id)
    assert differences(directories.DirectoryWeights(str(tmp_path / "out")).config, described(model)[2]) == []


LLAMA_3 = LongContextScaling(4.0, original_length=10)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("gpt_oss", {"gate_limit": None}, "GptOssForCausalLM .* cannot express config.model.gate_limit=None"),
        ("llama3", {"position": RotaryPositions(20, scaling=LLAMA_3, fraction=0.5)}, "config.model.position="),
        ("mixtral", {"experts_scale": 2.0}, "transformers has no class .*: DeepseekForCausalLM is only in the code"),
        ("mixtral", {"experts_shared_experts": 1}, "DeepseekForCausalLM is only in the code released with its weights"),
    ],
)
def test_a_model_that_transformers_has_not_is_refused_in_one_line(name, changes, message):
    with pytest.raises(UserError, match=message) as found:
        describe_model(varied(name, **changes), None)
    assert "\n" not in str(found.value)


def test_a_llama_of_other_widths_of_heads_is_exported_as_another_class():
    _, config_json, _ = described(varied("llama2", d_model=18, num_kv_heads=4, head_dim=4))
    # LlamaConfig requires that d_model is a multiple of the number of heads.
    assert config_json["architectures"] == ["MistralForCausalLM"]
