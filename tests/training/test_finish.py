"""Tests the end of a run: the run is saved first, each failure prints one line, and a signal skips the rest."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from pretrainax.config import RunFailed
from pretrainax.data.sources import TextFiles
from pretrainax.runs import final_report, samples
from pretrainax.runs.train import train
from pretrainax.runtime.signals import PreemptionHandler
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.training import finish
from tests.support import tiny


@pytest.fixture
def experiment(text, cache):
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.train.steps, experiment.evaluate.batches, experiment.schedule.warmup_steps = 1, 1, 1
    return experiment


@pytest.mark.slow
def test_what_fails_at_the_end_is_a_line_and_the_run_is_whole(experiment, tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        assert (tmp_path / "checkpoints" / "1" / "manifest.sha256").exists()  # already saved
        raise MemoryError("no\nroom")

    for owner, name in ((final_report, "compare"), (final_report, "draw_curves"), (samples, "show_samples")):
        monkeypatch.setattr(owner, name, fail)
    experiment.checkpoint.keep_at, experiment.evaluate.average = (0,), 2
    assert train(experiment, str(tmp_path)) == 0
    said = capsys.readouterr().err
    assert "config.evaluate.average is 2, but only 1 of the last checkpoints can be averaged\n" in said
    assert "average of the parameters of steps 1: validation loss" in said  # without step 0, which is in keep_at
    for what in ("the baseline", "curves.png", "samples"):
        assert f"the run is done and saved, but without {what}: MemoryError: no room\n" in said
    assert "validation loss" in said and "goodput" in said  # the table, and the lines after it


@pytest.mark.slow
def test_a_signal_leaves_out_what_is_left_and_the_run_is_done(experiment, tmp_path, monkeypatch, capsys):
    compare = final_report._compare

    def interrupted(loop, params):
        os.kill(os.getpid(), signal.SIGTERM)
        while not loop.is_stopping:
            time.sleep(0.01)
        return compare(loop, params)

    monkeypatch.setattr(final_report, "_compare", interrupted)
    assert train(experiment, str(tmp_path)) == 0
    said = capsys.readouterr().err
    assert "SIGTERM: the run is done and saved, skipping its remaining tables and samples" in said
    assert "validation loss" in said and "unigram" not in said.partition("validation loss")[2]
    assert "  (no more samples after a signal)" in said and "  · " not in said
    assert (tmp_path / "curves.png").exists()


def test_without_a_validation_the_run_fails_and_says_that_it_is_saved():
    def validate(params):
        raise OSError("the text is gone")

    run = SimpleNamespace(validate=validate, validated=lambda state: state, peers=Watchdog())
    loop = SimpleNamespace(run=run, last_evaluation=None, preemption=PreemptionHandler())
    with pytest.raises(
        RunFailed, match="the run is done and saved, but its validation failed: OSError: the text is gone"
    ):
        finish.finish(loop, None)
