"""Compares runs that share a process and compiled programs with runs in separate processes."""

import copy
import gc
import os
import pathlib
import runpy
import subprocess

import pytest

from pretrainax.config import RunFailed, Transfer, UserError
from pretrainax.optim import Muon, WarmupLinear
from pretrainax.runs import train as runs_train
from pretrainax.runs.save_check import SaveCheck
from pretrainax.runtime.shared_programs import Programs
from pretrainax.studies.trainer import Trainer
from pretrainax.training import run as training_run
from tests.support.runs import assert_same_run, command, run, write_text

get_config = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "support" / "tiny.py"))["get_config"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    write_text(folder / "text")
    return folder


def config(folder, family="gpt", **train):
    experiment = get_config(family)
    experiment.data.source.path, experiment.data.cache_dir = str(folder / "text"), str(folder / "cache")
    experiment.train.steps, experiment.trackers = 8, ()
    for name, value in train.items():
        setattr(experiment.train, name, value)
    return experiment


def changed(folder):
    """Returns a config that differs from `config` in everything that runs with a shared program may differ in."""
    experiment = config(folder, seed=-7, steps=11)
    experiment.optimizer.learning_rate, experiment.optimizer.weight_decay = 1e-3, 0.3
    experiment.schedule = WarmupLinear(warmup_steps=2)
    return experiment


@pytest.fixture(scope="module")
def alone(folder):
    """Trains the run of `changed` with its own programs."""
    assert runs_train.train(changed(folder), str(folder / "alone")) == 0
    return folder / "alone"


@pytest.fixture(scope="module")
def trainer(folder):
    """Returns a trainer that has trained the run of `config`."""
    trainer = Trainer()
    assert trainer.train(config(folder), str(folder / "first")) == 0
    return trainer


def test_a_run_that_shares_its_programs_equals_one_that_does_not(folder, trainer, alone, monkeypatch):
    # The trainer must not trace the step again.
    monkeypatch.setattr(training_run, "build_steps", lambda *arguments: 1 / 0)
    assert trainer.train(changed(folder), str(folder / "shared")) == 0
    assert_same_run(folder / "shared", alone)


def test_the_next_run_starts_after_a_crash_and_the_crashed_run_resumes(folder, trainer, alone, monkeypatch):
    with monkeypatch.context() as patch:
        crash = lambda self, loop, state, metrics: 1 / (loop.step != 8)  # noqa: E731
        patch.setattr(SaveCheck, "on_step", crash)
        with pytest.raises(RunFailed, match="ZeroDivisionError"):
            trainer.train(changed(folder), str(folder / "resumed"))
    assert trainer.train(changed(folder), str(folder / "resumed")) == 0
    assert_same_run(folder / "resumed", alone)


@pytest.mark.slow
def test_a_run_with_transfer_shares_its_programs_and_resumes(folder, trainer, monkeypatch):
    def transferred(rate):
        experiment = config(folder)
        experiment.transfer, experiment.optimizer.learning_rate = Transfer(base_width=16, base_depth=1), rate
        return experiment

    assert runs_train.train(transferred(1e-3), str(folder / "alone-transfer")) == 0
    assert trainer.train(transferred(2e-3), str(folder / "first-transfer")) == 0
    # The trainer must not trace the step again.
    monkeypatch.setattr(training_run, "build_steps", lambda *arguments: 1 / 0)
    with monkeypatch.context() as patch:
        crash = lambda self, loop, state, metrics: 1 / (loop.step != 6)  # noqa: E731
        patch.setattr(SaveCheck, "on_step", crash)
        with pytest.raises(RunFailed, match="ZeroDivisionError"):
            trainer.train(transferred(1e-3), str(folder / "resumed-transfer"))
    assert trainer.train(transferred(1e-3), str(folder / "resumed-transfer")) == 0
    assert_same_run(folder / "resumed-transfer", folder / "alone-transfer")


def test_a_mistake_in_a_config_is_an_error(folder, trainer):
    experiment = config(folder)
    experiment.optimizer.learning_rate = -1.0
    with pytest.raises(UserError, match="config.optimizer.learning_rate is -1.0, "):
        trainer.train(experiment, str(folder / "wrong"))


def test_a_run_does_not_change_the_config_that_it_was_given(folder, trainer):
    experiment = config(folder)
    trainer.train(experiment, str(folder / "first"))
    assert experiment == config(folder)


def test_programs_drop_the_least_recently_used():
    programs, built = Programs(2), []
    for key in ("a", "b", "a", "c", "a", "b"):
        programs.get(key, lambda key=key: built.append(key))
    assert built == ["a", "b", "c", "b"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_run_equals_that_of_the_command(folder, family):
    shared, flags = Trainer(), ("--config.train.seed=3", "--config.optimizer=Muon(adam_learning_rate=1e-3)")
    experiment = config(folder, family)
    experiment.optimizer = Muon()
    assert shared.train(copy.deepcopy(experiment), str(folder / family / "first")) == 0
    experiment.train.seed, experiment.optimizer = 3, Muon(adam_learning_rate=1e-3)
    assert shared.train(experiment, str(folder / family / "shared")) == 0
    words = command(f"tests/support/tiny.py:{family}", folder / family / "alone", folder / "text", folder / "cache")
    flags += ("--config.train.steps=8", "--config.trackers=()")
    # The environment gives the command the same number of devices.
    done: subprocess.CompletedProcess = run([*words, *flags], env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert_same_run(folder / family / "shared", folder / family / "alone")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_runs(folder, trainer):
    sizes = []
    for seed in range(15):
        assert trainer.train(config(folder, seed=seed), str(folder / f"seed-{seed}")) == 0
        gc.collect()
        sizes.append(int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096)
    # The allocator retains freed memory. The state of this model alone has 0.2 MB, and a compiled program about 20 MB.
    assert sizes[14] - sizes[4] < 20e6
