"""Tests that trackers never delay a run: a failure prints one line, and a run does not wait for a stuck tracker."""

import dataclasses
import threading
import time

import pytest

from pretrainax.config import UserError
from pretrainax.config.overrides import set_field
from pretrainax.config.validation import validate
from pretrainax.trackers import (
    MLflow,
    TensorBoard,
    TrackedRun,
    Tracker,
    Trackers,
    WandB,
    Writer,
    background,
    check_trackers,
)
from tests.support import tiny

RUN = TrackedRun("somewhere")


@dataclasses.dataclass
class Noting(Tracker, Writer):
    """A tracker that records its calls, and may fail or wait at a step."""

    fails_at: int = -1
    waits_at: int = -1
    fails_to_open: bool = False

    def __post_init__(self):
        self.calls, self.go_on, self.waits = [], threading.Event(), threading.Event()

    def describe(self, workdir):
        return "a list"

    def open(self, run):
        if self.fails_to_open:
            raise ConnectionError("no network\nat https://me:hunter2@host")
        self.calls.append("open")
        return self

    def write_metrics(self, step, split, values):
        if step == self.fails_at:
            raise OSError(28, "No space left on device")
        if step == self.waits_at:
            self.waits.set()
            self.go_on.wait()
        self.calls.append((step, split, dict(values)))

    def write_text(self, step, name, text):
        self.calls.append((step, name, text))

    def rewind(self, step):
        self.calls.append(f"rewind {step}")

    def finish(self, step, metrics):
        self.calls.append((step, "final", dict(metrics)))

    def close(self, done):
        self.calls.append(f"close {done}")


def used(tracker, said, steps):
    trackers = Trackers([tracker], RUN, said.append)
    for step in steps:
        trackers.log_metrics(step, "train", {"loss": 1.0})
    return trackers


def test_calls_come_in_their_order_and_the_last_figures_at_the_last_step():
    noting, said = Noting(), []
    trackers = used(noting, said, [1, 2])
    trackers.rewind(1)
    trackers.log_metrics(2, "valid", {"loss": 2.0})
    trackers.finish({"loss": 2.0, "f1": float("nan")})
    trackers.log_text("samples", "a b")
    trackers.close()
    lines = [(step, "train", {"loss": 1.0}) for step in (1, 2)]
    final = [(2, "valid", {"loss": 2.0}), (2, "final", {"loss": 2.0}), (2, "samples", "a b"), "close True"]
    assert noting.calls == ["open", *lines, "rewind 1", *final] and said == []


def test_a_run_that_does_not_come_to_its_end_is_closed_as_such():
    noting = Noting()
    used(noting, [], [1]).close()
    assert noting.calls[-1] == "close False"


def test_nothing_is_opened_for_a_run_that_shows_nothing():
    noting = Noting()
    Trackers([noting], RUN, print).close()
    assert noting.calls == []


@pytest.mark.parametrize("failing", [Noting(fails_at=2), Noting(fails_to_open=True)])
def test_a_tracker_that_fails_is_said_once_and_the_others_go_on(failing):
    said, other = [], Noting()
    trackers = Trackers([failing, other], RUN, said.append)
    for step in range(1, 50):
        trackers.log_metrics(step, "train", {"loss": 1.0})
    trackers.close()
    (line,) = said
    assert line.startswith("tracker Noting is disabled: ")
    assert line.endswith("; metrics.jsonl is complete") and "\n" not in line and "hunter2" not in line
    assert len(other.calls) == 51  # Includes open and close.


def test_a_tracker_that_is_stuck_does_not_hold_the_run_and_what_is_dropped_is_counted(monkeypatch):
    monkeypatch.setattr(background, "_MAX_QUEUED", 5)
    monkeypatch.setattr(background, "_CLOSING_SECONDS", 0.2)
    stuck, said = Noting(waits_at=1), []
    started = time.monotonic()
    trackers = used(stuck, said, [1])
    assert stuck.waits.wait(60)
    for step in range(2, 101):
        trackers.log_metrics(step, "train", {"loss": 1.0})
    trackers.close()
    assert time.monotonic() - started < 5  # The limit is 0.2 s; the rest is for a busy machine.
    assert said[0] == "tracker Noting is slower than the run and drops entries; metrics.jsonl is complete"
    assert said[1].startswith("tracker Noting is disabled: it is stuck with 5 queued entries")
    assert said[2] == "tracker Noting dropped 94 entries; metrics.jsonl is complete"
    stuck.go_on.set()


def test_a_tracker_that_does_not_end_in_time_is_said(monkeypatch):
    monkeypatch.setattr(background, "_CLOSING_SECONDS", 0.1)
    stuck, said = Noting(waits_at=1), []
    used(stuck, said, [1]).close()
    assert said == ["tracker Noting is disabled: it did not finish within 0.1 s; metrics.jsonl is complete"]
    stuck.go_on.set()


def test_a_rollback_that_a_stuck_tracker_would_miss_leaves_it_out(monkeypatch):
    monkeypatch.setattr(background, "_MAX_QUEUED", 2)
    stuck, said = Noting(waits_at=1), []
    trackers = used(stuck, said, [1])
    assert stuck.waits.wait(60)
    for step in (2, 3):
        trackers.log_metrics(step, "train", {"loss": 1.0})
    trackers.rewind(1)
    assert "is disabled: it is stuck and missed a rollback" in said[-1]
    stuck.go_on.set()


# --- the field -------------------------------------------------------------------------------------------------------


def test_a_run_is_shown_in_tensorboard_where_nothing_is_said():
    assert tiny.get_config("gpt").trackers == (TensorBoard(),)


def test_a_flag_gives_them_all():
    experiment = tiny.get_config("gpt")
    set_field(experiment, "config.trackers", "(WandB(project='t5'), TensorBoard())")
    assert experiment.trackers == (WandB(project="t5"), TensorBoard())
    set_field(experiment, "config.trackers", "()")
    assert experiment.trackers == ()


@pytest.mark.parametrize(
    "trackers, said",
    [
        ((TensorBoard(), TensorBoard()), "config.trackers has TensorBoard more than once"),
        ((WandB(project=""),), "WandB.project of config.trackers is empty"),
        ((MLflow(experiment=""),), "MLflow.experiment of config.trackers is empty"),
        ((MLflow(tracking_uri="http://me:hunter2@host"),), "has a password, .* MLFLOW_TRACKING_PASSWORD"),
        ((WandB(mode="ofline"),), "mode is 'ofline', it must be 'online' or 'offline'"),
    ],
)
def test_mistakes_are_named(trackers, said):
    experiment = tiny.get_config("gpt")
    experiment.trackers = trackers
    with pytest.raises(UserError, match=said):
        validate(experiment, files=False)


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"config.trackers has WandB, which needs the package wandb: pip install 'pretrainax\[wandb"
    ):
        check_trackers([TensorBoard(), WandB()])
