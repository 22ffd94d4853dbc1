"""Adapters of every supported kind, task and family: peft and PretrainAX compute the same outputs, both ways."""

import dataclasses
import importlib.util
import json
from unittest import mock

import numpy as np
import pytest

import pretrainax
from pretrainax import config as config_lib
from pretrainax.config import Embed
from pretrainax.interop import adapters, directories
from pretrainax.interop.adapters import lora as lora_lib
from pretrainax.interop.origin import find_origin
from pretrainax.zoo.family import without_heads
from tests.golden import CASES
from tests.golden.case import batch
from tests.support.huggingface_weights import write_directory

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers", "peft"))),
    reason="torch, transformers or peft is not installed (extra parity)",
)
# float32 sums of up to 48 products in another order, in two layers; the largest observed difference is 2e-5.
ATOL = 1e-4
AUTO = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
    None: "AutoModelForMaskedLM",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Returns a function that writes the directory of a case's model once, and returns the directory."""
    written = {}

    def directory_of(name):
        if name not in written:
            written[name] = path = tmp_path_factory.mktemp("base") / name
            write_directory(path, name)
            described = json.loads((path / "config.json").read_text())
            for key in ("pad_token_id", "eos_token_id", "bos_token_id"):
                described.setdefault(key, None)
            described["pad_token_id"] = CASES[name].pad_id  # classifiers of decoders find the last token of a row by it
            (path / "config.json").write_text(json.dumps(described))
        return str(written[name])

    return directory_of


def export(tmp_path):
    """Exports tmp_path/run to tmp_path/out, and returns the summary."""
    origin = find_origin(str(tmp_path / "run"))
    return adapters.export_adapter(str(tmp_path / "run"), str(tmp_path / "out"), origin.steps[0])


def base_model(path, task, labels=3):
    """Returns the model of transformers for a task."""
    import torch
    import transformers

    torch.manual_seed(1)
    sizes = {"num_labels": labels} if task in ("SEQ_CLS", "TOKEN_CLS") else {}
    options = {"dtype": "float32", "attn_implementation": "eager"}
    return getattr(transformers, AUTO[task]).from_pretrained(path, **options, **sizes).eval()


def noisy(model):
    """Moves each trained parameter of a peft model away from its initial value."""
    import torch

    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def theirs(model, name):
    """Returns the outputs of a torch model at real tokens: logits, or start and end logits."""
    import torch

    arrays, case = batch(CASES[name]), CASES[name]
    is_encoder_decoder = case.config.family == "encoder_decoder"
    prefix = "encoder_" if is_encoder_decoder and "encoder_tokens" in arrays else ""
    mask = torch.from_numpy(arrays[f"{prefix}segment_ids"] > 0).long()
    inputs = {"input_ids": torch.from_numpy(arrays[f"{prefix}tokens"]).long(), "attention_mask": mask}
    if "token_types" in arrays:
        inputs["token_type_ids"] = torch.from_numpy(arrays["token_types"]).long()
    if prefix:
        inputs["decoder_input_ids"] = torch.from_numpy(arrays["tokens"]).long()
        inputs["decoder_attention_mask"] = torch.from_numpy(arrays["segment_ids"] > 0).long()
    if getattr(model, "peft_type", None) in ("LORA", "IA3"):
        model = model.get_base_model()  # peft's class for questions drops the token types
    with torch.no_grad():
        out = model(**inputs)
    if "start_logits" in out:
        return np.stack([out.start_logits.numpy(), out.end_logits.numpy()], -1)
    return (out.logits if "logits" in out else out.last_hidden_state).numpy()


def ours(workdir, name):
    """Returns the same outputs of a run."""
    outputs = pretrainax.load(str(workdir))(batch(CASES[name]))
    task = {"classify", "tag", "extract"} & outputs.heads.keys()
    return np.asarray(outputs.heads[task.pop()].logits if task else outputs.logits)


def assert_close(a, b, name):
    real = batch(CASES[name])["segment_ids"] > 0
    if a.ndim == 3:
        a, b = (x[:, -real.shape[1] :][real] for x in (a, b))  # without virtual tokens
    a, b = (np.where(np.minimum(a, b) < -1e6, 0.0, x) for x in (a, b))  # tokens outside the passage
    np.testing.assert_allclose(a, b, atol=ATOL * max(1.0, np.abs(b).max()), rtol=0)


def lora(targets, **fields):
    import peft

    return lambda task: peft.LoraConfig(task_type=task, target_modules=targets, **{"r": 3, "lora_alpha": 5} | fields)


def ia3(targets, feedforward):
    import peft

    return lambda task: peft.IA3Config(task_type=task, target_modules=targets, feedforward_modules=feedforward)


def virtual(kind, **fields):
    import peft

    return lambda task: getattr(peft, kind)(task_type=task, num_virtual_tokens=3, **fields)


