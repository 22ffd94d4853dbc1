"""Tests worker processes: missing shared memory, a user's own classes, and signals."""

import errno
import multiprocessing.synchronize
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from pretrainax.config import Choice, UserError
from pretrainax.config.choice import CONFIG_MODULE
from pretrainax.config.config_file import read_config_file
from pretrainax.data.pipeline import iterate
from pretrainax.data.preparation.workers import Workers
from tests.support.runs import ENV, ROOT, TINY, preparing


@pytest.fixture(params=[errno.EROFS, errno.ENOENT, errno.ENOSYS])
def no_shared_memory(monkeypatch, request):
    def fail(*_, **__):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", fail)


def test_loader_workers_without_shared_memory_are_one_line(no_shared_memory):
    with pytest.raises(UserError, match="config.data.workers is 2, .*set config.data.workers=0, or mount /dev/shm"):
        next(iterate([{}, {}], 0, 2, workers=2))


def test_tokenizing_without_shared_memory_is_one_line(no_shared_memory):
    with Workers(2) as workers:
        with pytest.raises(UserError, match="config.data.prepare_workers is 2, .*set config.data.prepare_workers=1"):
            list(workers.run(int, [("1",), ("2",)]))
        with pytest.raises(UserError, match="set config.data.prepare_workers=1"):
            workers.apart(int, "1")
    with Workers(1) as workers:
        assert list(workers.run(int, [("1",), ("2",)])) == [1, 2]


OWN = """
import dataclasses
from pretrainax.config.config_file import read_config_file
from pretrainax.data.sources import TextFiles

@dataclasses.dataclass
class Own(TextFiles):
    pass

def get_config():
    experiment = read_config_file("gpt2:tiny")
    experiment.data.source = Own(path="text")
    return experiment
"""


@pytest.fixture
def own_source(tmp_path, monkeypatch):
    """Reads a data source whose class is in a config file that reads another config file."""
    monkeypatch.setattr(Choice, "_classes", dict(Choice._classes))
    monkeypatch.setitem(sys.modules, CONFIG_MODULE, None)
    (tmp_path / "mine.py").write_text(OWN)
    return read_config_file(str(tmp_path / "mine.py")).data.source


def test_tokenizing_workers_know_the_classes_of_the_config_file(own_source):
    with Workers(2) as workers:
        assert list(workers.run(str, [(own_source,), (own_source,)])) == [str(own_source)] * 2
        assert workers.apart(str, own_source) == str(own_source)


def test_loader_workers_know_the_classes_of_the_config_file(own_source):
    assert list(iterate([{"source": own_source}], 0, 1, workers=1)) == [{"source": own_source}]


def test_workers_know_the_classes_of_a_notebook():
    """The main module of a notebook has no file; `python -c` is the same case."""
    code = OWN.partition("def get_config")[0] + (
        "from pretrainax.data.pipeline import iterate\n"
        "from pretrainax.data.preparation.workers import Workers\n"
        "class Batches:\n"
        "    own = Own(path='text')\n"
        "    def __getitem__(self, step):\n"
        "        return {'source': str(self.own)}\n"
        "own = Own(path='text')\n"
        "with Workers(2) as workers:\n"
        "    print(*workers.run(str, [(own,), (own,)]), workers.apart(str, own))\n"
        "print(next(iterate(Batches(), 0, 1, workers=1))['source'])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120)
    assert out.stdout.split() == ["Own(path='text')"] * 4, out.stderr


def test_workers_of_a_script_that_trains_when_it_is_imported_name_the_line_that_it_lacks(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from pretrainax.data.preparation.workers import Workers, locked\n"
        "with locked('folder/text', print), Workers(2) as workers:\n"
        "    list(workers.run(int, [('1',), ('2',)]))\n"
    )
    out = subprocess.run([sys.executable, script], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=120)
    last = out.stderr.splitlines()[-1]
    assert "config.data.prepare_workers is 2" in last and "put its code that trains under `if __name__ ==" in last


@pytest.fixture(scope="module")
def long_text(tmp_path_factory) -> pathlib.Path:
    """Writes text on which a tokenizer trains for some seconds."""
    folder, rng = tmp_path_factory.mktemp("long"), random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(30_000)]
    for i in range(4):
        (folder / f"{i}.txt").write_text(" ".join(rng.choices(words, k=400_000)))
    return folder


def children(process: int) -> list[str]:
    return pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()


@pytest.mark.first(2)
@pytest.mark.parametrize("delay", [0, 0.5])  # While the workers start, and while they work.
@pytest.mark.parametrize(
    "send, number", [(os.kill, signal.SIGTERM), (os.kill, signal.SIGHUP), (os.killpg, signal.SIGTERM)]
)
def test_a_preparation_that_a_signal_ends_leaves_no_process_and_no_semaphore(send, number, delay, long_text, tmp_path):
    sizes = [f"--config.{part}.vocab_size=8000" for part in ("model", "tokenizer")]
    words = preparing(f"{TINY}:gpt", long_text, tmp_path, "--config.data.prepare_workers=2", *sizes)
    process = subprocess.Popen(words, cwd=ROOT, env=ENV, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(started := children(process.pid)) < 3 and time.monotonic() < deadline:  # two workers and their tracker
        time.sleep(0.01)
    time.sleep(delay)
    send(process.pid, number)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number
    assert "the preparation ends; the same command continues it" in stderr and "leaked" not in stderr
    deadline = time.monotonic() + 5
    left = started
    while left and time.monotonic() < deadline:
        left = [child for child in left if command_line(child)]
    assert left == []


def command_line(process: str) -> str:
    """Returns the command line of a process; "" for a zombie."""
    try:
        return pathlib.Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""
