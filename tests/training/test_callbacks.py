"""Tests callbacks: they receive each step, may stop, save and evaluate, and an exception in one prints one line."""

import dataclasses
import json
import time

import pytest

from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.config import RunFailed, UserError, load
from pretrainax.data.sources import TextFiles
from pretrainax.runs.train import train
from pretrainax.runtime import goodput
from pretrainax.training import train as core
from pretrainax.training.callbacks import Callback, Callbacks
from pretrainax.training.metrics import read_metrics
from tests.support import tiny


@pytest.fixture
def experiment(text, cache):
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.train.steps, experiment.train.log_every, experiment.schedule.warmup_steps = 6, 2, 1
    experiment.evaluate.every, experiment.evaluate.batches, experiment.checkpoint.every = 4, 1, 100
    return experiment


@pytest.fixture(autouse=True)
def without_the_end(request, monkeypatch):
    if "end" not in request.node.name:
        monkeypatch.setattr(core, "finish", lambda *_: None)


@dataclasses.dataclass
class Recording(Callback):
    """A callback that records each call."""

    word: str = "seen"

    def __post_init__(self):
        self.calls, self.batches = [], []

    def rows(self, run):
        return [(self.word, f"{run.parameters:,} parameters"), ("number", 1)]

    def on_batch(self, step, batch):
        self.batches.append(step)

    def log_metrics(self, loop, state):
        assert loop.sums["loss"]
        return {self.word: loop.step / 2, "apart": {"of": [loop.step]}}


def noted(method):
    def call(self, loop, state, metrics):
        assert int(state.step) == loop.step
        self.calls.append((method, loop.step, "loss" in metrics or "sums" in metrics))

    return call


METHODS = ("on_start", "before_step", "on_step", "on_log", "on_evaluate", "on_save", "on_end")
for name in METHODS:
    setattr(Recording, name, noted(name))


def test_each_step_is_seen_to_the_end(experiment, tmp_path, capsys):
    recording = Recording("my_figure")
    experiment.callbacks = (recording,)
    assert train(experiment, str(tmp_path)) == 0
    expected = [("on_start", 0, False)]
    for step in range(1, 7):
        expected += [("before_step", step - 1, False), ("on_step", step, True)]
        expected += [("on_log", step, True)] * (step % 2 == 0)
        expected += [("on_evaluate", step, True)] * (step in (4, 6))
        expected += [("on_save", step, True)] * (step in (4, 6))  # the best and the last checkpoint
    assert recording.calls == [*expected, ("on_end", 6, True)]
    assert recording.batches == [1, 2, 3, 4, 5, 6]
    lines = [line for line in read_metrics(str(tmp_path / "metrics.jsonl")) if line["split"] == "train"]
    assert [(line["my_figure"], line["apart"]) for line in lines] == [(n / 2, {"of": [n]}) for n in (2, 4, 6)]
    assert "\n  my_figure  " in (said := capsys.readouterr().err) and " parameters\n" in said


@pytest.mark.slow
def test_a_config_names_its_callbacks_and_one_without_any_is_written_as_before(experiment, tmp_path):
    assert train(experiment, str(tmp_path / "none")) == 0
    assert "callbacks" not in json.loads((tmp_path / "none" / "config.json").read_text())
    experiment.callbacks, experiment.train.steps = (Recording("other"),), 2
    assert train(experiment, str(tmp_path / "one")) == 0
    assert load(str(tmp_path / "one" / "config.json")).callbacks == (Recording("other"),)
    experiment.callbacks = ()  # A callback does not change the mathematics.
    assert train(experiment, str(tmp_path / "one")) == 0


class Stopping(Callback):
    def on_step(self, loop, state, metrics):
        if loop.step == 3:
            loop.stop("as good as it gets")


class Asking(Callback):
    def on_step(self, loop, state, metrics):
        if loop.step == 3:
            loop.request("evaluation", "checkpoint")