BERT, LLAMA, GPT2, T5 = ["query", "value"], ["q_proj", "v_proj"], ["c_attn"], ["q", "v"]
LORA = {
    "bert classes": ("bert", "SEQ_CLS", lora(BERT)),
    "bert tags": ("bert", "TOKEN_CLS", lora(BERT)),
    "bert spans": ("bert", "QUESTION_ANS", lora(BERT)),
    "roberta classes": ("roberta", "SEQ_CLS", lora(BERT)),
    "roberta tags, dora": ("roberta", "TOKEN_CLS", lora(BERT, use_dora=True)),
    "electra classes": ("electra_small", "SEQ_CLS", lora(BERT)),
    "distilbert classes": ("distilbert", "SEQ_CLS", lora(["q_lin", "v_lin"])),
    "modernbert classes": ("modernbert", "SEQ_CLS", lora(["Wqkv"])),
    "llama classes": ("llama3", "SEQ_CLS", lora(LLAMA)),
    "qwen2 classes": ("qwen2", "SEQ_CLS", lora(LLAMA)),
    "gpt2 classes": ("gpt2", "SEQ_CLS", lora(GPT2)),
    "gpt2 tags": ("gpt2", "TOKEN_CLS", lora(GPT2)),
    "llama text": ("llama3", "CAUSAL_LM", lora([*LLAMA, "down_proj"])),
    "qwen3 text": ("qwen3", "CAUSAL_LM", lora(LLAMA, use_rslora=True)),
    "gpt2 text": ("gpt2", "CAUSAL_LM", lora([*GPT2, "c_proj"])),
    "t5 text": ("t5_1_1", "SEQ_2_SEQ_LM", lora(T5)),
    "bart text": ("bart", "SEQ_2_SEQ_LM", lora(LLAMA)),
    "bert masks": ("bert_masked_lm", None, lora(BERT)),
    "some layers": ("llama3", "CAUSAL_LM", lora(LLAMA, layers_to_transform=[1])),
    "some layers, pattern": ("gpt2", "CAUSAL_LM", lora(GPT2, layers_to_transform=1, layers_pattern="h")),
    "some layers, dora": ("llama3", "CAUSAL_LM", lora(LLAMA, layers_to_transform=[0], use_dora=True)),
    "some layers of classes": ("bert", "SEQ_CLS", lora(BERT, layers_to_transform=[0])),
    "output layer": ("llama3", "CAUSAL_LM", lora(LLAMA, modules_to_save=["lm_head", "embed_tokens"])),
    "tied embeddings": (
        "llama3_2",
        "CAUSAL_LM",
        lora(LLAMA, modules_to_save=["lm_head", "embed_tokens"], ensure_weight_tying=True),
    ),
    "tied embeddings of fused": (
        "gpt2",
        "CAUSAL_LM",
        lora(GPT2, modules_to_save=["lm_head", "wte"], ensure_weight_tying=True),
    ),
    "norms": ("llama3", "CAUSAL_LM", lora(LLAMA, modules_to_save=["input_layernorm"])),
    "some norms": ("bert", "SEQ_CLS", lora(BERT, modules_to_save=["layer.1.output.LayerNorm"])),
    "biases": ("bert", "SEQ_CLS", lora(BERT, bias="all")),
    "biases of updated layers": ("bert", "TOKEN_CLS", lora(BERT, bias="lora_only")),
    "masked-token head": ("bert_masked_lm", None, lora(BERT, modules_to_save=["transform"])),
    "excluded": ("llama3", "CAUSAL_LM", lora("all-linear", exclude_modules=["k_proj", "model.layers.1.mlp.up_proj"])),
    "gaussian": ("llama3", "CAUSAL_LM", lora(LLAMA, init_lora_weights="gaussian")),
    "pissa": ("llama3", "CAUSAL_LM", lora([*LLAMA, "down_proj"], init_lora_weights="pissa")),
    "pissa of fused": ("gpt2", "CAUSAL_LM", lora([*GPT2, "c_proj"], init_lora_weights="pissa")),
    "pissa, rslora": ("phi3", "CAUSAL_LM", lora(["qkv_proj"], init_lora_weights="pissa", use_rslora=True)),
    "pissa of classes": ("bert", "SEQ_CLS", lora(BERT, init_lora_weights="pissa")),
    "pissa, dora": ("llama3", "CAUSAL_LM", lora(LLAMA, init_lora_weights="pissa", use_dora=True)),
    "pissa, ranks": (
        "t5_1_1",
        "SEQ_2_SEQ_LM",
        lora(T5, init_lora_weights="pissa", rank_pattern={"decoder.block.1.layer.0.SelfAttention.q": 2}),
    ),
    "pissa of twice the size": ("llama3", "CAUSAL_LM", lora(["k_proj"], init_lora_weights="pissa", r=8)),
    "rank above the size": ("llama3", "CAUSAL_LM", lora(["k_proj", "o_proj"], r=20)),
    "olora": ("llama3", "CAUSAL_LM", lora([*LLAMA, "down_proj"], init_lora_weights="olora")),
    "olora of classes": ("roberta", "SEQ_CLS", lora(BERT, init_lora_weights="olora")),
    "olora, rslora": ("qwen2", "CAUSAL_LM", lora(LLAMA, init_lora_weights="olora", use_rslora=True)),
    "olora of square Conv1D": ("gpt2", "CAUSAL_LM", lora(["attn.c_proj"], init_lora_weights="olora")),
}
OTHERS = {
    "ia3 of bert": ("bert", "SEQ_CLS", ia3(["key", "value", "output.dense"], ["output.dense"])),
    "ia3 of gpt2": ("gpt2", "CAUSAL_LM", ia3(["c_attn", "mlp.c_proj"], ["mlp.c_proj"])),
    "ia3 of llama": ("llama3", "CAUSAL_LM", ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"])),
    "ia3 of llama classes": ("llama3", "SEQ_CLS", ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"])),
    "ia3 of t5": ("t5_1_1", "SEQ_2_SEQ_LM", ia3(["k", "v", "wo"], ["wo"])),
    "ia3 of values": ("llama3", "CAUSAL_LM", ia3(["v_proj"], [])),
    "prefix of gpt2": ("gpt2", "CAUSAL_LM", virtual("PrefixTuningConfig")),
    "prefix of llama": ("llama3", "CAUSAL_LM", virtual("PrefixTuningConfig")),
    "prefix of llama 3.1": ("llama3_1", "CAUSAL_LM", virtual("PrefixTuningConfig")),
    "prefix of qwen2": ("qwen2", "CAUSAL_LM", virtual("PrefixTuningConfig")),
    "prefix of phi2": ("phi2", "CAUSAL_LM", virtual("PrefixTuningConfig")),
    "prefix of smollm3": ("smollm3", "CAUSAL_LM", virtual("PrefixTuningConfig")),
    "prefix, projected": ("llama3", "CAUSAL_LM", virtual("PrefixTuningConfig", prefix_projection=True)),
    "prompt of gpt2": ("gpt2", "CAUSAL_LM", virtual("PromptTuningConfig")),
    "prompt of llama": ("llama3", "CAUSAL_LM", virtual("PromptTuningConfig")),
    "prompt of gemma": ("gemma1", "CAUSAL_LM", virtual("PromptTuningConfig")),
    "prompt of t5": ("t5_1_1", "SEQ_2_SEQ_LM", virtual("PromptTuningConfig")),
    "prompt of bart": ("bart", "SEQ_2_SEQ_LM", virtual("PromptTuningConfig")),
    "prompt of bart, scaled": ("bart_scaled", "SEQ_2_SEQ_LM", virtual("PromptTuningConfig")),
    "prompt of t5gemma": (
        "t5gemma",
        "SEQ_2_SEQ_LM",
        virtual("PromptTuningConfig", num_layers=3, num_attention_heads=4, token_dim=16),
    ),
}
ALL = LORA | OTHERS


@pytest.mark.first(7)
@pytest.mark.parametrize("key", ALL)
def test_peft_and_pretrainax_compute_the_same_outputs_in_both_directions(key, directory, tmp_path):
    import peft

    name, task, config_of = ALL[key]
    base = directory(name)
    model = noisy(peft.get_peft_model(base_model(base, task), config_of(task)))
    model.save_pretrained(str(tmp_path / "adapter"))
    loaded = peft.PeftModel.from_pretrained(base_model(base, task), str(tmp_path / "adapter")).eval()
    wanted = theirs(loaded, name)

    adapters.import_adapter(str(tmp_path / "adapter"), base, str(tmp_path / "run"))
    assert_close(ours(tmp_path / "run", name), wanted, name)

    export(tmp_path)
    again = peft.PeftModel.from_pretrained(base_model(base, task), str(tmp_path / "out")).eval()
    assert_close(theirs(again, name), wanted, name)
    assert peft.PeftConfig.from_pretrained(str(tmp_path / "out")).task_type == task


# --- other starting points -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "llama3", "gpt2"])
def test_features_go_to_the_class_without_heads(name, directory, tmp_path):
    import peft

    base, targets = directory(name), {"bert": BERT, "llama3": LLAMA, "gpt2": GPT2}[name]
    config = peft.LoraConfig(task_type="FEATURE_EXTRACTION", r=3, target_modules=targets)
    model = noisy(peft.get_peft_model(base_model(base, "FEATURE_EXTRACTION"), config))
    model.save_pretrained(str(tmp_path / "adapter"))
    adapters.import_adapter(str(tmp_path / "adapter"), base, str(tmp_path / "run"))
    experiment = config_lib.load(tmp_path / "run" / "config.json")
    experiment.model = dataclasses.replace(without_heads(experiment.model), head=Embed(1))
    experiment.checkpoint.fresh_heads = True
    (tmp_path / "run" / "config.json").write_text(config_lib.dump(experiment))
    export(tmp_path)
    again = peft.AutoPeftModelForFeatureExtraction.from_pretrained(str(tmp_path / "out"), attn_implementation="eager")
    assert_close(theirs(again.eval(), name), theirs(model, name), name)


@pytest.mark.parametrize("key", ["bert tags", "llama classes", "t5 text", "bert masks", "ia3 of llama"])
def test_the_auto_class_of_the_task_loads_an_export(key, directory, tmp_path):
    import peft

    name, task, config_of = ALL[key]
    base = directory(name)
    noisy(peft.get_peft_model(base_model(base, task), config_of(task))).save_pretrained(str(tmp_path / "adapter"))
    adapters.import_adapter(str(tmp_path / "adapter"), None, str(tmp_path / "run"))
    line = export(tmp_path)
    auto = getattr(peft, AUTO[task].replace("AutoModel", "AutoPeftModel") if task else "AutoPeftModel")
    sizes = {"num_labels": 3} if task in ("SEQ_CLS", "TOKEN_CLS") else {}
    again = auto.from_pretrained(str(tmp_path / "out"), attn_implementation="eager", **sizes).eval()
    wanted = theirs(peft.PeftModel.from_pretrained(base_model(base, task), str(tmp_path / "adapter")).eval(), name)
    assert_close(theirs(again, name), wanted, name)
    assert ("load the base model with num_labels=3" in line) == bool(sizes)


@pytest.mark.parametrize("key", ["pissa", "llama classes", "some layers, dora"])
def test_the_base_model_may_be_a_run(key, directory, tmp_path):
    import peft

    name, task, config_of = ALL[key]
    base = directory(name)
    model = noisy(peft.get_peft_model(base_model(base, task), config_of(task)))
    model.save_pretrained(str(tmp_path / "adapter"))
    directories.import_directory(base, str(tmp_path / "base"))
    adapters.import_adapter(str(tmp_path / "adapter"), str(tmp_path / "base"), str(tmp_path / "run"))
    assert_close(ours(tmp_path / "run", name), theirs(model, name), name)


def test_an_adapter_that_was_converted_on_saving_is_an_ordinary_one(directory, tmp_path):
    import peft

    config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=LLAMA, init_lora_weights="pissa_niter_4")
    model = peft.get_peft_model(base_model(directory("llama3"), "CAUSAL_LM"), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(str(tmp_path / "first"))
    model.peft_config["default"].init_lora_weights = "pissa_niter_4"
    wanted = theirs(noisy(model), "llama3")
    model.save_pretrained(str(tmp_path / "adapter"), path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    adapters.import_adapter(str(tmp_path / "adapter"), directory("llama3"), str(tmp_path / "run"))
    assert_close(ours(tmp_path / "run", "llama3"), wanted, "llama3")


# (outputs, inputs, rank) of a weight: wide, tall, square, of rank 1, of a rank up to and above its smaller side.
SHAPES = [(7, 13, 3), (13, 7, 3), (9, 9, 4), (5, 11, 1), (11, 5, 1), (5, 8, 5), (8, 5, 5), (3, 17, 8), (17, 3, 8)]


@pytest.mark.parametrize("initialization", ["pissa", "olora"])
@pytest.mark.parametrize("rslora", [False, True])
def test_initial_updates_of_odd_sizes_are_those_of_peft(initialization, rslora):
    """Compares the weight in peft, after training, with the weight in the base model plus the imported update."""
    import peft
    import torch

    for outputs, inputs, rank in SHAPES:
        torch.manual_seed(outputs)
        base = torch.nn.Sequential(torch.nn.Linear(inputs, outputs))
        weight = base[0].weight.detach().numpy().copy()
        options = dict(r=rank, lora_alpha=5, target_modules=["0"], init_lora_weights=initialization, use_rslora=rslora)
        layer = noisy(peft.get_peft_model(base, peft.LoraConfig(**options))).base_model.model[0]
        scale = 5 / (rank**0.5 if rslora else rank)
        update = lora_lib._Update(
            *(x["default"].weight.detach().numpy() for x in (layer.lora_A, layer.lora_B)), scale, None
        )
        converted = lora_lib._relative_to_base(update, weight, "a linear layer", initialization, mock.Mock())
        wanted = (layer.base_layer.weight + layer.get_delta_weight("default")).detach().numpy()
        # A float32 decomposition has an error of a few units in the last place of its largest value, about 1e-6.
        np.testing.assert_allclose(weight + scale * converted.b @ converted.a, wanted, atol=1e-5, rtol=0)
