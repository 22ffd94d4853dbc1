"""Tests evaluate --compare-with for the heads of two runs with the same task."""

import json
import sys

import pytest

from pretrainax.config import UserError
from pretrainax.evaluation.task_comparison import reference_of
from pretrainax.runs.train import train
from pretrainax.training.metrics import read_metrics
from tests.runs.test_task_baselines import fine_tuning
from tests.support import tiny
from tests.support.runs import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Trains two runs on the same records with different learning rates, and a run on fewer records."""
    folder = tmp_path_factory.mktemp("heads")
    for name, rate in (("slow", 1e-6), ("fast", 1e-2)):
        experiment = fine_tuning(folder)
        experiment.optimizer.learning_rate = rate
        experiment.train.steps = experiment.evaluate.every = 20
        assert train(experiment, str(folder / name)) == 0
    other = folder / "other"
    other.mkdir()
    experiment = fine_tuning(other)
    rows = (other / "valid.jsonl").read_text().splitlines()[:30]
    (other / "valid.jsonl").write_text("".join(f"{row}\n" for row in rows))
    assert train(experiment, str(other / "run")) == 0
    return folder


def evaluate(*flags):
    return run([sys.executable, "-m", "pretrainax.evaluate", *flags])


@pytest.mark.slow
def test_the_differences_are_those_of_the_metrics_with_errors_over_records(folder):
    done = evaluate(f"--from={folder}/fast", f"--compare-with={folder}/slow", f"--output={folder}/out.json")
    assert done.returncode == 0, done.stderr
    assert "difference from" in done.stdout and "accuracy_difference" in done.stdout
    found = {result["measure"]: result for result in json.loads((folder / "out.json").read_text())}
    last = [read_metrics(str(folder / name / "metrics.jsonl"))[-1] for name in ("fast", "slow")]
    for metric in ("loss", "accuracy"):
        difference = found[f"{metric}_difference"]
        one, other = (line[metric] for line in last)
        assert difference["value"] == pytest.approx(one - other, abs=1e-5)  # float32 losses of about 0.7
        assert "distinguishable" in difference["note"]
    assert found["loss_difference"]["standard_error"] > 0


@pytest.mark.slow
def test_other_records_and_the_wrong_flags_are_one_line(folder):
    done = evaluate(f"--from={folder}/fast", f"--compare-with={folder}/other/run")
    assert done.returncode == 2 and "differ in their number, texts, labels or windows" in done.stderr
    done = evaluate(f"--from={folder}/fast", "--compare-with=any", "--source=Tsv(path='any')")
    assert done.returncode == 2 and "leave --source out" in done.stderr


@pytest.mark.slow
def test_a_run_with_another_task_is_refused(folder):
    with pytest.raises(UserError, match="has the objective Classification, and this run has MaskedLM"):
        reference_of(str(folder / "fast"), tiny.get_config("bert"))
