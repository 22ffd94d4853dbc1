"""Tests that a resumed run reports the lines that metrics.jsonl has lost since the checkpoint was saved."""

import math

import numpy as np
import pytest

from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.config.metric import STANDARD_ERRORS
from pretrainax.data.sources import TextFiles
from pretrainax.runs.train import train
from pretrainax.training import train as core
from pretrainax.training.metrics import read_metrics
from pretrainax.training.metrics_writer import MetricsWriter
from tests.support import tiny

DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2])),
    "cut within a line": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "without its first line": lambda path: path.write_bytes(path.read_bytes().split(b"\n", 1)[1]),
    "with shorter lines": lambda path: path.write_bytes(path.read_bytes().replace(b'"loss": 4.5', b'"loss": 4')),
}


def written(workdir, steps, resume=0):
    writer = MetricsWriter(str(workdir), 10, resume)
    for step in range(resume + 1, steps + 1):
        writer.log(step, "train", {"loss": 4.5, "tokens_per_second": 1.0, "learning_rate": 0.1})
    return writer


@pytest.mark.parametrize("damage", DAMAGES)
def test_lines_that_are_lost_are_counted_in_a_warning(damage, tmp_path, capsys):
    writer = written(tmp_path, 4)
    saved = writer.size()
    writer.close()
    DAMAGES[damage](tmp_path / "metrics.jsonl")
    writer = MetricsWriter(str(tmp_path), 10, 4)
    now = writer.size()
    writer.check(saved, 4)
    writer.close()
    assert (
        f"WARNING: {tmp_path}/metrics.jsonl has lost lines of steps up to 4: it has {now['lines']} lines and "
        f"{now['bytes']} bytes, and had 4 lines and {saved['bytes']} bytes when step 4 was saved"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("step", [2, 4])
def test_lines_of_later_steps_that_are_taken_back_are_no_loss(step, tmp_path, capsys):
    writer = written(tmp_path, step)
    saved = writer.size()
    for later in (step + 1, step + 2):
        writer.log(later, "train", {"loss": 4.0, "tokens_per_second": 1.0, "learning_rate": 0.1})
    writer.rewind(step)
    writer.check(saved, step)
    assert writer.size() == saved and "lost" not in capsys.readouterr().err
    writer.close()


def test_a_checkpoint_of_an_older_version_and_another_process_check_nothing(tmp_path, capsys):
    writer = written(tmp_path, 2)
    writer.check(None, 2)
    writer.close()
    other = MetricsWriter(str(tmp_path / "other"), 10, 2, primary=False)
    other.check({"bytes": 10, "lines": 1}, 2)
    assert other.size() is None and "lost" not in capsys.readouterr().err


def test_numbers_that_are_not_finite_are_null_also_in_nested_metrics(tmp_path, capsys):
    writer = MetricsWriter(str(tmp_path), 10)
    nested = {"of": [np.float32(0.5), math.inf], "loads": np.array([1.0, math.nan]), "name": "a"}
    errors = {"loss": math.nan, "accuracy": np.float32(0.25)}
    writer.log(4, "valid", {"loss": 3.0, "accuracy": math.nan, "nested": nested, STANDARD_ERRORS: errors})
    writer.close()
    (line,) = read_metrics(writer.path)
    assert line["nested"] == {"of": [0.5, None], "loads": [1.0, None], "name": "a"}
    assert line[STANDARD_ERRORS] == {"loss": None, "accuracy": 0.25} and line["accuracy"] is None
    assert "step 4/10 · validation loss 3.0000\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_records_the_size_in_each_checkpoint_and_warns_when_it_resumes(
    text, cache, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(core, "finish", lambda *_: None)
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.train.steps, experiment.train.log_every = 4, 1
    experiment.evaluate.every, experiment.evaluate.batches, experiment.checkpoint.every = 4, 1, 2
    assert train(experiment, str(tmp_path)) == 0
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for step, count in ((2, 2), (4, 5)):
        record = read_run_json(str(tmp_path / "checkpoints" / str(step)))["extra"]["metrics_file"]
        assert record == {"bytes": len(b"".join(lines[:count])), "lines": count}
    assert train(experiment, str(tmp_path)) == 0
    assert "has lost lines" not in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
    assert train(experiment, str(tmp_path)) == 0
    assert "metrics.jsonl has lost lines of steps up to 4: it has 3 lines" in capsys.readouterr().err
