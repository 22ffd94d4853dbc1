"""Tests runs that start from a model of another family and shape: their output, checkpoints and resumption."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from pretrainax.config import MixtureOfExperts
from pretrainax.data.objectives import SpanCorruption
from pretrainax.data.sources import TextFiles
from pretrainax.interop.adaptations import DecoderToEncoderDecoder, DenseToExperts, WiderVocabulary
from pretrainax.runs.train import train
from pretrainax.sharding.param_paths import flat
from pretrainax.tokenization import PretrainedTokenizer
from tests.golden import CASES
from tests.golden.case import weights
from tests.support import tiny
from tests.support.huggingface_weights import params_of, write_directory, write_tokenizer
from tests.support.runs import arrays, assert_same_run, command, run

START = "--config.tokenizer.special_pieces=roberta", "--config.model.vocab_size=400", "--config.train.steps=1"
ADAPT = "(DecoderToEncoder(), Layers(layers='stacked'), WiderVocabulary(), LongerContext())"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory, text, cache):
    """Trains a decoder with 400 token embeddings, 64 positions and two layers for one step."""
    workdir = tmp_path_factory.mktemp("adapted") / "decoder"
    done = run(command("tests/support/tiny.py:gpt", workdir, text, cache, *START))
    assert done.returncode == 0, done.stderr
    return workdir


@pytest.mark.slow
def test_an_encoder_goes_on_from_a_decoder_and_resumes(decoder, text, cache, tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    flags = (
        *("--config.model.family=encoder", "--config.objective=MaskedLM()", "--config.model.num_layers=3"),
        *("--config.model.vocab_size=auto", "--config.model.position.max_length=96"),
        *(f"--config.checkpoint.init_from={decoder}", f"--config.checkpoint.adapt={ADAPT}"),
        *(f"--config.tokenizer=PretrainedTokenizer(path='{decoder}/tokenizer')", "--config.train.steps=2"),
        *("--config.checkpoint.every=1", "--config.checkpoint.keep_at=log", "--config.evaluate.every=2"),
    )
    done = run(command("tests/support/tiny.py:gpt", whole, text, cache, *flags))
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert f"start from {decoder}, step 1" in said and "adapted DecoderToEncoder(): attention is bidirectional" in said
    assert "copied encoder/final_norm" in said and "layers 0, 1, 0 of 2" in said
    assert "made token_embedding: 112 new rows, each the mean of 400" in said
    assert "made position_embedding: 64 positions repeated" in said

    known = json.loads((whole / "start.json").read_text())
    assert (known["directory"], known["steps"]) == (str(decoder), [1])
    assert known["adapted"]["copied"]["encoder/final_norm/scale"] == "decoder/final_norm/scale"
    assert known["adapted"]["made"]["encoder/blocks/mlp/up/kernel"] == (
        "layers 0, 1, 0 of 2 (decoder/blocks/mlp/up/kernel)"
    )
    assert known["adapted"]["left_out"] == []

    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "2")
    (part / "metrics.jsonl").write_text((part / "metrics.jsonl").read_text().splitlines(keepends=True)[0])
    shutil.rmtree(decoder / "checkpoints")  # not needed after the first save
    done = run(command("tests/support/tiny.py:gpt", part, text, cache, *flags))
    assert done.returncode == 0, done.stderr
    assert_same_run(part, whole)
    trained = arrays(whole)
    assert all(np.isfinite(x).all() for x in trained.values())


@pytest.mark.slow
def test_an_encoder_decoder_with_experts_begins_as_a_decoder_of_a_hugging_face_directory(text, tmp_path):
    """The learning rate is 0, so the run saves its initial parameters."""
    source, start, pieces = CASES["llama3"].config, tmp_path / "llama", tmp_path / "pieces"
    write_directory(start, "llama3")
    pieces.mkdir()
    write_tokenizer(pieces, 0, sentinels=8)
    experiment = tiny.get_config("t5")
    experts = MixtureOfExperts(num_experts=4, top_k=2)
    experiment.model = dataclasses.replace(source, family="encoder_decoder", vocab_size=128, experts=experts)
    experiment.tokenizer, experiment.objective = PretrainedTokenizer(path=str(pieces)), SpanCorruption()
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(tmp_path / "cache")
    experiment.data.sequence_length, experiment.train.steps, experiment.evaluate.batches = 16, 1, 1
    experiment.optimizer.learning_rate, experiment.checkpoint.init_from = 0.0, str(start)
    experiment.checkpoint.adapt = (DecoderToEncoderDecoder(), DenseToExperts(), WiderVocabulary())
    assert train(experiment, str(tmp_path / "run")) == 0
    first, there = flat(params_of(tmp_path / "run", experiment.model)), flat(weights(source))
    for stack in ("encoder", "decoder"):
        down = first[f"{stack}/blocks/mlp/experts_down/kernel"]
        for expert in range(4):
            np.testing.assert_array_equal(down[:, expert], there["decoder/blocks/mlp/down/kernel"])
        assert 0.01 < np.std(first[f"{stack}/blocks/mlp/router/kernel"]) < 0.03  # init_stddev is 0.02
    np.testing.assert_array_equal(
        first["decoder/blocks/cross_attention/query/kernel"], there["decoder/blocks/self_attention/query/kernel"]
    )
    np.testing.assert_array_equal(first["token_embedding/embedding"][:99], there["token_embedding/embedding"])
    known = json.loads((tmp_path / "run" / "start.json").read_text())
    assert (known["directory"], known["steps"], known["adapted"]["left_out"]) == (str(start), [], [])
