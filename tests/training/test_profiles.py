"""Tests profiles of real runs on a CPU: their steps, the written files, the table, and resumption."""

import collections
import gzip
import json

import jax
import pytest
from jax.profiler import ProfileData

from pretrainax.config import TrainConfig, UserError
from pretrainax.config.validation import MAX_PROFILED_STEPS, validate
from pretrainax.data.sources import TextFiles
from pretrainax.planning.hlo.memory_traffic import KINDS
from pretrainax.profiling import report
from pretrainax.profiling.kernels import UNKNOWN, kernel_work
from pretrainax.profiling.trace import read_trace
from pretrainax.runs import train as training
from pretrainax.runtime.profile_request import ProfileRequest
from pretrainax.runtime.recorder import FOLDER, STEP, files_of
from pretrainax.training.profiles import Profiles
from tests.support import tiny
from tests.support.runs import lines

pytestmark = pytest.mark.slow


def of(text, cache, steps=6, profile_steps="3:4"):
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.mesh.data, experiment.train.steps, experiment.train.profile_steps = 8, steps, profile_steps
    experiment.evaluate.every, experiment.evaluate.batches, experiment.schedule.warmup_steps = 100, 1, 1
    experiment.checkpoint.every = 100
    return experiment


def train(experiment, workdir, request=None):
    profiles = Profiles(request or ProfileRequest(), report.run_report)
    is_there = (workdir / "config.json").exists()
    assert training.train(experiment, str(workdir), extend=is_there, callbacks=[profiles]) == 0


def files(workdir, step):
    return files_of(str(workdir / FOLDER / f"step_{step}"), 0)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, text, cache):
    workdir = tmp_path_factory.mktemp("profiled")
    train(of(text, cache), workdir)
    return workdir


def test_the_steps_that_are_asked_for_are_in_the_trace_and_no_other(profiled):
    data = ProfileData.from_file(files(profiled, 3).trace)
    events = (event for plane in data.planes for line in plane.lines for event in line.events)
    marks = [dict(event.stats)["step_num"] for event in events if event.name == STEP]
    assert sorted(marks) == [3, 4]
    trace = read_trace(files(profiled, 3).trace)
    assert trace.steps == [3, 4] and (trace.platform, trace.devices) == ("cpu", 8)


def test_each_kernel_of_the_step_ran_on_each_device_in_each_step(profiled):
    """This shows that the profile has no kernel of earlier or later steps, and lacks none of its steps."""
    data = ProfileData.from_file(files(profiled, 3).trace)
    runs: collections.Counter = collections.Counter()
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                if (stats := dict(event.stats)).get("hlo_module") == "jit_step":
                    runs[stats["run_id"], stats["device_ordinal"]] += 1
    assert len(runs) == 2 * 8 and len(set(runs.values())) == 1


def test_the_table_has_all_of_a_step_by_kinds_that_are_known(profiled):
    trace = read_trace(files(profiled, 3).trace)
    work = kernel_work(trace)
    assert {one.kind for one in work} <= {*KINDS, UNKNOWN}
    named = sum(one.seconds for one in work if one.module.startswith(("decoder", "loss", "optimizer")))
    assert named > 0.5 * sum(one.seconds for one in work)
    assert {"products", "attention", "loss", "optimizer", "collectives"} <= {one.kind for one in work}
    assert sum(trace.busy.values()) <= trace.seconds
    table = report.kernel_table(trace, work).splitlines()
    assert sum(float(row.split()[-1].rstrip("%")) for row in table[1:]) == pytest.approx(100, abs=0.05 * len(table))
    assert report.MAX_ROWS + 1 <= len(table) <= report.MAX_ROWS + 3


