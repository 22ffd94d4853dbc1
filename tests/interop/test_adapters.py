"""Adapters of peft and runs under tuning: the same logits there and back."""

import importlib.util
import json

import numpy as np
import pytest
import safetensors.numpy

import pretrainax
from pretrainax import config as config_lib
from pretrainax.adapt import LoRA, PrefixTuning
from pretrainax.config import UserError
from pretrainax.inference.origin import find_origin
from pretrainax.interop import adapters, directories
from tests.golden import CASES, make
from tests.golden.case import batch
from tests.support.huggingface_weights import write_directory

needs_peft = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers", "peft"))),
    reason="torch, transformers or peft is not installed (extra parity)",
)
# Attention of each family as transformers names it. GPT-2 has queries, keys and values in one matrix.
TARGETS = {
    "bert_masked_lm": ["query", "value", "attention.output.dense"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "t5_1_1": ["q", "v", "wo"],
    "llama3": ["k_proj", "o_proj", "up_proj"],
}


def theirs(case, model):
    """The logits of a torch model where tokens are real."""
    import torch

    with torch.no_grad():
        return make.forward(case, model, batch(case))["logits"].numpy()[batch(case)["segment_ids"] > 0]


def ours(workdir, case):
    loaded = pretrainax.load(str(workdir))
    return np.asarray(loaded(batch(case)).logits)[batch(case)["segment_ids"] > 0]


def noisy(model):
    """A peft model, each trained parameter of which is moved away from where it starts."""
    import torch

    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def export(workdir, to):
    origin = find_origin(str(workdir))
    return adapters.export_adapter(str(workdir), str(to), origin.steps[0])


@needs_peft
@pytest.mark.parametrize("dora", (False, True), ids=("lora", "dora"))
@pytest.mark.parametrize("name", TARGETS)
def test_low_rank_updates_of_peft_give_its_logits_there_and_back(name, dora, tmp_path):
    import peft

    case, base, run = CASES[name], str(write_directory(tmp_path / "base", name)), tmp_path / "run"
    patterns = {} if dora else {"rank_pattern": {TARGETS[name][0]: 2}, "use_rslora": True}
    asked = peft.LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS[name], use_dora=dora, **patterns)
    model = noisy(peft.get_peft_model(make.oracle(case), asked))
    model.save_pretrained(str(tmp_path / "adapter"))
    wanted = theirs(case, model)
    assert np.abs(wanted - theirs(case, make.oracle(case))).max() > 0.1

    adapters.import_adapter(str(tmp_path / "adapter"), base, str(run))
    np.testing.assert_allclose(ours(run, case), wanted, atol=2e-4, rtol=0)
    assert config_lib.load(run / "config.json").tuning.dora == dora

    export(run, tmp_path / "out")
    again = peft.PeftModel.from_pretrained(make.oracle(case), str(tmp_path / "out")).eval()
    np.testing.assert_allclose(theirs(case, again), wanted, atol=2e-4, rtol=0)

    directories.export_workdir(str(run), str(tmp_path / "whole"))
    directories.import_directory(str(tmp_path / "whole"), str(tmp_path / "merged"))
    np.testing.assert_allclose(ours(tmp_path / "merged", case), wanted, atol=2e-4, rtol=0)


@needs_peft
def test_prefixes_of_peft_give_its_logits_there_and_back(tmp_path):
    import peft

    case, base, run = CASES["gpt2"], str(write_directory(tmp_path / "base", "gpt2")), tmp_path / "run"
    asked = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = noisy(peft.get_peft_model(make.oracle(case), asked))
    model.save_pretrained(str(tmp_path / "adapter"))
    wanted = theirs(case, model)
    assert np.abs(wanted - theirs(case, make.oracle(case))).max() > 0.1
    adapters.import_adapter(str(tmp_path / "adapter"), base, str(run))
    np.testing.assert_allclose(ours(run, case), wanted, atol=2e-4, rtol=0)
    export(run, tmp_path / "out")
    again = peft.PeftModel.from_pretrained(make.oracle(case), str(tmp_path / "out")).eval()
    np.testing.assert_allclose(theirs(case, again), wanted, atol=2e-4, rtol=0)
