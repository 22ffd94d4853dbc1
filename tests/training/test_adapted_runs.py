"""Runs that start from a model of another family and shape: what they print, note and keep, and how they resume."""

import json
import shutil

import numpy as np
import pytest

from tests.support.runs import arrays, assert_same_run, command, run

START = "--config.tokenizer.special_pieces=roberta", "--config.model.vocab_size=400", "--config.train.steps=1"
ADAPT = "(DecoderToEncoder(), Layers(taken='stacked'), WiderVocabulary(), LongerContext())"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory, text, cache):
    """A decoder of 400 rows, 64 positions and two layers, trained for a step."""
    workdir = tmp_path_factory.mktemp("adapted") / "decoder"
    done = run(command("tests/support/tiny.py:gpt", workdir, text, cache, *START))
    assert done.returncode == 0, done.stderr
    return workdir


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
    assert f"start from {decoder}, step 1" in said and "adapted DecoderToEncoder(): the mask is opened" in said
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
    shutil.rmtree(decoder / "checkpoints")  # which a run that has saved no longer needs
    done = run(command("tests/support/tiny.py:gpt", part, text, cache, *flags))
    assert done.returncode == 0, done.stderr
    assert_same_run(part, whole)
    trained = arrays(whole)
    assert all(np.isfinite(x).all() for x in trained.values())
