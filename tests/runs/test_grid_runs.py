"""A grid resumes where it was stopped, and handles signals and exit codes like a single run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pretrainax.config import RunFailed, UserError
from pretrainax.config.grid import grid_of
from pretrainax.runs import grid_runs
from pretrainax.runtime.workdir_lock import WorkdirLock
from tests.support import tiny
from tests.support.runs import ENV, ROOT, assert_same_run, command, last_line, lines, run, start

# Replaces pretrainax.main: it records its arguments, and ends as the file `codes` next to its workdir specifies.
PROGRAM = """
import json, os, signal, sys, time
from pretrainax.runtime.signals import end_with_parent
end_with_parent()
words = ARGUMENTS
folder, name = os.path.split(words[-1].removeprefix("--workdir="))
os.makedirs(os.path.join(folder, name), exist_ok=True)
open(os.path.join(folder, name, "config.json"), "w").close()
code = json.load(open(os.path.join(folder, "codes"))).get(name, 0)
if code == "wait":
    asked = []
    def hear(number, _):
        asked.append(number)
    signal.signal(signal.SIGTERM, hear)
    open(os.path.join(folder, "waiting"), "w").write(str(os.getpid()))
    while not asked:
        time.sleep(0.01)
    open(os.path.join(folder, "asked"), "w").close()
    until = time.monotonic() + 1
    while time.monotonic() < until and len(asked) < 2:
        time.sleep(0.01)
    os._exit(75 if len(asked) == 1 else 128 + asked[0])
with open(os.path.join(folder, "processes"), "a") as f:
    print(os.getpid(), file=f)
print("a header", "step 4/8 · loss 2.0", "step 8/8 · validation loss 1.5", "WARNING: text", sep="\\n", flush=True)
with open(os.path.join(folder, "made"), "a") as f:
    print(json.dumps([name, *words]), file=f)
if code < 0:
    os.kill(os.getpid(), -code)
if code:
    sys.exit(code)
"""
ONE = PROGRAM.replace("ARGUMENTS", "sys.argv[1:]")  # ends after one run
SEVERAL = f"""
import sys
from pretrainax.runs.grid_runs import next_arguments
arguments = sys.argv[1:]
while arguments is not None:
    exec({PROGRAM!r}, {{"ARGUMENTS": arguments}})
    arguments = next_arguments()
