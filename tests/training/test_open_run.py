"""Tests `open_run`: it builds a run on prepared data, under its mesh, and leaves nothing behind."""

import contextlib

import jax
import pytest

from pretrainax.config import UserError
from pretrainax.data.packing import BestFit
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import TextFiles
from pretrainax.runs.train import open_run
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.sharding.mesh import AXES
from pretrainax.training import run as training
from tests.support import tiny


@pytest.fixture
def experiment(text, cache):
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    return experiment


def test_a_run_is_open_under_its_mesh_and_no_longer(experiment):
    with open_run(experiment) as run:
        assert jax.sharding.get_abstract_mesh().axis_names == AXES
        assert run.mesh.size == 8 and run.is_primary
        assert run.abstract_state.params.keys() == run.fresh_state().params.keys()
    assert jax.sharding.get_abstract_mesh().empty


def test_plans_of_packed_rows_are_made_while_the_other_processes_wait(experiment, tmp_path, monkeypatch):
    experiment.data.packing, experiment.data.cache_dir = BestFit(), str(tmp_path)
    zero_first, made = Watchdog.zero_first, []

    @contextlib.contextmanager
    def watched(self):
        with zero_first(self):
            yield
            made.extend(tmp_path.rglob("rows-*"))

    monkeypatch.setattr(Watchdog, "zero_first", watched)
    with open_run(experiment):
        assert len(made) == 2 and made == list(tmp_path.rglob("rows-*"))


def test_signals_count_once_the_data_is_there(experiment):
    order = []

    def prepare_data(experiment):
        order.append("data")
        return prepare(experiment)

    @contextlib.contextmanager
    def preemption():
        order.append("signals")
        yield
        order.append("no signals")

    with training.open_run(experiment, prepare_data, preemption()):
        order.append("run")
    assert order == ["data", "signals", "run", "no signals"]


def test_a_run_that_cannot_be_built_leaves_no_mesh(experiment):
    experiment.train.global_batch_size = 12
    with pytest.raises(UserError, match="global_batch_size 12"), open_run(experiment):
        pass
    assert jax.sharding.get_abstract_mesh().empty