def test_a_run_that_is_stopped_is_saved_and_goes_on_with_the_same_command(experiment, tmp_path, capsys):
    assert train(experiment, str(tmp_path), callbacks=[Stopping()]) == 0
    assert "stopped after step 3: as good as it gets\n" in capsys.readouterr().err
    assert read_run_json(str(tmp_path / "checkpoints" / "3"))["metrics"]["loss"]
    lines = read_metrics(str(tmp_path / "metrics.jsonl"))
    assert [(line["step"], line["split"]) for line in lines] == [(2, "train"), (3, "train"), (3, "valid")]
    assert train(experiment, str(tmp_path)) == 0
    assert (tmp_path / "checkpoints" / "6").is_dir()


@pytest.mark.slow
def test_a_validation_and_a_checkpoint_that_are_asked_for_are_made(experiment, tmp_path):
    experiment.checkpoint.keep = 9
    assert train(experiment, str(tmp_path), callbacks=[Asking()]) == 0
    lines = read_metrics(str(tmp_path / "metrics.jsonl"))
    assert [line["step"] for line in lines if line["split"] == "valid"] == [3, 4, 6]
    assert (tmp_path / "checkpoints" / "3").is_dir()


@pytest.mark.first(1)
@pytest.mark.parametrize("method", ["on_step", "on_batch"])  # in this thread, and in the loader's thread
def test_an_exception_ends_the_run_with_one_line(experiment, tmp_path, method):
    def fail(self, *args):
        raise ValueError("no\nsuch thing")

    failing = type("Failing", (Callback,), {method: fail})()
    with pytest.raises(RunFailed) as error:
        train(experiment, str(tmp_path), callbacks=[failing])
    assert str(error.value) == f"callback Failing.{method} failed: ValueError: no such thing"


@pytest.mark.parametrize(
    "method, name", [("log_metrics", "loss"), ("evaluation_metrics", "loss"), ("evaluation_metrics", "flops")]
)
def test_a_callback_that_would_replace_a_metric_ends_the_run(experiment, tmp_path, method, name):
    experiment.train.steps = experiment.train.log_every = experiment.evaluate.every = 1
    replacing = type("Replacing", (Callback,), {method: lambda self, loop, state: {name: 0.0}})()
    with pytest.raises(UserError, match=f"callback Replacing.{method} returns '{name}', a name of the run"):
        train(experiment, str(tmp_path), callbacks=[replacing])


def test_an_exception_in_close_is_one_line_after_all_callbacks_are_closed():
    closed = []

    def fail(self):
        raise ValueError("no\nsuch thing")

    recording = type("Recording", (Callback,), {"close": lambda self: closed.append(self)})()
    callbacks = Callbacks([recording, type("Failing", (Callback,), {"close": fail})()], None)
    with pytest.raises(RunFailed, match="^callback Failing.close failed: ValueError: no such thing$"):
        with callbacks.closing():
            pass
    assert closed == [recording]


@pytest.mark.slow
def test_at_the_end_it_is_a_line_and_the_run_is_whole(experiment, tmp_path, capsys):
    def fail(self, *args):
        raise ValueError("no such thing")

    failing = type("Failing", (Callback,), {"on_end": fail})()
    assert train(experiment, str(tmp_path), callbacks=[failing]) == 0
    said = "the run is done and saved, but without Failing: ValueError: no such thing\n"
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_slow_one_is_a_part_of_the_time_in_the_end(experiment, tmp_path, capsys):
    class Slow(Callback):
        def on_log(self, loop, state, metrics):
            time.sleep(0.3)

    assert train(experiment, str(tmp_path), callbacks=[Slow()]) == 0
    (start,) = json.loads((tmp_path / "goodput.json").read_text())
    assert start["seconds"]["callback Slow"] >= 0.9
    assert "  callback Slow " in capsys.readouterr().err
    assert goodput.total([start])["callback Slow"] == start["seconds"]["callback Slow"]


@pytest.mark.slow
def test_training_alone_refuses_what_it_cannot_start_from(experiment, tmp_path):
    experiment.checkpoint.init_from = str(tmp_path)
    with pytest.raises(UserError, match="config.checkpoint.init_from is set, but pretrainax.training supports"):
        core.train(experiment, str(tmp_path / "run"))
