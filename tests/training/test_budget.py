"""Tests that a budget in FLOPs or time becomes a number of steps before the run, which a resumed run keeps."""

import json
import time
import types

import pytest

from pretrainax.checkpoints.workdir import adopt_steps, check_workdir
from pretrainax.config import AUTO, UserError, dump
from pretrainax.config.budget import RunBudget
from pretrainax.config.overrides import set_field
from pretrainax.training import budget as budget_lib
from pretrainax.training.budget import resolve_budget
from tests.support import runs, tiny


def with_budget(text, **fields):
    experiment = tiny.get_config("gpt")
    set_field(experiment, "config.train.budget", text)
    for name, value in fields.items():
        set_field(experiment, f"config.{name.replace('__', '.')}", value)
    return experiment


def resolved(experiment, flops=10.0):
    """Returns the config after `resolve_budget`, for a run with `flops` FLOPs per step."""

    def build(trial):
        assert trial.train.steps > 0 and trial.train.budget is None
        streams = [types.SimpleNamespace(lengths=[None])]
        batches, work = types.SimpleNamespace(streams=streams), types.SimpleNamespace(flops_per_step=flops)
        return types.SimpleNamespace(train_batches=batches, work=work, is_primary=True)

    resolve_budget(experiment, build)  # pyright: ignore[reportArgumentType]
    return experiment


@pytest.mark.parametrize(
    "text, amount, unit",
    [
        ("3 epochs", 3, "epochs"),
        ("1epoch", 1, "epochs"),
        ("1e15 FLOPs", 1e15, "flops"),
        ("20 min", 1200, "seconds"),
        (" .5 hours ", 1800, "seconds"),
        ("90s", 90, "seconds"),
    ],
)
def test_a_budget_is_a_number_and_a_unit(text, amount, unit):
    assert RunBudget.parse(text) == (amount, unit)


@pytest.mark.parametrize(
    "text", ["", "3", "min", "3 parsecs", "-1 epochs", "1e epochs", "0 flops", "1e999 min", "3 3 s"]
)
def test_other_text_is_no_budget(text):
    with pytest.raises(ValueError, match="it must be"):
        RunBudget.parse(text)


def test_flops_become_steps_and_the_rest_follows():
    experiment = resolved(with_budget("1239 flops"))
    assert (experiment.train.steps, experiment.train.budget) == (123, None)
    assert (experiment.schedule.warmup_steps, experiment.evaluate.every, experiment.checkpoint.every) == (12, 12, 12)


def test_time_becomes_steps(monkeypatch):
    monkeypatch.setattr(budget_lib, "_seconds_per_step", lambda run: 0.5)
    assert resolved(with_budget("2 min")).train.steps == 240


def test_numbers_that_are_set_stay():
    experiment = resolved(with_budget("1239 flops", schedule__warmup_steps="7", evaluate__every="5"))
    assert (experiment.schedule.warmup_steps, experiment.evaluate.every, experiment.checkpoint.every) == (7, 5, 12)


@pytest.mark.parametrize("text, cost", [("9 flops", "10 FLOPs"), ("0.2 s", "0.5 s")])
def test_a_budget_below_one_step_is_refused(text, cost, monkeypatch):
    monkeypatch.setattr(budget_lib, "_seconds_per_step", lambda run: 0.5)
    with pytest.raises(UserError, match=f"config.train.budget is '{text}', less than one step, which takes {cost}"):
        resolved(with_budget(text))
    assert resolved(with_budget("10 flops")).train.steps == 1


def test_a_budget_of_too_many_steps_is_one_line():
    with pytest.raises(UserError, match="config.train.steps is .*, it must be at most 2147483647"):
        resolved(with_budget("1e20 flops"))


def test_a_run_with_steps_keeps_them_and_a_new_one_does_not(tmp_path):
    first = resolved(with_budget("1239 flops"))
    (tmp_path / "config.json").write_text(dump(first))
    again = with_budget("1239 flops")
    assert adopt_steps(str(tmp_path), again) == [] and again.train.steps == 0 and again.schedule.warmup_steps == AUTO
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert adopt_steps(str(tmp_path), again)[0][1].startswith("123, ") and again == first


def test_a_run_with_a_budget_is_extended_by_the_flags_that_it_prints(tmp_path):
    (tmp_path / "config.json").write_text(dump(resolved(with_budget("1239 flops"))))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    ((_, row),) = adopt_steps(str(tmp_path), with_budget("1239 flops"))
    flags = "--config.train.budget=none --config.train.steps=N --config.schedule.warmup_steps=12 --extend"
    assert row == f"123, as the run began; to extend it, replace the budget by {flags}"
    arguments = [flag.removeprefix("--").replace("=N", "=200") for flag in flags.split()[:-1]]
    for longer in (tiny.get_config("gpt"), with_budget("1239 flops")):  # The budget was a flag, or is in the config.
        for path, _, value in (argument.partition("=") for argument in arguments):
            set_field(longer, path, value)
        assert check_workdir(str(tmp_path), longer, extend=True).startswith("extended from 123 to 200 steps")


@pytest.mark.slow
def test_a_killed_run_of_a_time_resumes_with_its_number_of_steps_and_ends_bit_identical(tmp_path):
    text = runs.write_text(tmp_path / "text")
    args = f"{runs.TINY}:gpt", tmp_path / "run", text, tmp_path / "cache", "--config.train.budget=1 s", runs.SAVING
    process = runs.start(runs.command(*args))
    while process.poll() is None and not any((tmp_path / "run" / "checkpoints").glob("[0-9]*")):
        time.sleep(0.01)
    process.kill()
    process.wait()
    steps = json.loads((tmp_path / "run" / "config.json").read_text())["train"]["steps"]
    assert steps > 0
    assert runs.run(runs.command(*args)).returncode == 0
    every = f"{max(steps // 10, 1)}"
    flags = [f"--config.train.steps={steps}", f"--config.schedule.warmup_steps={steps // 10}", runs.SAVING]
    flags += [f"--config.evaluate.every={every}"]
    assert runs.run(runs.command(args[0], tmp_path / "whole", text, tmp_path / "cache", *flags)).returncode == 0
    runs.assert_same_run(tmp_path / "run", tmp_path / "whole")
