"""Tests the number of loader processes, which depends on the time to make a batch and the time of a step."""

import pytest

from pretrainax.config import UserError
from pretrainax.data.sources import TextFiles
from pretrainax.runs.train import open_run
from pretrainax.training import loader_size, work
from pretrainax.training.loader_size import processes_for, size_loader
from tests.support import tiny


@pytest.fixture
def run(text, cache):
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    with open_run(experiment) as run:
        yield run


def with_a_chip(monkeypatch, run, busy):
    """Sets the devices' peak so that making a batch, 0.1 s, takes the fraction `busy` of a step at 60 % of the peak."""
    monkeypatch.setattr(
        work, "peak_flops", lambda kind: run.work.flops_done_per_step / run.mesh.size / 0.6 / (0.1 / busy)
    )
    monkeypatch.setattr(loader_size, "seconds_to_make", lambda run: 0.1)
    monkeypatch.setattr(loader_size.os, "cpu_count", lambda: 16)


@pytest.mark.parametrize(
    ("busy", "cores", "processes"),
    [(0.1, 16, 0), (0.5, 16, 0), (0.51, 16, 1), (0.88, 16, 2), (4.0, 16, 6), (40.0, 16, 15), (40.0, 1, 1)],
)
def test_processes_keep_up_with_half_as_much_again(busy, cores, processes):
    assert processes_for(busy, cores) == processes


def test_a_thread_that_would_be_busy_most_of_the_time_gives_way_to_processes(run, monkeypatch):
    with_a_chip(monkeypatch, run, 0.88)
    size = size_loader(run)
    assert run.experiment.data.workers == size.workers == 2
    assert size.row() == ("loader", "a batch takes 100 ms, a step 114 ms at 60% MFU: 2 processes")


def test_what_a_user_asks_for_stays_and_is_called_too_few(run, monkeypatch):
    with_a_chip(monkeypatch, run, 4.0)
    run.experiment.data.workers = 0
    _, said = size_loader(run).row()
    assert run.experiment.data.workers == 0
    assert said.endswith("a step 25 ms at 60% MFU: a thread, TOO FEW: set config.data.workers to 6")


def test_without_shared_memory_a_thread_makes_them_and_the_row_says_so(run, monkeypatch):
    def none(*_, **__):
        raise UserError("no /dev/shm")

    with_a_chip(monkeypatch, run, 0.88)
    monkeypatch.setattr(loader_size, "check_shared_memory", none)
    assert size_loader(run).row()[1].endswith("a thread, TOO FEW: set config.data.workers to 2")


def test_on_devices_of_unknown_speed_a_thread_makes_batches(run, monkeypatch):
    monkeypatch.setattr(loader_size, "seconds_to_make", lambda run: 1 / 0)
    assert size_loader(run) is None and run.experiment.data.workers == 0


def test_the_time_of_a_batch_is_without_what_the_first_one_opens(run):
    assert 0 < loader_size.seconds_to_make(run) < 60
