"""Tests the standard errors of each validation; tests/runs/test_comparison.py compares them with the final errors."""

import json
import math

import numpy as np
import pytest

from pretrainax.config.metric import STANDARD_ERRORS
from pretrainax.data.sources import SourceMixture, TextFiles
from pretrainax.runs.train import train
from pretrainax.training.metric_labels import validation_parts
from pretrainax.training.metrics import read_metrics
from tests.support.tiny import get_config


def test_the_log_line_shows_the_errors_of_the_loss_and_of_the_selecting_metric():
    metrics, errors = {"loss": 3.5, "perplexity": 33.0, "accuracy": 0.25}, {"loss": 0.05, "perplexity": 1.6}
    assert validation_parts(metrics, "accuracy", errors | {"accuracy": 0.01}) == [
        "validation loss 3.5000 ± 0.0500",
        "perplexity 33.00",
        "token accuracy 25.00% ± 1.00%",
    ]
    assert validation_parts(metrics, "loss", {})[0] == "validation loss 3.5000"


@pytest.mark.slow
def test_each_validation_of_a_mixture_has_the_errors_of_the_total_and_of_the_parts(tmp_path, capsys):
    rng, sources = np.random.default_rng(0), []
    for name, documents in (("many", 80), ("few", 4)):
        (tmp_path / name).mkdir()
        for number in range(documents):
            words = " ".join(f"w{i}" for i in rng.integers(0, 40, 8000 // documents))
            (tmp_path / name / f"{number}.txt").write_text(words)
        sources.append(TextFiles(path=str(tmp_path / name), valid_fraction=0.4))
    experiment = get_config("gpt")
    experiment.tokenizer.vocab_size = 280
    experiment.data.source, experiment.data.cache_dir = SourceMixture(tuple(sources)), str(tmp_path / "cache")
    experiment.train.steps, experiment.evaluate.every, experiment.evaluate.batches = 4, 2, 10
    experiment.schedule.warmup_steps, experiment.checkpoint.every = 1, 4
    assert train(experiment, str(tmp_path / "run")) == 0
    said = capsys.readouterr().err
    valid = [line for line in read_metrics(str(tmp_path / "run" / "metrics.jsonl")) if line["split"] == "valid"]
    assert len(valid) == 2
    for line in valid:
        errors = line[STANDARD_ERRORS]
        assert {"loss", "loss/source=many", "loss/source=few", "perplexity"} <= set(errors) <= set(line)
        assert all(0 < error < 1 and math.isfinite(error) for name, error in errors.items() if "loss" in name)
        assert f"validation loss {line['loss']:.4f} ± {errors['loss']:.4f} · " in said
    compared = json.loads((tmp_path / "run" / "comparison.json").read_text())["metrics"]["loss"]
    # The final comparison reads almost the same rows in another order: the mixture's schedule.
    assert valid[-1][STANDARD_ERRORS]["loss"] == pytest.approx(compared["standard_error"], rel=1e-3)
    saved = (tmp_path / "run" / "checkpoints" / "4" / "run.json").read_text()
    assert '"accuracy"' in saved and STANDARD_ERRORS not in saved
