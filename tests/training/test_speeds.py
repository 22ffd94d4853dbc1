"""Tests that compilation has its own metric, and that speeds, ETA and the time axis of reports exclude it."""

import datetime
import json
import re
import time

import pytest

from pretrainax.data.packing import OneEach
from pretrainax.data.sources import TextFiles
from pretrainax.reporting.run_lines import RunLines, with_seconds
from pretrainax.runs.train import train
from pretrainax.training.metrics import read_metrics
from pretrainax.training.metrics_writer import MetricsWriter
from pretrainax.training.run import Run
from pretrainax.training.train_step import Update
from tests.support import tiny
from tests.support.runs import write_text

COMPILING = 3.0  # seconds of a simulated compiler, in addition to the real one


@pytest.fixture
def experiment(text, cache):
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.train.steps, experiment.train.log_every, experiment.evaluate.batches = 9, 3, 1
    experiment.evaluate.every = experiment.checkpoint.every = 9
    return experiment


@pytest.fixture
def slow_compiler(monkeypatch):
    """Makes the first call of an update for each row length take three seconds longer."""
    call, lengths = Update.__call__, set()

    def slow(update, state, batch, frozen=None):
        if (key := (id(update), batch["tokens"].shape)) not in lengths:
            lengths.add(key)
            time.sleep(COMPILING)
        return call(update, state, batch, frozen)

    monkeypatch.setattr(Update, "__call__", slow)
    return lengths


def lines(workdir, split="train"):
    return [line for line in read_metrics(str(workdir / "metrics.jsonl")) if line["split"] == split]


def test_a_slow_compiler_slows_no_step(experiment, tmp_path, slow_compiler, capfd):
    assert train(experiment, str(tmp_path)) == 0
    first, second, third = lines(tmp_path)
    assert first["compile_seconds"] > COMPILING and "compile_seconds" not in second | third
    assert first["step_seconds"] < COMPILING / 3
    # The speed includes the tokens of the two timed steps, not those of the step that compiled.
    assert first["padded_tokens_per_second"] * first["step_seconds"] == pytest.approx(8 * 32)
    assert first["tokens"] == 3 * 8 * 32 and 0 <= first["data_wait_fraction"] <= 1
    said = capfd.readouterr().err
    compiled = f"{first['compile_seconds']:.1f} s"
    assert re.search(rf"first step [\d.]+ s after the start, {compiled} of it compiling", said)
    (shown,) = re.findall(r"^step 3/9 · .*", said, re.MULTILINE)
    assert shown.endswith(f" · compiled in {compiled}") and "tokens/s" in shown and "ETA 0:0" in shown
    assert said.count("compiled in") == 1
    expected = datetime.datetime.strptime(re.search(r"expected time ([\d:]+) for 5 steps", said)[1], "%H:%M:%S")
    assert expected.hour * 3600 + expected.minute * 60 + expected.second < 5 * COMPILING / 3
    assert with_seconds(lines(tmp_path))[-1]["seconds"] < COMPILING  # nine steps, without their compilation


@pytest.mark.slow
def test_a_line_whose_steps_all_compiled_has_no_speed(experiment, tmp_path, slow_compiler, capfd):
    experiment.train.steps, experiment.train.log_every = 3, 1
    assert train(experiment, str(tmp_path)) == 0
    first, *others = lines(tmp_path)
    speeds = ("step_seconds", "tokens_per_second", "padded_tokens_per_second", "data_wait_fraction")
    assert [first[name] for name in speeds] == [None] * 4 and first["compile_seconds"] > COMPILING
    assert all(line[name] is not None for line in others for name in speeds)
    (shown,) = re.findall(r"^step 1/3 · .*", capfd.readouterr().err, re.MULTILINE)
    assert "tokens/s" not in shown and "ETA" not in shown and "compiled in" in shown
    times = [line["seconds"] for line in with_seconds(lines(tmp_path))]
    assert times[0] == 0.0 and times[0] < times[1] < times[2] < COMPILING


