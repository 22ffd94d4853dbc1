"""Invalid calls of pretrainax.open and pretrainax.train give an error of one line; paths need not be strings."""

import pathlib
import types

import jax.numpy as jnp
import numpy as np
import pytest

import pretrainax
from pretrainax import api
from pretrainax.config import UserError
from tests.support import tiny


@pytest.mark.parametrize("experiment", ["gpt2:tiny", None])
def test_what_is_no_config_is_named(experiment):
    for call in (pretrainax.open, lambda e: pretrainax.train(e, "runs/mine")):
        with pytest.raises(UserError, match=f"experiment is {experiment!r}, it must be an Experiment: .*read_config_f"):
            call(experiment)


def test_a_class_is_no_callback():
    with pytest.raises(UserError, match=r"callbacks has <class .*Callback'>, each must be an object of a subclass of"):
        pretrainax.train(tiny.get_config("gpt"), "runs/mine", callbacks=(pretrainax.Callback,))


def test_a_workdir_may_be_a_path_and_begin_with_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(api, "_initialize", lambda experiment: experiment)
    monkeypatch.setattr(api, "train_run", lambda experiment, folder, **_: folder)
    for workdir in ("~/runs/a b", pathlib.Path("~/runs/a b")):
        assert pretrainax.train(tiny.get_config("gpt"), workdir) == "/home/me/runs/a b"
    with pytest.raises(UserError, match="workdir is 'hdfs://a/b': hdfs:// is not a supported store"):
        pretrainax.train(tiny.get_config("gpt"), "hdfs://a/b")


@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_a_state_that_a_step_has_donated_is_one_line(method):
    """A step on several CPU devices would wait forever."""
    state = {"kept": np.ones(2), "donated": jnp.ones(2)}
    state["donated"].delete()
    run = pretrainax.OpenRun(types.SimpleNamespace(mesh=None))
    with pytest.raises(UserError, match="use the state that run.step returned"):
        getattr(run, method)(*[state, {}][: 2 if method == "step" else 1])
