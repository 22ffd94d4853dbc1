"""Tests that the parts of a run's time add up to the whole, over several starts, and that a kill loses little."""

import json
import subprocess
import sys
import time

import pytest

from pretrainax.data.sources import TextFiles
from pretrainax.runs.train import train
from pretrainax.runtime import goodput
from pretrainax.runtime.goodput import PARTS, Goodput, total
from tests.support import tiny


class Clock:
    """Replaces both clocks of the module; `jump` only changes the wall clock."""

    def __init__(self):
        self.now, self.jump = 1000.0, 0.0

    def perf_counter(self):
        return self.now

    def time(self):
        return self.now + self.jump

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(goodput, "time", clock)
    return clock


def seconds(workdir):
    return {part: value for part, value in total(json.loads((workdir / "goodput.json").read_text())).items() if value}


def test_each_second_belongs_to_one_part(tmp_path, clock):
    run = Goodput(str(tmp_path), age=2.0)
    with run.on("preparing"):
        clock.sleep(3)
    clock.sleep(1)
    for step in (1, 2):
        with run.on("waiting"):
            clock.sleep(0.5)
        run.step(step)
        clock.sleep(10)
    with run.on("saving"):
        clock.sleep(4)
    run.save()
    # No step includes the wait for the first batch. A step includes the time until the next part.
    assert seconds(tmp_path) == {"starting": 3.0, "preparing": 3.0, "waiting": 1.0, "steps": 20.0, "saving": 4.0}


def test_steps_of_an_earlier_start_are_done_again(tmp_path, clock):
    first = Goodput(str(tmp_path))
    for step in range(1, 6):
        first.step(step)
        clock.sleep(1)
    first.save()  # Then the process is killed.
    clock.sleep(100)
    second = Goodput(str(tmp_path))
    clock.sleep(7)
    for step in range(3, 8):  # The second start resumes from the checkpoint of step 2.
        second.step(step)
        clock.sleep(1)
    second.save()
    assert seconds(tmp_path) == {"steps": 5.0 + 2.0, "redone": 3.0, "starting": 7.0, "down": 100.0}
    assert sum(seconds(tmp_path).values()) == clock.now - 1000.0


def test_steps_after_a_rollback_are_done_again(tmp_path, clock):
    run = Goodput(str(tmp_path))
    for step in (1, 2, 3, 2, 3, 4):
        run.step(step)
        clock.sleep(1)
    run.save()
    assert seconds(tmp_path) == {"steps": 4.0, "redone": 2.0}


def test_a_clock_that_jumps_back_costs_nothing(tmp_path, clock):
    Goodput(str(tmp_path)).save()
    clock.sleep(5)
    clock.jump = -3600.0
    later = Goodput(str(tmp_path))
    clock.sleep(1)
    later.save()
    assert seconds(tmp_path) == {"starting": 1.0}


def test_the_time_after_the_end_is_nobodys(tmp_path, clock):
    Goodput(str(tmp_path), age=1.0).save(done=True)
    clock.sleep(3600)
    Goodput(str(tmp_path), age=2.0).save(done=True)
    assert seconds(tmp_path) == {"starting": 3.0}


def test_a_file_that_is_damaged_is_begun_anew(tmp_path):
    (tmp_path / "goodput.json").write_text("[{")
    Goodput(str(tmp_path), age=1.0).save()
    assert len(json.loads((tmp_path / "goodput.json").read_text())) == 1


@pytest.mark.parametrize(
    "entry",
    [
        *(7, None, [], {}, {"began": 1.0}, {"began": "1", "step": 2, "done": False, "seconds": {}}),
        {"began": 1.0, "step": 2, "done": False, "seconds": [1.0]},
        {"began": 1.0, "step": 2, "done": False, "seconds": {"steps": "3"}},
        {"began": float("nan"), "step": 2, "done": False, "seconds": {}},
    ],
)
def test_a_damaged_entry_is_left_out_and_counted(entry, tmp_path):
    Goodput(str(tmp_path), age=1.0).save()
    path = tmp_path / "goodput.json"
    path.write_text(json.dumps([entry, *json.loads(path.read_text())]))
    again = Goodput(str(tmp_path), age=2.0)
    assert again.damaged == 1
    again.save()
    again.table()
    assert len(json.loads(path.read_text())) == 2
    assert Goodput(str(tmp_path)).damaged == 0


@pytest.mark.parametrize("content", [b"[{", b"\xff", b"7", b"[" * 100_000, b""])
def test_a_file_that_cannot_be_read_is_counted_once(content, tmp_path):
    (tmp_path / "goodput.json").write_bytes(content)
    assert Goodput(str(tmp_path)).damaged == 1


def test_the_table_counts_the_starts_and_shows_the_parts_that_took_time(tmp_path, clock):
    Goodput(str(tmp_path), age=60.0).save()
    clock.sleep(40)
    run = Goodput(str(tmp_path))
    run.step(1)
    clock.sleep(300)
    assert run.table().splitlines() == [
        "goodput 75.0% of 0:06:40, 2 starts",
        "  steps                                     0:05:00   75.0%",
        "  starting: imports, building the model     0:01:00   15.0%",
        "  between the starts                         40.0 s   10.0%",
    ]


def test_only_the_primary_process_writes(tmp_path):
    Goodput(str(tmp_path), primary=False).save()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the age of a process")
def test_the_age_of_a_process_counts_its_imports():
    code = "import time; time.sleep(0.5); from pretrainax.runtime import goodput; print(goodput.process_age())"
    before = time.perf_counter()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.5 <= age <= time.perf_counter() - before + 0.01  # The system counts in hundredths of a second.


@pytest.mark.slow
def test_the_parts_of_a_real_run_add_up_to_its_wall_time(tmp_path, text, cache, capsys):
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.train.steps, experiment.evaluate.every = 6, 3
    before = time.perf_counter()
    assert train(experiment, str(tmp_path)) == 0
    wall = time.perf_counter() - before
    found = seconds(tmp_path)
    # The parts do not include the imports of a first call before the clock starts, and the closing of files at the end.
    assert sum(found.values()) == pytest.approx(wall, rel=0.05, abs=0.5)
    assert {"steps", "compiling", "evaluating", "saving", "preparing", "restoring"} <= found.keys() <= PARTS.keys()
    assert "goodput " in capsys.readouterr().err