@pytest.mark.slow
def test_each_length_of_rows_compiles_on_its_own(experiment, tmp_path, slow_compiler):
    folder = write_text(tmp_path / "text")
    for number in range(800):  # documents that fit in a row of 16 tokens, in addition to longer documents
        (folder / f"short{number}.txt").write_text("nas")
    experiment.data.source = TextFiles(path=str(folder), valid_path=str(folder))
    experiment.data.packing = OneEach(buckets=(16,))
    experiment.train.steps, experiment.train.log_every = 40, 4
    assert train(experiment, str(tmp_path / "run")) == 0
    logged = lines(tmp_path / "run")
    assert len(slow_compiler) == 2
    assert sum(line.get("compile_seconds", 0.0) for line in logged) > 2 * COMPILING
    assert all(line["step_seconds"] < COMPILING / 3 for line in logged if line["step_seconds"] is not None)


@pytest.mark.slow
def test_a_resumed_run_states_its_own_compilation(experiment, tmp_path, slow_compiler):
    experiment.checkpoint.every, experiment.train.steps = 3, 6
    assert train(experiment, str(tmp_path)) == 0
    # An older version wrote the lines without this metric.
    path = tmp_path / "metrics.jsonl"
    old = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: x for k, x in e.items() if k != "compile_seconds"}) + "\n" for e in old))
    slow_compiler.clear()
    experiment.train.steps = 9
    assert train(experiment, str(tmp_path), extend=True) == 0
    before, middle, last = lines(tmp_path)
    assert "compile_seconds" not in before | middle and last["compile_seconds"] > COMPILING > last["step_seconds"]
    assert RunLines("run", with_seconds(lines(tmp_path))).has("seconds")


@pytest.mark.slow
def test_the_first_validation_is_in_no_estimate_of_the_remaining_time(experiment, tmp_path, monkeypatch, capfd):
    validate, calls = Run.validate, []

    def slow(run, params):
        calls.append(run)
        time.sleep(4 if len(calls) == 1 else 0)
        return validate(run, params)

    monkeypatch.setattr(Run, "validate", slow)
    experiment.train.steps, experiment.evaluate.every, experiment.train.log_every = 24, 4, 2
    assert train(experiment, str(tmp_path)) == 0
    said = capfd.readouterr().err
    etas = {int(step): int(m) * 60 + int(s) for step, m, s in re.findall(r"step (\d+)/24 .* ETA (\d+):(\d+)", said)}
    assert etas[6] <= 6 and etas[8] <= 6  # With compilation, 18 steps of more than a second each remain after step 6.
    assert all(line["step_seconds"] < 1 for line in lines(tmp_path))


def test_compilation_in_the_middle_of_a_run_is_in_no_estimate(tmp_path, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("pretrainax.training.metrics_writer.time.perf_counter", lambda: clock[0])
    writer = MetricsWriter(str(tmp_path), 100)
    for step, now, compiling in ((10, 30.0, 20.0), (20, 40.0, None), (30, 75.0, 25.0), (40, 85.0, None)):
        clock[0] = now
        extra = {} if compiling is None else {"compile_seconds": compiling}
        writer.log(step, "train", {"loss": 1.0, "step_seconds": 1.0, **extra})
    writer.close()
    assert re.findall(r"ETA (\S+)", capsys.readouterr().err) == ["1:30", "1:20", "1:10", "1:00"]


@pytest.mark.parametrize(
    "steps, expected",
    [
        # (step, step_seconds, compile_seconds) of each line -> seconds so far.
        ([(10, 2.0, 30.0), (20, 1.0, None)], [20.0, 30.0]),  # the step that compiled counts like the others
        ([(1, None, 30.0), (2, 1.0, None)], [0.0, 1.0]),
        ([(1, None, None), (2, 1.0, None)], [None, None]),  # unknown
        ([(10, 3.0, None), (20, None, 5.0), (30, 1.0, None)], [30.0, 30.0, 40.0]),
    ],
)
def test_the_time_axis_has_no_compilation(steps, expected):
    logged = [
        {"step": step, "split": "train", "step_seconds": each}
        | ({} if compiling is None else {"compile_seconds": compiling})
        for step, each, compiling in steps
    ]
    assert [line["seconds"] for line in with_seconds(logged)] == expected
