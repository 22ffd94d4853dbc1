"""Tests exports of retrievers as plain models without head; transformers' class computes the same vectors."""

import dataclasses
import json

import numpy as np
import pytest

from pretrainax import config as config_lib
from pretrainax.config import Embed
from pretrainax.inference.framing import framed_rows
from pretrainax.inference.load import load
from pretrainax.interop import directories
from pretrainax.interop.origin import find_origin
from pretrainax.interop.start import fit_of, start_model_of
from pretrainax.tasks import Retrieval
from pretrainax.zoo.family import without_heads
from tests.golden import CASES
from tests.golden.case import needs_transformers, weights
from tests.support.exports import write_workdir

pytestmark = pytest.mark.slow

TEXTS = ["aus mir", "le"]


def write_retriever(workdir, name, pooling):
    case = CASES[name]
    config = dataclasses.replace(without_heads(case.config), head=Embed(2, pooling=pooling))
    write_workdir(workdir, config, weights(config), case.pad_id)
    experiment = config_lib.load(str(workdir / "config.json"))
    experiment.objective = Retrieval()
    (workdir / "config.json").write_text(config_lib.dump(experiment))
    return load(str(workdir))


@needs_transformers
@pytest.mark.parametrize("name", ["bert", "modernbert", "gpt2"])
def test_transformers_gives_the_same_vectors(name, tmp_path):
    import torch
    import transformers

    pooling = "last" if CASES[name].config.family == "decoder" else "mean"
    loaded = write_retriever(tmp_path / "run", name, pooling)
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "there"))
    model = transformers.AutoModel.from_pretrained(str(tmp_path / "there")).eval()
    (architecture,) = json.loads((tmp_path / "there" / "config.json").read_text())["architectures"]
    assert type(model).__name__ == architecture and architecture.endswith("Model")
    ours = loaded.embed(TEXTS)
    for row, vector in zip(framed_rows(loaded, TEXTS), ours, strict=True):
        with torch.no_grad():
            (states,) = model(torch.from_numpy(row[None].astype(np.int64))).last_hidden_state.numpy()
        wanted = states[-1] if pooling == "last" else states.mean(0)
        np.testing.assert_allclose(vector, wanted / np.linalg.norm(wanted), atol=2e-4, rtol=0)


@needs_transformers
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_sentence_transformers_gives_the_same_vectors(name, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    loaded = write_retriever(tmp_path / "run", name, "mean")
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "there"))
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "there"), device="cpu")
    # The float32 sums have another order, as above.
    np.testing.assert_allclose(model.encode(TEXTS), loaded.embed(TEXTS), atol=2e-4, rtol=0)


def test_sentence_transformers_finds_the_pooling_and_another_run_the_parameters(tmp_path):
    write_retriever(tmp_path / "run", "bert", "cls")
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "there"))
    read = lambda name: json.loads((tmp_path / "there" / name).read_text())  # noqa: E731
    assert [(module["type"].rpartition(".")[2], module["path"]) for module in read("modules.json")] == [
        *(("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    ]
    pooling = read("1_Pooling/config.json")
    assert pooling.pop("word_embedding_dimension") == 16
    assert [name for name, value in pooling.items() if value] == ["pooling_mode_cls_token"]
    assert read("sentence_bert_config.json")["max_seq_length"] == CASES["bert"].config.position.max_length
    begun = start_model_of(str(tmp_path / "there")).model
    begun.head = Embed(2)
    fit = fit_of(find_origin(str(tmp_path / "there")), begun, fresh_heads=True)
    assert not fit.missing_head_paths and not fit.changed