def test_perfetto_is_given_events_of_the_json_trace_format(profiled):
    with gzip.open(files(profiled, 3).perfetto) as f:
        events = json.load(f)["traceEvents"]
    assert all(isinstance(event["pid"], int) and event["ph"] in ("X", "M") for event in events if event)
    spans = [event for event in events if event.get("ph") == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 and event["name"] for event in spans)  # both in microseconds
    assert all(isinstance(event["tid"], int) for event in spans)
    named = {
        (e["name"], e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("name", "").endswith("_name")
    }
    assert named["process_name", spans[0]["pid"], None] == "/host:CPU"
    assert all(("thread_name", event["pid"], event["tid"]) in named for event in spans)
    assert sum(event["name"] == STEP for event in spans) == 2
    assert any("hlo_op" in event.get("args", {}) for event in spans)


def test_what_memory_holds_is_written_for_pprof(profiled):
    """The file is a profile.proto, whose strings name the origin of each array."""
    with gzip.open(files(profiled, 3).memory) as f:
        content = f.read()
    assert b"space" in content and b"bytes" in content


def test_a_run_with_a_profile_trains_as_one_without(profiled, tmp_path, text, cache):
    train(of(text, cache, profile_steps=""), tmp_path)
    assert lines(tmp_path) == lines(profiled)
    assert not (tmp_path / "profiles").exists()


@pytest.mark.slow
def test_a_resumed_run_writes_what_is_left_and_says_what_is_not(tmp_path, text, cache, capsys):
    train(of(text, cache, steps=3, profile_steps=""), tmp_path)
    train(of(text, cache, steps=7, profile_steps="3:5"), tmp_path)
    assert "profile limited to steps 5: the first step of this start, 4, compiles" in capsys.readouterr().err
    assert read_trace(files(tmp_path, 5).trace).steps == [5]
    train(of(text, cache, steps=9, profile_steps="3:5"), tmp_path)
    assert "no profile of steps 3 to 5: this start runs steps 8 to 9" in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_has_the_next_steps_in_a_profile(tmp_path, text, cache, capsys):
    request = ProfileRequest()
    request.requested = True  # as if requested before the first step
    train(of(text, cache, steps=5, profile_steps=""), tmp_path, request)
    assert read_trace(files(tmp_path, 2).trace).steps == [2, 3, 4]
    assert "profile of steps 2 to 4" in capsys.readouterr().err
    assert not request.requested and "no more steps" in request.refusal


@pytest.mark.slow
def test_a_signal_after_the_last_step_that_could_be_traced_is_answered(tmp_path, text, cache, capsys):
    request = ProfileRequest()
    request.requested = True
    train(of(text, cache, steps=1, profile_steps=""), tmp_path, request)
    assert "SIGUSR1: no profile, the run has no more steps" in capsys.readouterr().err


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path, text, cache, capsys):
    (tmp_path / "profiles").write_text("a file")
    train(of(text, cache), tmp_path)
    assert "no profile was begun: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_trace_that_somebody_else_writes_ends_no_run(tmp_path, text, cache, capsys):
    with jax.profiler.trace(str(tmp_path / "own")):
        train(of(text, cache), tmp_path / "run")
    assert "no profile was begun: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, said",
    [
        ("10", "it must be the first and last step, such as 10:13"),
        ("10:", "it must be the first and last step, such as 10:13"),
        ("-3:5", "it must be the first and last step, such as 10:13"),
        ("5:4", "the last step must not be before the first"),
        ("1:4", "steps must be from 2, because the first step compiles, to config.train.steps, 1000"),
        ("990:1001", "steps must be from 2, because the first step compiles, to config.train.steps, 1000"),
        (f"2:{MAX_PROFILED_STEPS + 2}", f"{MAX_PROFILED_STEPS + 1} steps: the maximum is {MAX_PROFILED_STEPS}"),
    ],
)
def test_steps_that_cannot_be_profiled_are_refused(given, said, text):
    experiment = of(text, "cache", steps=1000, profile_steps=given)
    with pytest.raises(UserError) as e:
        validate(experiment)
    assert str(e.value) == f"config.train.profile_steps is {given!r}, {said}"


def test_no_steps_are_an_empty_range():
    assert list(TrainConfig().profiled) == [] and list(TrainConfig(profile_steps="7:7").profiled) == [7]
