"""A run of a tiny GPT-2 with three checkpoints, for tests of whatever reads one; conftest.py files take it up."""

import shutil

import jax
import pytest

from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.tokenization.base import load_tokenizer
from tests.golden import CASES
from tests.golden.case import weights
from tests.support.checkpoints import State
from tests.support.huggingface_weights import write_run

LOSSES = {10: 3.25, 20: 2.5, 30: 2.75}  # of the steps of `run`


def weights_at(step: int):
    """The parameters of a step of `run`: those of the case, scaled."""
    return jax.tree.map(lambda x: x * (step / 7), weights(CASES["gpt2"].config))


@pytest.fixture(scope="session")
def made_run(tmp_path_factory):
    """A run of the tiny GPT-2 with three checkpoints, of which that of step 20 is the best."""
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
    """A copy of that run, to be damaged."""
    return shutil.copytree(made_run, tmp_path / "run")