"""


class Grid:
    """Runs of `PROGRAM` in a folder."""

    def __init__(self, folder, text):
        self.folder, self.experiment = folder, tiny.get_config("bert")
        self.experiment.data.source.path = str(text)
        (folder / "program.py").write_text(ONE)

    def train(self, seeds, codes=None, words=(), **options):
        """Returns the exit code, and the arguments of each executed run."""
        (self.folder / "codes").write_text(json.dumps(codes or {}))
        (self.folder / "made").write_text("")
        runs = grid_of(self.experiment, seeds, [])
        code = grid_runs.train_grid(runs, str(self.folder), list(words), **({"extend": False} | options))
        return code, [json.loads(line) for line in (self.folder / "made").read_text().splitlines()]

    def names(self, *args, **kwargs):
        code, made = self.train(*args, **kwargs)
        return code, [name for name, *_ in made]


@pytest.fixture
def grid(tmp_path, text, monkeypatch):
    monkeypatch.setattr(grid_runs, "PROGRAM", (sys.executable, str(tmp_path / "program.py")))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Grid(tmp_path, text)


def test_what_is_done_is_not_made_again_unless_it_is_asked_for_otherwise(grid, capfd):
    assert grid.names(2) == (0, ["seed-0", "seed-1"])
    assert grid.names(3) == (0, ["seed-2"])
    assert "run 1 of 3, seed-0: done" in capfd.readouterr().err
    grid.experiment.train.steps = 50
    assert grid.names(1) == (0, ["seed-0"])
    grid.experiment.train.steps = 40
    (grid.folder / "seed-2" / "config.json").unlink()
    (grid.folder / "seed-2").rmdir()
    assert grid.names(3) == (0, ["seed-0", "seed-2"])
    (grid.folder / "runs.json").write_text("{")
    assert grid.names(2) == (0, ["seed-0", "seed-1"])
    assert "the command checks all finished runs again" in capfd.readouterr().err


def test_runs_json_has_the_own_config_of_each_run_and_keeps_the_runs_of_earlier_commands(grid):
    def content():
        return json.loads((grid.folder / "runs.json").read_text())

    grid.train(2)
    (grid.folder / "seed-1" / "config.json").write_text('{"train": {"steps": 7}}')
    grid.train(3)
    assert [(row["run"], row["config"]) for row in content()["runs"]] == [
        # This program writes an empty config.json.
        ("seed-0", None),
        ("seed-1", {"train": {"steps": 7}}),
        ("seed-2", None),
    ]
    grid.experiment.train.seed = 2
    grid.train(2)
    assert [row["run"] for row in content()["runs"]] == ["seed-2", "seed-3"]
    assert [row["run"] for row in content()["other_runs"]] == ["seed-0", "seed-1"]
    assert set(content()["done"]) == {f"seed-{i}" for i in range(4)}


def test_a_grid_prints_the_news_of_its_runs_and_writes_the_rest_to_a_file(grid, capfd):
    assert grid.names(2, {"seed-1": 1}, verbose=False) == (1, ["seed-0", "seed-1"])
    printed, error = capfd.readouterr()
    output = "a header\nstep 4/8 · loss 2.0\nstep 8/8 · validation loss 1.5\nWARNING: text\n"
    assert printed == "" and error.count("validation loss 1.5") == error.count("WARNING: text") == 2
    assert (grid.folder / "seed-0.log").read_text() == (grid.folder / "seed-1.log").read_text() == output
    assert error.count("a header") == 1  # the last lines of the failed run


def test_runs_share_a_process_until_one_fails(grid, capfd):
    (grid.folder / "program.py").write_text(SEVERAL)
    assert grid.names(4, {"seed-1": 1}, verbose=False) == (1, [f"seed-{i}" for i in range(4)])
    first, second, third, fourth = (grid.folder / "processes").read_text().split()
    assert first == second != third == fourth
    assert (grid.folder / "seed-3.log").read_text() == (grid.folder / "seed-0.log").read_text()
    assert "\x1e" not in capfd.readouterr().err
    (grid.folder / "processes").unlink()
    grid.experiment.train.steps = 50
    assert grid.names(2, share_process=False) == (0, ["seed-0", "seed-1"])
    first, second = (grid.folder / "processes").read_text().split()
    assert first != second


def test_a_run_that_fails_is_tried_again_and_the_others_are_made(grid, capfd):
    assert grid.names(3, {"seed-0": 1, "seed-1": -signal.SIGKILL}) == (1, ["seed-0", "seed-1", "seed-2"])
    told = capfd.readouterr().err
    assert "killed by SIGKILL" in told and "counted as the worst: seed-0 (exit code 1), seed-1 (exit code 1)" in told
    content = json.loads((grid.folder / "runs.json").read_text())
    assert [row["exit_code"] for row in content["runs"]] == [1, 1, 0]
    assert grid.names(3) == (0, ["seed-0", "seed-1"])


@pytest.mark.parametrize("code", [2, 75, 143])
def test_a_mistake_and_a_preemption_end_the_grid_with_their_code(grid, code):
    assert grid.names(3, {"seed-1": code}) == (code, ["seed-0", "seed-1"])
    assert grid.names(3) == (0, ["seed-1", "seed-2"])


def test_each_run_is_given_the_flags_of_the_command_and_its_own(grid):
    _, made = grid.train(2, words=["--config=x.py", "--config.train.steps=5"])
    flags = ["--config=x.py", "--config.train.steps=5"]
    assert made == [
        [f"seed-{i}", *flags, f"--config.train.seed={i}", f"--workdir={grid.folder}/seed-{i}"] for i in (0, 1)
    ]
    grid.experiment.train.steps = 80
    _, made = grid.train(3, extend=True)
    assert [words[-2] for words in made] == ["--extend", "--extend", "--noextend"]  # the last run has nothing to extend


def test_a_folder_that_is_a_run_or_is_in_use_is_refused(grid):
    with WorkdirLock(str(grid.folder)), pytest.raises(RunFailed, match="is in use by process"):
        grid.train(1)
    (grid.folder / "config.json").touch()
    with pytest.raises(UserError, match="holds a single run; --seeds and --sweep put each run into a folder below"):
        grid.train(1)


def start_waiting(grid):
    """Starts a grid in a separate process; its second run waits for a signal."""
    (grid.folder / "codes").write_text('{"seed-1": "wait"}')
    code = f"""
