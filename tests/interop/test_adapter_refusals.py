"""Imports reject peft adapters that PretrainAX cannot represent or read; one line names the field or the tensor."""

import collections
import dataclasses
import itertools
import json
import pathlib
import shutil
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy

from pretrainax.config import UserError
from pretrainax.interop import adapters
from pretrainax.interop.adapters import base_model as base_model_lib
from pretrainax.interop.adapters import directories as adapter_directories
from pretrainax.interop.adapters import fields, virtual_tokens
from pretrainax.interop.adapters import lora as lora_lib
from pretrainax.interop.adapters.modules import TheirModel
from pretrainax.interop.origin import find_origin
from pretrainax.tokenization.huggingface import read_tokenizer
from tests.golden import CASES
from tests.interop import test_adapters_of_peft
from tests.interop.test_adapters_of_peft import ALL, BERT, LLAMA, base_model, noisy

pytestmark = test_adapters_of_peft.pytestmark
directory = test_adapters_of_peft.directory


@pytest.fixture(scope="module")
def saved(directory, tmp_path_factory):
    """Returns a function that writes an adapter of a case in `ALL` once, and returns its directory."""
    import peft

    written = {}

    def saved_of(key):
        if key not in written:
            name, task, config_of = ALL[key]
            written[key] = str(tmp_path_factory.mktemp("adapter"))
            noisy(peft.get_peft_model(base_model(directory(name), task), config_of(task))).save_pretrained(written[key])
        return written[key]

    return saved_of


