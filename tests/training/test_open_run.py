"""A run is opened on prepared data, under its mesh, and leaves nothing behind."""

import contextlib

import jax
import pytest

from pretrainax.config import UserError
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import TextFiles
from pretrainax.sharding.mesh import AXES
from pretrainax.training.setup import open_run
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

    with open_run(experiment, prepare_data, preemption()):
        order.append("run")
    assert order == ["data", "signals", "run", "no signals"]


def test_a_run_that_cannot_be_built_leaves_no_mesh(experiment):
    experiment.train.global_batch_size = 12
    with pytest.raises(UserError, match="global_batch_size 12"), open_run(experiment):
        pass
    assert jax.sharding.get_abstract_mesh().empty


@pytest.mark.parametrize("changes, wanted", [({}, []), ({"use_bias": False}, []), ({"norm": "rms"}, ["norm='rms'"])])
def test_what_cannot_be_exported_is_said_before_the_first_step(experiment, changes, wanted):
    for name, value in changes.items():
        setattr(experiment.model, name, value)
    with open_run(experiment) as run:
        rows = run.describe_export()
    assert [name for name, _ in rows] == ["WARNING"] * len(wanted)
    for (_, line), words in zip(rows, wanted, strict=True):
        assert line.startswith("cannot be exported to transformers: no architecture") and line.endswith(words)
