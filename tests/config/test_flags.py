"""Flags override fields of all types: choices of each kind, words, numbers."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import pytest

from pretrainax import cli
from pretrainax.config import Choice
from pretrainax.config import validation


def main():
    for path in PATHS:
        value = validation.get(cli.CONFIG.value, path)
        print(f"{path}={repr(value) if isinstance(value, Choice) else value}")
    return 0


cli.run(main)
"""
OVERRIDES = {
    "tokenizer": "ByteBPE(vocab_size=300, path=None, num_sentinels=0, train_bytes=1000, special_pieces='roberta')",
    "data.source": "PythonDocs()",
    "data.packing": "FirstFit()",
    "data.near_duplicates": "NearDuplicates(ngram=7, buckets=14, hashes=8, language='eng')",
    "objective.mask_unit": "WholeWords(word_list=None)",
    "objective.rate_change": "RateChange(to=0.2, begin=0.0, end=1.0)",
    "schedule": "WarmupLinear(warmup_steps=3, start_fraction=None, final_fraction=0.0)",
    "model.position": "LearnedPositions(max_length=514, offset=2)",
    "model.activation": "relu",
    "model.vocab_size": "auto",
    "train.remat": "dots",
    "train.on_spike": "stop",
    "train.steps": "7",
}


@pytest.mark.slow
def test_flags_give_every_kind_of_choice_and_words(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.replace("PATHS", repr(list(OVERRIDES))))
    flags = [f"--config.{path}={value}" for path, value in OVERRIDES.items()]
    words = [sys.executable, str(tmp_path / "program.py"), f"--config={ROOT}/configs/roberta_base.py:base", *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{path}={value}" for path, value in OVERRIDES.items()], done.stderr
