"""Runs of several processes with workdirs in a bucket; each process has separate local folders, like a host.

`python -m tests.support.pod TEXT CACHE FSDP STEPS WORKDIR …` is one process of a group, which the environment defines.
It executes one run after the other, as `pretrainax.main` does. It omits the tables and samples at the end, because they
take as long as the steps of a tiny run.
"""

import copy
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

from pretrainax.runs import train as training
from pretrainax.runtime import folders, host
from pretrainax.storage.store import Store
from pretrainax.training import train as core
from tests.support import runs, several, tiny


class Pod:
    """Starts, kills and restarts the processes of a run, and reads the output of the run from the bucket."""

    def __init__(self, folder: pathlib.Path, url: str):
        """Initializes a pod.

        Args:
          folder: local folder that replaces the disks of the hosts.
          url: folder in a bucket that contains `text`.
        """
        self.folder, self.url = folder, url
        self.starts, self.processes = 0, []

    def start(self, *workdirs: str, count: int = 2, fsdp: int = 2, steps: int = 12) -> None:
        """Starts `count` processes with `fsdp` devices in total; `said` returns their output."""
        self.starts, port = self.starts + 1, several.free_port()
        texts = f"{self.url}/text/*.txt", f"{self.url}/cache"
        args = [*(sys.executable, "-m", "tests.support.pod"), *texts, str(fsdp), str(steps), *workdirs]
        self.processes: list[subprocess.Popen] = []
        for i in range(count):
            env = runs.ENV | several.environment(i, count, port, devices=fsdp)
            env |= {"XDG_CACHE_HOME": str(self.host(i))}
            with open(self.folder / f"log-{self.starts}-{i}", "w") as log:
                self.processes.append(subprocess.Popen(args, cwd=runs.ROOT, env=env, stdout=log, stderr=log))

    def run(self, name: str) -> str:
        """Returns a workdir in the bucket."""
        return f"{self.url}/runs/{name}"

    def host(self, index: int) -> pathlib.Path:
        """Returns the folder that replaces the disk of a host."""
        return self.folder / f"host-{index}"

    def wipe(self, index: int) -> None:
        shutil.rmtree(self.host(index))

    def said(self, index: int = 0) -> str:
        return (self.folder / f"log-{self.starts}-{index}").read_text()

    def finish(self) -> None:
        """Waits until all processes have ended, and asserts that all succeeded."""
        codes = [process.wait(300) for process in self.processes]
        assert not any(codes), "\n".join(self.said(i) for i in range(len(codes)))

    def kill(self, *indices: int) -> None:
        """Kills some processes, and waits until the others have ended as a consequence."""
        for index in indices:
            self.processes[index].send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait(60)

    def await_checkpoints(self, workdir: str, count: int) -> None:
        """Waits until the bucket has `count` complete checkpoints, of this start or of earlier ones."""
        until = time.monotonic() + 200
        while len(whole_steps(workdir)) < count:
            assert all(p.poll() is None for p in self.processes) and time.monotonic() < until, self.said()
            time.sleep(0.02)


def whole_steps(workdir: str) -> list[int]:
    """Returns the steps whose manifest is in the bucket."""
    names = Store(workdir).objects("checkpoints")
    return sorted(int(name.split("/")[1]) for name in names if name.endswith("manifest.sha256"))


def lines(workdir: str) -> list[dict]:
    """Returns the lines of a run's metrics.jsonl in the bucket, without timings."""
    store = Store(workdir)
    text = b"".join(store.read(name) for name in store.objects() if name.startswith("metrics.jsonl."))
    found = [json.loads(line) for line in text.splitlines()]
    return [{name: x for name, x in line.items() if name not in runs.TIMINGS} for line in found]


def train(text: str, cache: str, fsdp: str, steps: str, *workdirs: str) -> int:
    """Executes the runs of a process, and returns the largest exit code."""
    experiment = tiny.get_config("gpt")
    experiment.data.source.path, experiment.data.cache_dir = text, cache
    experiment.mesh.fsdp, experiment.train.steps = int(fsdp), int(steps)
    experiment.evaluate.every, experiment.checkpoint.every = 6, 2
    host.start_jax(experiment)
    codes = []
    for workdir in workdirs:
        with folders.local_folder(workdir) as folder, mock.patch.object(core, "finish"):
            codes.append(training.train(copy.deepcopy(experiment), folder, extend=int(steps) > 12))
    return max(codes)


if __name__ == "__main__":
    sys.exit(train(*sys.argv[1:]))
