"""`python -m pretrainax.profile` prints and plots the table of a profile, and reports missing files."""

import os
import subprocess
import sys

import pytest

from pretrainax.config import dump
from pretrainax.runtime.recorder import FOLDER, files_of
from tests.profiling.test_trace import STEPS, step_proto, tpu_lines
from tests.support import tiny
from tests.support.runs import ROOT
from tests.support.xspace import xspace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Writes a run with a hand-made profile of a TPU at steps 7 and 8."""
    made = tmp_path_factory.mktemp("run")
    experiment = tiny.get_config("gpt")
    experiment.data.source.path = str(made)
    (made / "config.json").write_text(dump(experiment))
    directory = made / FOLDER / "step_7"
    os.makedirs(directory)
    planes = [("/host:CPU", {"python": list(STEPS)}), ("/device:TPU:0", tpu_lines())]
    with open(files_of(str(directory), 0).trace, "wb") as f:
        f.write(xspace(planes, {"jit_step(5)": step_proto()}))
    return made


def profile(*flags):
    args = [sys.executable, "-m", "pretrainax.profile", *flags]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(args, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def test_the_table_is_printed_beside_the_plan_and_drawn(workdir, tmp_path):
    done = profile(f"--workdir={workdir}", "--topology=v5e:1x1", f"--picture={tmp_path}/shares.png")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    assert rows["module"] == ["module", "kind", "ms", "per", "step", "share", "plan"]
    assert rows["mlp"][:2] == ["mlp", "products"] and rows["mlp"][3] == f"{4 / 9:.1%}" and len(rows["mlp"]) == 5
    assert len(rows["in"]) == 5 and rows["in"][3] == "100.0%"  # total, with the plan's expectation
    assert (tmp_path / "shares.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--step=9"], "--step=9: no profile of process 0 begins there; these do: 7"),
        (["--process=3"], "has no profile of process 3: train with --config.train.profile_steps=10:13"),
        (["--topology=h100:1"], "--topology=h100:1: the profile is of a TPU; leave the flag out"),
        (["--config.train.steps=5"], "--config.train.steps changes nothing in a profile"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(workdir, flags, said):
    done = profile(f"--workdir={workdir}", *flags)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert "holds no run" in profile(f"--workdir={tmp_path}").stderr
    assert "--workdir is missing" in profile().stderr
