"""A corpus in an in-memory store, without a local copy."""

import json
import pathlib
import random

import pytest

from pretrainax.config import DataConfig, Experiment, ModelConfig, TrainConfig
from pretrainax.data.objectives import CausalLM, NextSentencePrediction
from pretrainax.data.pipeline import batches_of
from pretrainax.data.sources import JsonLines
from pretrainax.optim.optimizers import AdamW
from pretrainax.optim.schedules import WarmupCosine
from pretrainax.storage import places
from pretrainax.tokenization import ByteBPE, WordPiece

STEPS = 6


@pytest.fixture
def lines(tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices("aeioustrnlkm", k=rng.randint(2, 7))) for _ in range(200)]
    (tmp_path / "lines").mkdir()
    for i in range(8):
        texts = [" ".join(rng.choices(words, k=30)).capitalize() + ". " + "Then it ends." for _ in range(10)]
        (tmp_path / "lines" / f"{i}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return tmp_path / "lines"


@pytest.fixture
def another_machine(tmp_path, monkeypatch):
    """Returns a function that makes this machine forget its local copies of any store."""

    def forget():
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{random.random()}"))
        monkeypatch.setattr(places, "_mirrors", {})

    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'pretrainax[test]'")
    forget()
    return forget


def experiment(lines: pathlib.Path, cache: object, kind: str) -> Experiment:
    """Returns an experiment; `kind`: "windows" of any text, or "sentences", some of which are from other documents."""
    sentences = kind == "sentences"
    family, types = ("encoder", 2) if sentences else ("decoder", 0)
    model = ModelConfig(family=family, vocab_size=512, num_token_types=types)
    tokenizer = WordPiece(vocab_size=200) if sentences else ByteBPE(vocab_size=280)
    data = DataConfig(JsonLines(str(lines), valid_fraction=0.2), 32, cache_dir=str(cache), prepare_workers=1)
    objective = NextSentencePrediction() if sentences else CausalLM()
    train = TrainConfig(steps=STEPS, global_batch_size=4)
    return Experiment(model, tokenizer, data, objective, AdamW(1e-3), WarmupCosine(), train=train)


def bucket() -> str:
    return f"memory://bucket/{random.random()}"


def made(prepared, of, split="train"):
    batches = batches_of(of, prepared, split)
    return [batches[step] for step in range(STEPS)]
