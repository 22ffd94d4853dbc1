"""Tests several processes on this machine: equal runs, a common last step, and no process that waits for a dead one.

The processes have 1 × 8, 2 × 4 and 4 × 2 devices.
"""

import functools
import json
import pathlib
import re
import shutil
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from pretrainax.checkpoints.params import read_params
from pretrainax.profiling.trace import read_trace
from pretrainax.runtime import watchdog as processes
from pretrainax.runtime.recorder import FOLDER, files_of
from tests.support import several
from tests.support.tiers import few

SEVERAL = [(2, "gpt"), (2, "bert"), (2, "t5"), (4, "bert"), (4, "t5")]  # (number of processes, family)
EACH = pytest.mark.parametrize(("count", "family"), few(SEVERAL, [(2, "bert")]))
PROFILED = "2-bert"
# (number of processes before and after): family, and number of devices that share the parameters afterwards
RESUMED = {(1, 2): ("bert", 4), (2, 4): ("gpt", 2), (4, 1): ("t5", 8)}
# Sums over the devices of several processes add float32 numbers in another order than sums in one process.
LOSS_RTOL = 2e-5


@pytest.fixture(scope="session")
def runs(tmp_path_factory, text, cache) -> Callable[[str], pathlib.Path]:
    """Returns a function from the name of a run to its folder; it performs the run at the first call.

    Names are `<processes>-<family>`, `<processes>-<family>-<devices that share a row>`, or `<processes>-to-<processes>`
    for a run that resumes on another number of processes.
    """
    folder = tmp_path_factory.mktemp("runs")

    def make(name: str, count: int, family: str, fsdp: int = 2, sequence: int = 1) -> pathlib.Path:
        job = {"family": family, "fsdp": fsdp, "sequence": sequence}
        job["profile_steps"] = "3:4" if name == PROFILED else ""
        job |= {"workdir": str(folder / name), "text": str(text), "cache": str(cache)}
        if count == 1:
            several.run(**job)
            return folder / name
        children = several.start(count, "tests.support.several", json.dumps(job), log=folder / f"log-{name}")
        try:
            codes = [child.wait(timeout=900) for child in children]
        finally:
            for child in children:
                child.kill()
        assert codes == [0] * count, (folder / f"log-{name}-0").read_text()[-3000:]
        return folder / name

    @functools.cache
    def run_of(name: str) -> pathlib.Path:
        if "-to-" not in name:
            count, family, *sequence = name.split("-")
            return make(name, int(count), family, *((1, int(sequence[0])) if sequence else ()))
        before, after = map(int, name.split("-to-"))
        family, fsdp = RESUMED[before, after]
        begun = run_of(f"{before}-{family}")
        shutil.copytree(begun, folder / name, ignore=shutil.ignore_patterns("batches-*"))
        shutil.rmtree(folder / name / "checkpoints" / str(several.STEPS))
        return make(name, after, family, fsdp)

    return run_of


def losses(workdir: pathlib.Path) -> list[tuple]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["split"], line["loss"]) for line in lines]