import sys
from pretrainax.config.grid import grid_of
from pretrainax.runs import grid_runs
from tests.support import tiny
experiment = tiny.get_config("bert")
experiment.data.source.path = {str(grid.experiment.data.source.path)!r}
grid_runs.PROGRAM = {grid_runs.PROGRAM!r}
sys.exit(grid_runs.train_grid(grid_of(experiment, 3, []), {str(grid.folder)!r}, [], False))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=ENV | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL
    )
    return process, int(wait_for(grid.folder / "waiting", process))


def wait_for(file, process):
    while not (file.exists() and (file.name == "asked" or file.read_text())):
        assert process.poll() is None
        time.sleep(0.01)
    return file.read_text()


@pytest.mark.slow
def test_a_signal_is_passed_on_and_a_second_one_too(grid):
    process, _ = start_waiting(grid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    for name in ("waiting", "asked"):
        (grid.folder / name).unlink()
    process, _ = start_waiting(grid)
    process.send_signal(signal.SIGTERM)
    wait_for(grid.folder / "asked", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert [json.loads(line)[0] for line in (grid.folder / "made").read_text().splitlines()] == ["seed-0"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_grid_that_is_killed_takes_its_run_with_it(grid):
    process, child = start_waiting(grid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{child}") and "Z" not in open(f"/proc/{child}/stat").read().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (grid.folder / "asked").exists()


@pytest.mark.slow
def test_a_grid_in_several_processes_is_refused(tmp_path, text, cache):
    args = command("tests/support/tiny.py:gpt", tmp_path / "runs", text, cache, "--seeds=2")
    done = run(args, ENV | {"JAX_NUM_PROCESSES": "2"})
    assert done.returncode == 2 and "--seeds and --sweep run in one process" in last_line(done)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_seeds_of_the_real_command_killed_and_started_again(tmp_path, text, cache):
    flags = ["--seeds=2", "--config.evaluate.every=20", "--config.evaluate.batches=1"]
    args = command("tests/support/tiny.py:gpt", tmp_path, text, cache, *flags)
    process = start(args)
    while not (tmp_path / "seed-1" / "checkpoints" / "5").exists():
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    process.wait()
    first = (tmp_path / "seed-0" / "goodput.json").read_text()
    done = run(args)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seed-0" / "goodput.json").read_text() == first
    assert "run 1 of 2, seed-0: done" in done.stderr and "resumed at step" in done.stderr
    assert "tokenizing" not in done.stderr
    content, seeds = json.loads((tmp_path / "runs.json").read_text()), []
    for i, row in enumerate(content["runs"]):
        workdir = tmp_path / f"seed-{i}"
        assert [line["step"] for line in lines(workdir, "train")] == list(range(1, 41))
        best = min(lines(workdir, "valid"), key=lambda line: line["loss"])
        assert (row["step"], row["value"]) == (best["step"], best["loss"])
        seeds.append(json.loads((workdir / "config.json").read_text())["train"]["seed"])
    assert seeds == [0, 1] and content["runs"][0]["value"] != content["runs"][1]["value"]
    assert "2 runs by validation loss, lower is better" in done.stderr
    assert last_line(done) == f"written to {tmp_path}/runs.json"


@pytest.mark.slow
def test_runs_that_share_a_process_equal_runs_with_processes_of_their_own(tmp_path, text, cache):
    sweep = ["--seeds=2", "--sweep=optimizer.learning_rate=1e-3,3e-3", "--config.train.steps=8", "--config.trackers=()"]
    for name, flags in (("shared", ()), ("own", ("--noshare_process",))):
        done = run(command("tests/support/tiny.py:gpt", tmp_path / name, text, cache, *sweep, *flags))
        assert done.returncode == 0, done.stderr
    logs = sorted((tmp_path / "shared").glob("*.log"))
    starting = [
        [
            json.loads((tmp_path / name / log.stem / "goodput.json").read_text())[0]["seconds"]["starting"]
            for log in logs
        ]
        for name in ("shared", "own")
    ]
    assert len(logs) == 4 and max(starting[0][1:]) < min(starting[1])  # runs in a shared process skip the imports
    for log in logs:
        assert_same_run(tmp_path / "shared" / log.stem, tmp_path / "own" / log.stem)
        other = (tmp_path / "own" / log.name).read_text()
        assert "health: " in log.read_text() and "health: " in other
