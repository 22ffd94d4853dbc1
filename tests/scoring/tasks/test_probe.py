"""Tests linear probes of frozen hidden states."""

import json

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.scoring.tasks import probe
from pretrainax.scoring.tasks.run import load_tasks, run_tasks
from tests.support.loaded import loaded_case


def write(path, count: int, is_noise: bool = False) -> str:
    """Writes records that repeat one letter, with this letter or a random class as the label."""
    rng = np.random.default_rng(0)
    letters = rng.choice(["e", "q"], count)
    labels = rng.choice(["e", "q"], count) if is_noise else letters
    rows = [
        {"text": letter * (3 + i % 9), "label": label}
        for i, (letter, label) in enumerate(zip(letters, labels, strict=True))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"probe:{path}"


def scores(task: str) -> dict[str, float]:
    (found,) = run_tasks(loaded_case("gpt2"), load_tasks([task]))
    return {result.measure: result.value for result in found}


def test_ridge_regression_separates_two_clusters_and_answers_without_examples():
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=60)
    states = rng.normal(size=(60, 8)) + 6 * labels[:, None]
    assert (probe._classify(states[:30], labels[:30], states[30:], 10.0) == labels[30:]).all()
    assert (probe._classify(states[:0], labels[:0], states, 10.0) == 0).all()


def test_a_class_that_the_text_shows_is_found_and_noise_is_not(tmp_path):
    assert scores(write(tmp_path / "clear.jsonl", 60))["accuracy"] > 0.9
    noise = scores(write(tmp_path / "noise.jsonl", 60, is_noise=True))
    assert noise["accuracy"] < 0.75  # four standard errors of 60 coin flips
    assert 0.5 <= noise["majority_accuracy"] < 0.75


def test_a_penalty_of_zero_is_refused(tmp_path):
    path = tmp_path / "task.json"
    path.write_text(json.dumps({"kind": "probe", "examples": write(tmp_path / "x.jsonl", 4)[6:], "ridge": 0.0}))
    with pytest.raises(UserError, match="ridge is 0.0"):
        load_tasks([str(path)])