def batches(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns {"step name": [B, …]} with the rows of all processes, one process after the other."""
    parts = [np.load(file) for file in sorted(workdir.glob("batches-*.npz"))]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def params(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    blocks = {}
    for path, _, block in read_params(str(workdir / "checkpoints" / str(several.STEPS))):
        blocks.setdefault(path, []).append(block)
    return {path: np.concatenate(parts) for path, parts in blocks.items()}


def assert_same_losses(got: pathlib.Path, expected: pathlib.Path) -> None:
    got, expected = losses(got), losses(expected)
    assert [line[:2] for line in got] == [line[:2] for line in expected]
    np.testing.assert_allclose([x[2] for x in got], [x[2] for x in expected], rtol=LOSS_RTOL)


@pytest.mark.slow
@EACH
def test_several_processes_have_the_losses_of_one(count, family, runs):
    assert_same_losses(runs(f"{count}-{family}"), runs(f"1-{family}"))


@EACH
def test_several_processes_read_the_batches_of_one(count, family, runs):
    got, expected = batches(runs(f"{count}-{family}")), batches(runs(f"1-{family}"))
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("count", few([2, 4], [2]))
def test_processes_that_share_a_row_have_the_losses_of_one_and_read_the_same_rows(count, runs):
    """Tests rows that are split over all 8 devices: each of 2 processes has half of a row, and each of 4 a quarter."""
    assert_same_losses(runs(f"{count}-gpt-8"), runs("1-gpt"))
    own = [dict(np.load(file)) for file in sorted(runs(f"{count}-gpt-8").glob("batches-*.npz"))]
    expected = batches(runs("1-gpt"))
    assert len(own) == count and own[0].keys() == expected.keys()
    for found in own:
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@EACH
def test_several_processes_save_the_parameters_of_one(count, family, runs):
    got, expected = params(runs(f"{count}-{family}")), params(runs(f"1-{family}"))
    assert got.keys() == expected.keys()
    for path in expected:
        # Adam divides a gradient by its own size. If a gradient is 0 except for rounding (biases of keys), parameters
        # differ by up to 7e-6.
        np.testing.assert_allclose(got[path], expected[path], atol=5e-5, err_msg=path)


def test_each_process_writes_a_profile_of_its_own_devices(runs):
    workdir = runs(PROFILED)
    folder = workdir / FOLDER / "step_3"
    assert {file.name for file in folder.iterdir()} == {pathlib.Path(f).name for i in (0, 1) for f in files_of("", i)}
    assert [file.name for file in (workdir / "profiles").iterdir()] == ["plugins"]
    for process in (0, 1):
        trace = read_trace(files_of(str(folder), process).trace)
        assert (trace.steps, trace.devices) == ([3, 4], 4)
    said = [(workdir.parent / f"log-{PROFILED}-{i}").read_text() for i in (0, 1)]
    assert "process 0 of 2; to see another process" in said[0] and "ms per step on cpu, mean of 4 devices" in said[0]
    assert "ms per step" not in said[1]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), few(RESUMED, [(1, 2)]))
def test_a_checkpoint_resumes_on_other_processes_and_another_mesh(before, after, runs):
    name, begun = f"{before}-to-{after}", f"{before}-{RESUMED[before, after][0]}"
    assert_same_losses(runs(name), runs(begun))
    got, expected = batches(runs(name)), batches(runs(begun))
    assert {key.split()[0] for key in got} == {"3", "4"}  # only steps after the checkpoint
    for key in got:
        np.testing.assert_array_equal(got[key], expected[key], err_msg=key)


# --- faults ----------------------------------------------------------------------------------------------------------


class Group:
    """A group of two processes of the real command, one of which gets a signal in the middle of the run."""

    def __init__(self, workdir: pathlib.Path, text: pathlib.Path, cache: pathlib.Path):
        self.workdir = workdir
        flags = ["train.steps=100000", "checkpoint.every=5", f"data.source.path={text}", f"data.cache_dir={cache}"]
        self.children = several.start(
            2,
            *("pretrainax.main", "--config=tests/support/tiny.py:gpt", f"--workdir={workdir}"),
            *(f"--config.{flag}" for flag in flags),
            log=workdir.parent / f"{workdir.name}-log",
        )

    def signal(self, index: int, number: signal.Signals) -> None:
        """Waits until the processes train, and sends the signal."""
        metrics, deadline = self.workdir / "metrics.jsonl", time.monotonic() + 200
        while not (metrics.exists() and '"step": 6,' in metrics.read_text()):
            assert time.monotonic() < deadline and self.children[0].poll() is None, self.said(0)
            time.sleep(0.05)
        self.children[index].send_signal(number)
        self.since = time.monotonic()

    def end(self, index: int) -> tuple[int, float]:
        """Returns the exit code and the seconds since the signal."""
        return self.children[index].wait(timeout=60), time.monotonic() - self.since

    def said(self, index: int) -> str:
        return pathlib.Path(f"{self.workdir}-log-{index}").read_text()


@pytest.fixture
def group(tmp_path, text, cache):
    made = Group(tmp_path / "run", text, cache)
    yield made
    for child in made.children:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_when_one_process_is_frozen_the_other_ends_and_names_it(group):
    group.signal(1, signal.SIGSTOP)
    code, seconds = group.end(0)
    assert code == 1 and seconds < 30
    assert group.said(0).splitlines()[-1].startswith("pretrainax: process 1 of 2 on ")
    assert "has sent no heartbeat for 20 s" in group.said(0)


@pytest.mark.slow
def test_when_process_0_is_killed_the_other_ends_and_names_it(group):
    group.signal(0, signal.SIGKILL)
    code, seconds = group.end(1)
    assert code == 1 and seconds < 30
    assert group.said(1).splitlines()[-1].startswith("pretrainax: process 0 of 2 (the coordinator) is gone")


@pytest.mark.slow
def test_a_signal_to_one_process_saves_the_same_step_in_all(group):
    group.signal(1, signal.SIGTERM)
    (first, seconds), (second, _) = group.end(0), group.end(1)
    assert first == second == 75 and seconds < 30
    saved = group.said(0).rpartition("saved step ")[2].split(";")[0]
    assert (group.workdir / "checkpoints" / saved / "manifest.sha256").exists()


@pytest.mark.slow
def test_what_is_wrong_in_one_process_ends_all_with_its_exit_code(tmp_path, text, cache):
    flags = ["train.seed=<process>", f"data.source.path={text}", f"data.cache_dir={cache}"]
    children = several.start(
        2,
        *("pretrainax.main", "--config=tests/support/tiny.py:gpt", f"--workdir={tmp_path / 'run'}"),
        *(f"--config.{flag}" for flag in flags),
        log=tmp_path / "log",
    )
    assert [child.wait(timeout=120) for child in children] == [2, 2]
    assert "process 1 of 2 on" in (said := (tmp_path / "log-0").read_text()) and "train.seed: 0 -> 1" in said


# --- the protocol, without processes ---------------------------------------------------------------------------------


class Store:
    """A fake of the key-value store of jax.distributed."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_try_get(self, key):
        return self.values[key]

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]