def refused(saved, directory, tmp_path, key, fields, change=lambda tensors: tensors):
    """Imports a changed adapter, asserts that it raises UserError, and returns the message."""
    copy = tmp_path / "changed"
    shutil.copytree(saved(key), copy)
    described = json.loads((copy / adapters.CONFIG).read_text())
    (copy / adapters.CONFIG).write_text(json.dumps(described | fields))
    tensors = change(safetensors.numpy.load_file(copy / adapters.WEIGHTS))
    safetensors.numpy.save_file(tensors, copy / adapters.WEIGHTS)
    with pytest.raises(UserError) as caught:
        adapters.import_adapter(str(copy), directory(ALL[key][0]), str(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists() and "\n" not in str(caught.value)
    return str(caught.value)


FIELDS = {
    "pissa_niter": ({"init_lora_weights": "pissa_niter_4"}, "changes the base model at random: save the adapter again"),
    "corda": ({"init_lora_weights": "corda"}, "path_initial_model_for_weight_conversion"),
    "loftq": ({"init_lora_weights": "loftq"}, "path_initial_model_for_weight_conversion"),
    "lora_ga": ({"init_lora_weights": "lora_ga"}, "path_initial_model_for_weight_conversion"),
    "mica": ({"init_lora_weights": "mica"}, "merge_and_unload"),
    "1": ({"init_lora_weights": 1}, "init_lora_weights 1, which is not supported"),
    "bias": ({"bias": "some"}, "bias 'some', it must be 'none', 'all' or 'lora_only'"),
    "biases that are absent": ({"bias": "lora_only"}, "lacks bert.encoder.layer.0.attention.self.query.bias"),
    "module that is absent": (
        {"modules_to_save": ["classifier", "pooler"]},
        "lacks bert.pooler.dense.bias, bert.pooler",
    ),
    "module": ({"modules_to_save": "classifier"}, "must be a list"),
    "task": ({"task_type": "MULTIPLE_CHOICE"}, "task_type 'MULTIPLE_CHOICE', supported: 'SEQ_CLS'"),
    "other task": ({"task_type": "CAUSAL_LM"}, "but the base model is encoder"),
    "rank": ({"r": 4}, "has rank 3, but adapter_config.json has rank 4"),
    "rank of a module": ({"rank_pattern": {"query": 2}}, "has rank 3, but adapter_config.json has rank 2"),
    "no rank": ({"r": None}, "r None, it must be a number"),
    "alpha": ({"lora_alpha": 0}, "0 in lora_alpha or alpha_pattern, it must be above 0"),
    "alpha of a module": ({"alpha_pattern": {"query": "1"}}, "query '1', it must be a number"),
    "alphas": ({"alpha_pattern": [1]}, "must map patterns to numbers"),
    "pattern": ({"alpha_pattern": {"(": 2}}, "alpha_pattern which is not a regular expression"),
    "dropout": ({"lora_dropout": 1.0}, "lora_dropout 1.0, it must be in"),
    "dora": ({"use_dora": "false"}, "use_dora 'false', it must be true or false"),
    "no magnitudes": ({"use_dora": True}, "no lora_magnitude_vector of bert"),
    "other targets": ({"target_modules": ["query"]}, "self.value, which target_modules, exclude_modules or layers_to"),
    "other pattern": ({"target_modules": r".*\.0\..*query"}, "which target_modules, exclude_modules or layers_to"),
    "excluded": ({"exclude_modules": ["query"]}, "which target_modules, exclude_modules or layers_to"),
    "layers": ({"layers_to_transform": [0, 2]}, "layer.1.attention.self.value, which target_modules, exclude"),
    "layer pattern": ({"layers_to_transform": 0, "layers_pattern": ["h"]}, "which target_modules, exclude"),
    "layer names": ({"layers_to_transform": ["0"]}, "must be a list of layer numbers"),
    "unknown module": ({"modules_to_save": ["classifier", "lm_head"]}, "['lm_head'], but the model has no such"),
    "a new field": ({"use_qlora": {"bits": 2}}, "use_qlora {'bits': 2}, which is not supported: merge it in peft"),
    "a kind": ({"peft_type": "ADALORA"}, "must be 'LORA', 'IA3', 'PREFIX_TUNING' or 'PROMPT_TUNING'"),
}


@pytest.mark.parametrize("mistake", FIELDS)
def test_a_field_that_is_not_known_is_refused(mistake, saved, directory, tmp_path):
    fields, message = FIELDS[mistake]
    assert message in refused(saved, directory, tmp_path, "bert classes", fields)


def test_every_field_of_peft_is_read_or_refused():
    """Compares the lists with peft's config classes; the import rejects a new field of peft until it is listed."""
    import peft

    kinds = {"LORA": "LoraConfig", "IA3": "IA3Config", "PREFIX_TUNING": "PrefixTuningConfig"}
    kinds["PROMPT_TUNING"] = "PromptTuningConfig"
    refused_fields = 0
    for kind, name in kinds.items():
        theirs = {field.name for field in dataclasses.fields(getattr(peft, name))} - {"runtime_config"}
        known = {*fields._COMMON.split(), *fields._KNOWN[kind].split()}
        assert known <= theirs
        for field in theirs - known:
            with pytest.raises(UserError, match=f"adapter_config.json has {field} "):
                fields.check_fields("adapter", {"peft_type": kind, field: [1]})
            refused_fields += 1
    for kind in set(peft.PeftType) - kinds.keys():
        with pytest.raises(UserError, match=f"has peft_type '{kind.value}'"):
            fields.check_fields("adapter", {"peft_type": kind.value})
    assert refused_fields >= 12


VALUES = [None, 0, -1, 1.5, float("nan"), "x", "", [], {}, True, False, [1], {"a": 1}, {"query": 0}]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["bert classes", "pissa", "ia3 of llama", "prefix of llama", "prompt of t5"])
def test_no_value_of_a_field_raises_anything_else(key, saved, directory, tmp_path):
    """Every value of every field gives either a run or a UserError."""
    described = json.loads(pathlib.Path(saved(key), adapters.CONFIG).read_text())
    tensors = safetensors.numpy.load_file(pathlib.Path(saved(key), adapters.WEIGHTS))
    origin, shapes = find_origin(directory(ALL[key][0])), {name: x.shape for name, x in tensors.items()}
    tokenizer = read_tokenizer(origin.directory)
    outcomes = collections.Counter()
    with mock.patch.object(base_model_lib, "read_tokenizer", lambda directory: tokenizer):
        for field, value in itertools.product(described, VALUES):
            changed = described | {field: value}
            try:
                kind = fields.check_fields("adapter", changed)
                base = base_model_lib.read_base_model(origin, str(tmp_path), changed, shapes)
                _, trained = adapter_directories._from_peft(kind, changed, tensors, base, origin)
                assert all(np.isfinite(x).all() for x in trained.values())
                outcomes["read"] += 1
            except UserError:
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 20 and outcomes.total() == len(described) * len(VALUES)


def without(part):
    return lambda tensors: {name: x for name, x in tensors.items() if part not in name}


def changed(part, change):
    return lambda tensors: {name: change(x) if part in name else x for name, x in tensors.items()}


TENSORS = {
    "no A": ("bert classes", without("layer.1.attention.self.query.lora_A"), "no lora_A of bert.encoder.layer.1"),
    "no head": ("bert classes", without("classifier.bias"), "lacks classifier.bias, which modules_to_save"),
    "no updates": ("bert classes", without("lora_"), "it has none of linear layers"),
    "nan": ("bert classes", changed("classifier.bias", lambda x: x * np.nan), "holds numbers that are not finite"),
    "shape of A": ("bert classes", changed("query.lora_A", lambda x: x[:, 1:].copy()), "but the weight of the base"),
    "shape of the head": ("bert classes", changed("classifier.bias", lambda x: x[1:].copy()), "holds classifier.bias"),
    "a tensor": ("bert classes", lambda tensors: tensors | {"base_model.model.x": np.ones(2)}, "base_model.model.x"),
    "magnitude": ("roberta tags, dora", changed("magnitude", lambda x: x[1:].copy()), "lora_magnitude_vector of"),
    "rows": ("output layer", changed("embed_tokens", lambda x: np.concatenate([x, x])), "one with additional tokens"),
    "vector": ("ia3 of llama", changed("v_proj", lambda x: x[1:].copy()), "expected ia3_l"),
    "vector of queries": (
        "ia3 of llama",
        lambda tensors: {name.replace("k_proj", "q_proj"): np.ones((16, 1), np.float32) * 2 for name in tensors},
        "rescales the outputs of model.layers",
    ),
    "prefix": ("prefix of llama", changed("prompt", lambda x: x[:, 1:].copy()), "but this model needs"),
    "prompt": ("prompt of t5", changed("prompt", lambda x: x[:2].copy()), "but this model needs"),
}


@pytest.mark.parametrize("mistake", TENSORS)
def test_a_tensor_that_is_missing_or_different_is_refused(mistake, saved, directory, tmp_path):
    key, change, message = TENSORS[mistake]
    assert message in refused(saved, directory, tmp_path, key, {"target_modules": None}, change)


def test_embeddings_that_an_adapter_unties_are_refused(directory, tmp_path):
    import peft

    for i, module in enumerate(("lm_head", "embed_tokens")):
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=LLAMA, modules_to_save=[module])
        model = noisy(peft.get_peft_model(base_model(directory("llama3_2"), "CAUSAL_LM"), config))
        model.save_pretrained(str(tmp_path / f"adapter{i}"))
        with pytest.raises(UserError, match="the base model ties lm_head.weight to model.embed_tokens.weight"):
            adapters.import_adapter(str(tmp_path / f"adapter{i}"), directory("llama3_2"), str(tmp_path / "run"))


