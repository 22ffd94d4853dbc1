"""llama.cpp's converter reads our exports, and llama.cpp computes our next-token probabilities from the GGUF files."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shlex
import sys
import urllib.request

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from pretrainax.interop import directories
from pretrainax.tokenization import BPE, ByteBPE
from tests.golden import CASES
from tests.golden.case import weights
from tests.support.exports import our_logits, write_run
from tests.support.runs import ROOT

SOURCE = os.environ.get("LLAMA_CPP", "")  # llama.cpp's source, with convert_hf_to_gguf.py
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
    pytest.mark.skipif(
        not os.path.exists(f"{SOURCE}/convert_hf_to_gguf.py"), reason="LLAMA_CPP is not the source of llama.cpp"
    ),
]
TEXT = "The quick brown fox jumps over the lazy dog. " * 20 + (ROOT / "CONTRIBUTING.md").read_text().replace("\n", " ")
VOCABULARY = 512


def rotary(name: str, **changes):
    return dataclasses.replace(CASES[name].config.position, **changes)


# case -> changes for values that llama.cpp does not read from the files. d_ff is 4 * d_model in GPT-2 and Phi-2.
# Mistral and Phi-3 have no window. Other values are the values of the released models.
FAMILIES = {
    "gpt2": dict(d_ff=64),
    "llama2": {},
    "llama3_1": {},
    "mistral": dict(layer_pattern=("global",), window=None),
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "gemma1": dict(position=rotary("gemma1", theta=1e4)),
    "gemma2": dict(position=rotary("gemma2", theta=1e4)),
    "gemma3": dict(attention_scale=None),
    "phi2": dict(d_ff=64, head_dim=None, position=rotary("phi2", fraction=0.5)),
    "phi3": dict(layer_pattern=("global",), window=None),
    "smollm3": dict(position=rotary("smollm3", no_rotation_every=4)),
    "olmo2": {},
    "olmo3_7b": dict(position=rotary("olmo3_7b", scaling=None, local_theta=None)),
    "olmoe": dict(num_kv_heads=4),
    "gpt_oss": dict(gate_limit=7.0, position=rotary("gpt_oss", scaling=None)),
    "deepseek_v2": dict(
        position=rotary("deepseek_v2", scaling=None),
        experts=dataclasses.replace(CASES["deepseek_v2"].config.experts, groups=None, top_groups=None),
    ),
    "deepseek_v3": dict(position=rotary("deepseek_v3", scaling=None)),
}
# Cases with SentencePiece, as in the released models. The other cases use ByteBPE.
SENTENCEPIECE = ("llama2", "gemma1", "gemma2", "gemma3", "phi3")


@pytest.fixture(scope="module")
def tokenizers():
    return {kind: kind(vocab_size=500).build(iter([TEXT])) for kind in (ByteBPE, BPE)}


def convert(directory: pathlib.Path, monkeypatch) -> None:
    """Runs the command of docs/how-to/servers.md, which writes model.gguf, in this process."""
    page = (ROOT / "docs" / "how-to" / "servers.md").read_text()
    (command,) = re.findall(r"^python -c .*$", page, re.MULTILINE)
    _, _, code, *arguments = shlex.split(command)
    (directory / "llama.cpp").symlink_to(SOURCE)
    monkeypatch.chdir(directory)
    monkeypatch.setattr("sys.argv", ["convert", *arguments])
    monkeypatch.setattr("sys.path", list(sys.path))
    exec(code, {})


def serve(path: pathlib.Path):
    """Loads a GGUF file in llama.cpp, with all computation in float32."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.cpuparams.n_threads = str(path), 64, 1, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = False
    return xllamacpp.Server(params)


def next_token(server, prompt: list[int], answer: int) -> np.ndarray:
    """Returns the log-probabilities [VOCABULARY] of the token after a prompt.

    The bias makes llama.cpp sample `answer`, a whole character; it shows the probabilities before the bias.
    """
    request = {"prompt": prompt, "max_tokens": 1, "logprobs": VOCABULARY, "logit_bias": [[answer, 1e3]]}
    (choice,) = server.handle_completions(request)["choices"]
    found = {row["id"]: row["logprob"] for row in choice["logprobs"]["content"][0]["top_logprobs"]}
    return np.array([found[i] for i in range(VOCABULARY)])


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_computes_the_same_probabilities(name, tokenizers, tmp_path, monkeypatch):
    config = dataclasses.replace(CASES[name].config, vocab_size=VOCABULARY, **FAMILIES[name])
    tokenizer, params = tokenizers[BPE if name in SENTENCEPIECE else ByteBPE], weights(config)
    write_run(tmp_path / "run", config, params, tokenizer)
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "exported"))
    convert(tmp_path, monkeypatch)
    server = serve(tmp_path / "model.gguf")
    text = "The dog's 12 foxes:  jump\tover é"
    request = urllib.request.Request(f"{server.listening_address}/tokenize", json.dumps({"content": text}).encode())
    ids = [int(i) for i in tokenizer.encode(text)]
    assert json.load(urllib.request.urlopen(request))["tokens"] == ids
    ids = ids[:14]  # within the context of all cases
    rows = {
        "tokens": np.array([ids]),
        "segment_ids": np.ones((1, len(ids)), int),
        "positions": np.arange(len(ids))[None],
    }
    ours = log_softmax(our_logits(config, params, jax.tree.map(np.int32, rows))[0].astype(float), axis=-1)
    # The float32 sums have another order. ggml computes GELU with a float16 table.
    tolerance = 1e-2 if "gelu" in config.activation else 1e-4
    answer = int(tokenizer.encode("a")[0])
    differences = [np.abs(next_token(server, ids[:n], answer) - ours[n - 1]).max() for n in (1, 7, len(ids))]
    assert max(differences) < tolerance
