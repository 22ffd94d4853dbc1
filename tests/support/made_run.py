"""A run of a tiny GPT-2 with three checkpoints, for tests that read a run; conftest.py files import its fixtures."""

import shutil

import jax
import pytest

from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.tokenization.base import load_tokenizer
from tests.golden import CASES
from tests.golden.case import weights
from tests.support.checkpoints import State
from tests.support.huggingface_weights import write_run

LOSSES = {10: 3.25, 20: 2.5, 30: 2.75}  # validation losses of the steps of `run`


def weights_at(step: int):
    """Returns the parameters of a step of `run`, which are the scaled parameters of the case."""
    return jax.tree.map(lambda x: x * (step / 7), weights(CASES["gpt2"].config))


@pytest.fixture(scope="session")
def made_run(tmp_path_factory):
    """Writes a run of the tiny GPT-2 with three checkpoints; step 20 is the best one."""
    workdir = write_run(tmp_path_factory.mktemp("loaded") / "run", CASES["gpt2"].config)
    shutil.rmtree(workdir / "checkpoints")
    checkpoints = Checkpoints(str(workdir / "checkpoints"), keep=10)
    extra = {"tokenizer": load_tokenizer(str(workdir / "tokenizer")).fingerprint}
    for step, loss in LOSSES.items():
        params = jax.device_put(weights_at(step), jax.devices()[0])
        state = State(step=jax.device_put(step), params=params, opt_state=())
        checkpoints.save(step, state, extra, {"loss": loss})
    checkpoints.close()
    return workdir


@pytest.fixture
def run(made_run, tmp_path):
    """Returns a copy of `made_run` that a test may damage."""
    return shutil.copytree(made_run, tmp_path / "run")
