"""Tests pipeline runs: any mesh can resume from their checkpoints, with the same result."""

import dataclasses
import shutil

import numpy as np
import pytest

from pretrainax.config import MeshConfig
from pretrainax.data.sources import TextFiles
from pretrainax.runs import train as training
from pretrainax.runs.resume_check import LOSS_RTOL
from pretrainax.training import train as core
from tests.support import tiny
from tests.support.runs import lines


@pytest.fixture(scope="module")
def experiment(text, cache):
    """Makes the config of 4 steps of 16 rows, with a validation and a checkpoint every 2 steps."""
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.train.steps, experiment.train.global_batch_size, experiment.schedule.warmup_steps = 4, 16, 1
    experiment.evaluate.every, experiment.evaluate.batches, experiment.checkpoint.every = 2, 1, 2
    experiment.checkpoint.keep_at = (2,)
    return experiment


@pytest.fixture
def quick(monkeypatch):
    """Skips the tables, the plot and the samples at the end of a run."""
    monkeypatch.setattr(core, "finish", lambda *_: None)


def train(experiment, mesh, workdir):
    assert training.train(dataclasses.replace(experiment, mesh=mesh), str(workdir)) == 0


@pytest.mark.slow
def test_a_run_goes_on_on_stages_where_a_run_without_has_left_it_and_the_other_way(experiment, quick, tmp_path, capsys):
    plain, staged = MeshConfig(data=8), MeshConfig(data=2, pipeline=2, fsdp=2)
    train(experiment, plain, tmp_path / "plain")
    train(experiment, staged, tmp_path / "staged")
    said = "2 stages of 1 of 2 layers, 4 parts of 1 row per device; the bubble is 20% of the time of the layers"
    assert "stages " + said in " ".join(capsys.readouterr().err.split())
    for name, other, schedule in (("plain", staged, "1f1b"), ("staged", staged, "1f1b"), ("staged", plain, "gpipe")):
        resumed = tmp_path / f"from {name} to {schedule} on {other.pipeline}"
        shutil.copytree(tmp_path / name, resumed)
        shutil.rmtree(resumed / "checkpoints" / "4")
        experiment.train.pipeline_schedule = schedule
        train(experiment, other, resumed)
    for split in ("train", "valid"):
        losses = {path.name: [line["loss"] for line in lines(path, split)] for path in tmp_path.iterdir()}
        for got in losses.values():
            np.testing.assert_allclose(got, losses["plain"], rtol=LOSS_RTOL)
