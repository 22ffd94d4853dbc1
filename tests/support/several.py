"""A run of tests/support/tiny.py in this process, or in each process of a group.

`python -m tests.support.several '{"family": "gpt", "workdir": DIR, "text": DIR, "cache": DIR, "fsdp": 2}'` is one
process of a group, which the environment defines, as for `pretrainax.main`. In addition to the files of a run, each
process writes the rows that it has read: batches-<process>.npz.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
from unittest import mock

import jax
import numpy as np

from pretrainax.profiling import report
from pretrainax.runs.train import train
from pretrainax.runtime import host
from pretrainax.runtime.profile_request import ProfileRequest
from pretrainax.training import train as core
from pretrainax.training.callbacks import Callback
from pretrainax.training.profiles import Profiles
from tests.support import tiny
from tests.support.runs import FAST, ROOT

STEPS = 4


class Rows(Callback):
    """Collects the rows of all batches of this process."""

    def __init__(self):
        self.seen: dict[str, np.ndarray] = {}

    def on_batch(self, step, batch):
        self.seen.update({f"{step} {name}": value for name, value in batch.items()})


def run(family: str, workdir: str, text: str, cache: str, fsdp: int, sequence: int = 1, profile_steps: str = "") -> int:
    """Executes a run; `fsdp` devices share the parameters, others hold copies; `sequence` devices share each row."""
    experiment = tiny.get_config(family)
    experiment.data.source.path, experiment.data.cache_dir = text, cache
    experiment.mesh.fsdp, experiment.mesh.sequence = fsdp, sequence
    experiment.train.steps, experiment.evaluate.every, experiment.evaluate.batches = STEPS, 2, 1
    experiment.checkpoint.every, experiment.checkpoint.keep = 2, 9
    experiment.train.profile_steps = profile_steps
    rows = Rows()
    with mock.patch.object(core, "finish"):  # its samples and plots take as long as the steps
        code = train(experiment, workdir, callbacks=[rows, Profiles(ProfileRequest(), report.run_report)])
    np.savez(os.path.join(workdir, f"batches-{jax.process_index()}.npz"), **rows.seen)
    return code


def environment(index: int, count: int, port: int, devices: int = 8) -> dict[str, str]:
    """Returns the environment of process `index` of `count` on this machine, with `devices` fake devices in total."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_FLAGS": f"{FAST} --xla_force_host_platform_device_count={devices // count}",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
    }


def alone(*arguments: str) -> subprocess.CompletedProcess:
    """Runs a single Python process with 2 fake devices."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{FAST} --xla_force_host_platform_device_count=2"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(count: int, *arguments: str, log: pathlib.Path) -> list[subprocess.Popen]:
    """Starts `count` processes of `python -m ARGUMENTS`, and logs each of them to `log`-<process>.

    The number of a process replaces <process> in its arguments.
    """
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-m", *(argument.replace("<process>", str(i)) for argument in arguments)],
            cwd=ROOT,
            env=environment(i, count, port),
            stdout=open(f"{log}-{i}", "w"),
            stderr=subprocess.STDOUT,
        )
        for i in range(count)
    ]


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    experiment = tiny.get_config()
    experiment.data.cache_dir = job["cache"]
    host.start_jax(experiment)
    sys.exit(run(**job))