@pytest.fixture
def three(monkeypatch):
    """Returns three watchdogs without running threads; the test exchanges their messages."""
    store, made = Store(), []
    for i in range(3):
        own = SimpleNamespace(client=store, process_id=i, num_processes=3, coordinator_address=None)
        monkeypatch.setattr(processes, "distributed_state", lambda own=own: own)
        monkeypatch.setattr(processes, "_RUNS", iter([0]))
        made.append(processes.Watchdog())
        made[i]._last_heartbeats = {j: (-1, 0) for j in ([1, 2] if i == 0 else [0])}
    store.key_value_set("pretrainax/0/word", json.dumps(made[0]._decision), allow_overwrite=True)
    return made


def talk(three, tick):
    for watchdog in three[1:] + three[:1]:
        watchdog._exchange(tick)
    for watchdog in three[1:]:
        watchdog._exchange(tick)


def test_all_stop_at_the_first_call_that_none_has_left_behind(three):
    # A process may be ahead of its devices and of the other processes.
    for watchdog, count in zip(three, [5, 3, 7], strict=True):
        assert not any(watchdog.agree(stop=False) for _ in range(count))
    three[1]._stop_requested = True
    for tick in range(1, 5):
        talk(three, tick)
    answers = [
        [watchdog.agree(stop=False) for _ in range(count)] for watchdog, count in zip(three, [3, 5, 1], strict=True)
    ]
    assert answers == [[False, False, True], [False, False, False, False, True], [True]]


def test_a_signal_to_all_processes_costs_no_further_step(three):
    for watchdog in three:
        assert not any(watchdog.agree(stop=False) for _ in range(4))
        watchdog._stop_requested = True
    for tick in range(1, 5):
        talk(three, tick)
    assert [watchdog.agree(stop=True) for watchdog in three] == [True, True, True]


def test_one_process_needs_no_agreement():
    with processes.Watchdog() as peers:
        assert [peers.agree(False), peers.agree(True)] == [False, True]


@pytest.mark.parametrize("count", [1, 3])
def test_a_process_without_a_step_for_long_ends_and_says_after_which(count, monkeypatch, capsys):
    """Tests one and three processes; the devices of a single process may hang too."""
    own = SimpleNamespace(client=None, process_id=count - 1, num_processes=count, coordinator_address=None)
    monkeypatch.setattr(processes, "distributed_state", lambda: own)
    left = []
    monkeypatch.setattr(processes.Watchdog, "_leave", lambda self, code: left.append(code))
    peers = processes.Watchdog(stuck_after=60.0)
    for ticks, done in ((0, lambda: peers.beat(7)), (59, lambda: None), (1, peers.progress), (59, lambda: None)):
        peers._ticks += ticks
        done()
        if ticks != 1:
            peers._check_progress(peers._ticks - peers._last_step)
    assert not left
    peers._ticks += 1
    peers._check_progress(peers._ticks - peers._last_step)
    assert left == [1]
    assert "no step after 7 for 60 s (config.train.stuck_after): a device or a collective" in capsys.readouterr().err


@pytest.mark.slow
def test_what_comes_before_the_first_step_and_after_the_last_may_take_as_long_as_it_likes(monkeypatch):
    monkeypatch.setattr(processes, "TICK", 0.001)
    monkeypatch.setattr(processes.Watchdog, "_leave", lambda self, code: pytest.fail("ended"))
    with processes.Watchdog(stuck_after=0.05) as peers:
        time.sleep(0.2)
        peers.beat(1)
    time.sleep(0.2)


@pytest.mark.slow
def test_a_run_whose_devices_hang_ends_with_exit_code_1(tmp_path, text, cache):
    """Tests a run in its own process whose steps stop."""
    code = (
        "import sys, time; from unittest import mock; from pretrainax.runtime import host, watchdog\n"
        "from pretrainax.runs.train import train; from tests.support import tiny\n"
        "from pretrainax.training.callbacks import Callback\n"
        "host.start_jax(experiment := tiny.get_config('gpt')); experiment.train.stuck_after = 60.0\n"
        "watchdog.TICK = 0.02  # a minute of 60 ticks is 1.2 s\n"
        "experiment.train.stuck_after *= watchdog.TICK\n"
        f"experiment.data.source.path, experiment.data.cache_dir = {str(text)!r}, {str(cache)!r}\n"
        "class Hang(Callback):\n"
        "    def on_batch(self, step, batch):\n"
        "        time.sleep(60 if step == 5 else 0)\n"
        f"train(experiment, {str(tmp_path / 'run')!r}, callbacks=[Hang()])\n"
    )
    done = several.alone("-c", code)
    last = done.stderr.splitlines()[-1]  # The loader makes a batch ahead of its step.
    assert done.returncode == 1 and re.match(
        r"pretrainax: no step after [34] for 1 s \(config.train.stuck_after\)", last
    )
