"""Tests imports and exports of peft's adapters: the logits are equal in both directions."""

import errno
import importlib.util
import json
import os
import shlex
import zlib

import numpy as np
import pytest
import safetensors.numpy

import pretrainax
from pretrainax import config as config_lib
from pretrainax.adapt import LoRA, PrefixTuning
from pretrainax.adapt.matrices import matching, matrices_of
from pretrainax.checkpoints import manifest
from pretrainax.config import RunFailed, UserError
from pretrainax.interop import adapters, directories
from pretrainax.interop.adapters import lora
from pretrainax.interop.adapters.directories import _read_trained as read_trained
from pretrainax.interop.adapters.modules import TheirModel
from pretrainax.interop.adapters.virtual_tokens import prefix_to_peft
from pretrainax.interop.origin import find_origin
from tests.golden import CASES, make
from tests.golden.case import batch, weights
from tests.support.huggingface_weights import stored, write_directory

needs_peft = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers", "peft"))),
    reason="torch, transformers or peft is not installed (extra parity)",
)
# Linear layers of each family, as transformers names them. GPT-2 has queries, keys and values in one matrix.
TARGETS = {
    "bert_masked_lm": ["query", "value", "attention.output.dense"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "phi3": ["qkv_proj", "down_proj"],
}


def theirs(case, model):
    """Returns the logits of a torch model at real tokens."""
    import torch

    with torch.no_grad():
        return make.forward(case, model, batch(case))["logits"].numpy()[batch(case)["segment_ids"] > 0]


def ours(workdir, case):
    loaded = pretrainax.load(str(workdir))
    return np.asarray(loaded(batch(case)).logits)[batch(case)["segment_ids"] > 0]


def noisy(model):
    """Returns a peft model with noise added to each trained parameter."""
    import torch

    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def export(workdir, to):
    origin = find_origin(str(workdir))
    return adapters.export_adapter(str(workdir), str(to), origin.steps[0])


@pytest.mark.slow
@needs_peft
@pytest.mark.parametrize(("name", "dora"), (("bert_masked_lm", True), ("gpt2", False), ("phi3", True)))
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


# --- without peft ----------------------------------------------------------------------------------------------------


def write_adapter(directory, name, tuning, **fields):
    """Writes a directory as peft would save it, with random updates."""
    config = CASES[name].config
    matrices = matching(matrices_of(weights(config)), tuning.targets)
    sizes = dict(size for matrix in matrices for size in lora.array_shapes(matrix, tuning))
    draw = {path: np.random.RandomState(zlib.crc32(path.encode())) for path in sizes}
    trained = {path: draw[path].standard_normal(size).astype(np.float32) for path, size in sizes.items()}
    described, tensors = lora.lora_to_peft(tuning, trained, TheirModel(CASES[name].family.huggingface, config))
    directory.mkdir()
    safetensors.numpy.save_file({k: np.ascontiguousarray(x) for k, x in tensors.items()}, directory / adapters.WEIGHTS)
    (directory / adapters.CONFIG).write_text(json.dumps(described | fields))
    return trained


def test_the_command_that_exports_the_base_model_can_be_pasted(tmp_path):
    write_adapter(tmp_path / "adapter", "bert_masked_lm", LoRA(3))
    directories.import_directory(str(write_directory(tmp_path / "base", "bert_masked_lm")), str(tmp_path / "my base"))
    adapters.import_adapter(str(tmp_path / "adapter"), str(tmp_path / "my base"), str(tmp_path / "run"))
    command = export(tmp_path / "run", tmp_path / "out").partition("the output of ")[2]
    assert shlex.split(command)[-2:] == [f"--workdir={tmp_path}/my base@trained0", "--to=DIR"]


def test_an_adapter_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    write_adapter(tmp_path / "adapter", "bert_masked_lm", LoRA(3))
    base = str(write_directory(tmp_path / "base", "bert_masked_lm"))
    adapters.import_adapter(str(tmp_path / "adapter"), base, str(tmp_path / "run"))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match="could not write --to=.*file/out: "):
        export(tmp_path / "run", tmp_path / "file" / "out")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunFailed, match="could not write --to=.*No space left on device"):
        export(tmp_path / "run", tmp_path / "out")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["adapter", "base", "file", "run"]