def test_a_head_whose_hidden_layer_is_nowhere_is_refused(directory, tmp_path):
    """BertForMaskedLM has no pooler, so transformers initializes a classifier's pooler, and peft does not save it."""
    import peft

    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=BERT)
    model = noisy(peft.get_peft_model(base_model(directory("bert_masked_lm"), "SEQ_CLS"), config))
    model.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(UserError, match="holds classifier/dense/(kernel|bias), so the results .* random numbers"):
        adapters.import_adapter(str(tmp_path / "adapter"), directory("bert_masked_lm"), str(tmp_path / "run"))


@pytest.mark.parametrize("initialization", ["pissa", "olora"])
def test_an_initial_update_that_rounding_determines_is_refused(initialization):
    update = lora_lib._Update(np.ones((2, 4), np.float32), np.ones((6, 2), np.float32), 1.0, None)
    their = TheirModel(CASES["llama3"].family.huggingface, CASES["llama3"].config)
    weight = np.eye(6, 4, dtype=np.float32) if initialization == "pissa" else np.ones((6, 4), np.float32)
    with pytest.raises(UserError, match="is not unique for this base model"):
        lora_lib._relative_to_base(update, weight, "model.layers.0.self_attn.q_proj", initialization, their)


def test_files_and_facts_that_an_import_does_not_read_are_reported(saved, directory, tmp_path):
    copy = tmp_path / "adapter"
    shutil.copytree(saved("bert classes"), copy)
    (copy / "tokenizer.json").write_text("{}")
    line = adapters.import_adapter(str(copy), directory("bert"), str(tmp_path / "run"))
    assert "not read: tokenizer.json (the tokenizer is that of the base model)" in line
    assert "peft does not record whether a document has several labels" in line


@pytest.mark.parametrize("name", ["qwen3", "gemma3_1b", "deepseek_v3", "phi3_5", "bert", "t5_1_1"])
def test_prefixes_that_peft_applies_differently_are_refused(name):
    with pytest.raises(UserError, match="prefixes for peft need a decoder .*, which excludes .*: use LoRA"):
        virtual_tokens._check_prefix(CASES[name].config)