def test_an_adapter_has_every_bit_of_what_was_trained(tmp_path):
    tuning = LoRA(3, 5.0, 0.1, ("query", "down", "out"), dora=True)
    trained = write_adapter(tmp_path / "adapter", "bart", tuning)
    base = str(write_directory(tmp_path / "base", "bart"))
    adapters.import_adapter(str(tmp_path / "adapter"), base, str(tmp_path / "run"))
    export(tmp_path / "run", tmp_path / "out")
    first, again = (safetensors.numpy.load_file(tmp_path / x / adapters.WEIGHTS) for x in ("adapter", "out"))
    assert first.keys() == again.keys() and all(np.array_equal(again[key], x) for key, x in first.items())
    stored = read_trained(find_origin(str(tmp_path / "run")).steps[0], "params")
    assert stored.keys() == trained.keys()
    assert all(np.array_equal(stored[path], x) for path, x in trained.items())
    said = json.loads((tmp_path / "out" / adapters.CONFIG).read_text())
    assert said["base_model_name_or_path"] == base and said["r"] == 3 and said["lora_alpha"] == 5.0


def test_a_changed_file_of_an_exported_adapter_is_refused(tmp_path):
    write_adapter(tmp_path / "adapter", "bert_masked_lm", LoRA(3))
    base = str(write_directory(tmp_path / "base", "bert_masked_lm"))
    adapters.import_adapter(str(tmp_path / "adapter"), base, str(tmp_path / "run"))
    export(tmp_path / "run", tmp_path / "out")
    assert manifest.faults(str(tmp_path / "out")) == []
    (tmp_path / "out" / "README.md").write_text("Users may describe the adapter.")
    assert "not read" not in adapters.import_adapter(str(tmp_path / "out"), base, str(tmp_path / "again"))
    content = bytearray((tmp_path / "out" / adapters.WEIGHTS).read_bytes())
    content[-1] ^= 1  # the last bit of a weight
    (tmp_path / "out" / adapters.WEIGHTS).write_bytes(content)
    with pytest.raises(UserError, match=f"out does not match its manifest.sha256: {adapters.WEIGHTS} changed"):
        adapters.import_adapter(str(tmp_path / "out"), base, str(tmp_path / "third"))


def test_the_export_of_a_tuned_run_is_its_merged_model(tmp_path):
    write_adapter(tmp_path / "adapter", "gpt2", LoRA(rank=2))  # transformers has one rank for the combined matrix
    base = str(write_directory(tmp_path / "base", "gpt2"))
    adapters.import_adapter(str(tmp_path / "adapter"), base, str(tmp_path / "run"))
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "whole"))
    merged, whole = (pretrainax.load(str(tmp_path / name)).parameters for name in ("run", "whole"))
    assert all(np.array_equal(whole[path], x) for path, x in merged.items())
    before, after = stored(base), stored(tmp_path / "whole")
    changed = {name for name, x in after.items() if not np.array_equal(before[name], x)}
    assert changed == {f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(2)}


REFUSED = {
    "another kind": ({"peft_type": "LOHA"}, "peft_type 'LOHA', it must be 'LORA', 'IA3', 'PREFIX_TUNING' or"),
    "biases": ({"bias": "all"}, "lacks bert.embeddings.LayerNorm.bias, .* which modules_to_save or bias in"),
    "heads": ({"modules_to_save": ["classifier"]}, r"modules_to_save \['classifier'\], but the model has no such"),
    "some layers": ({"layers_to_transform": [1], "target_modules": ["query", "value"]}, "so PEFT ignores them"),
    "magnitudes": ({"use_dora": True}, "no lora_magnitude_vector of bert.encoder.layer"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_an_adapter_that_says_more_is_refused(mistake, tmp_path):
    fields, line = REFUSED[mistake]
    write_adapter(tmp_path / "adapter", "bert", LoRA(rank=2), **fields)
    base = write_directory(tmp_path / "base", "bert")
    with pytest.raises(UserError, match=line):
        adapters.import_adapter(str(tmp_path / "adapter"), str(base), str(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists()


def test_an_adapter_of_another_model_names_what_is_not_there(tmp_path):
    write_adapter(tmp_path / "adapter", "bert", LoRA(rank=2))
    base = write_directory(tmp_path / "base", "gpt2")
    with pytest.raises(UserError, match="does not hold updates of this model: base_model.model.bert.encoder"):
        adapters.import_adapter(str(tmp_path / "adapter"), str(base), str(tmp_path / "run"))
    with pytest.raises(UserError, match="a model that it does not name: give it as --base=DIR"):
        adapters.import_adapter(str(tmp_path / "adapter"), None, str(tmp_path / "run"))


def test_prefixes_of_models_that_peft_treats_otherwise_are_refused():
    with pytest.raises(UserError, match="which excludes config.model.qk_norm: use LoRA"):
        prefix_to_peft(PrefixTuning(2), {}, CASES["qwen3"].config)
