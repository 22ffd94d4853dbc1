"""Tests that kills, other numbers of processes and deleted folders do not change the findings of a study."""

import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import cast

import pytest

from pretrainax.config import RunFailed, UserError
from pretrainax.data.sources import TextFiles
from pretrainax.files.json_files import read_object
from pretrainax.storage import places
from pretrainax.studies import queue, worker
from pretrainax.studies.command import local_workdir
from pretrainax.studies.jobs import Results
from pretrainax.studies.measures import BitsPerByte
from pretrainax.studies.perform import context_of, measure_speed
from pretrainax.studies.plan import Plan, extended, read_plan, with_texts, write_plan
from pretrainax.studies.queue import Interrupted, Worker, measure_speeds
from pretrainax.studies.study import Arm, Final, Stop
from tests.studies.fake_study import ADAM, CRASHING, MACHINE, RATE, REVERSED, LastLoss, plan
from tests.support.runs import ENV, ROOT
from tests.support.tiers import few


def start(workdir, **environment) -> subprocess.Popen:
    args = [sys.executable, "-m", "tests.studies.fake_study", str(workdir)]
    return subprocess.Popen(args, cwd=ROOT, env=ENV | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output.decode()
    return output.decode()


def wait_for_a_run(process: subprocess.Popen, workdir) -> None:
    """Waits until the first run is finished."""
    while not list(workdir.glob("*/*/**/part.json")):
        assert process.poll() is None, process.communicate()[0].decode()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns the workdir of an undisturbed study."""
    workdir = tmp_path_factory.mktemp("study")
    write_plan(str(workdir), plan())
    finish(start(workdir))
    return workdir


MUON = f"final/muon/{RATE}=0.003,{ADAM}=0.0003"  # folders of the final runs
ADAMW = f"final/adamw/{RATE}=0.003"


def findings(workdir) -> bytes:
    return (workdir / "findings.json").read_bytes()


def test_all_arms_have_equal_trials_and_the_runs_interleave(whole):
    found = read_object(str(whole / "findings.json"))
    for arm in ("adamw", "muon"):
        trials = [trial for trial in found["trials"] if trial["arm"] == arm]
        assert len(trials) == 5 and sum(trial["stopped_early"] for trial in trials) == 2
        assert sum(trial["flops"] for trial in trials) == 3 * 80 + 2 * 20
        assert len([run for run in found["runs"] if run["arm"] == arm]) == 3
    assert found["chosen"] == {"adamw": {RATE: 3e-3}, "muon": {RATE: 3e-3, ADAM: 3e-4}}
    assert [len(found["outcomes"]["loss"]["muon"][str(seed)]) for seed in range(3)] == [2] * 3
    muon, adamw = ((whole / run / "result.json").stat().st_mtime_ns for run in (f"{MUON}/seed-0", f"{ADAMW}/seed-1"))
    assert muon < adamw


def test_downstream_seeds_are_nested_in_pretraining_seeds():
    assert [context_of(plan().study, {}, seed).downstream_seeds for seed in (0, 2)] == [(0, 1), (4, 5)]


def test_findings_have_no_times(whole):
    assert "tokens_per_second" not in findings(whole).decode() and '"flops"' in findings(whole).decode()


@pytest.mark.parametrize("seed", few(range(20), [0]))
def test_a_killed_study_continues(seed, whole, tmp_path):
    write_plan(str(tmp_path), plan())
    rng = random.Random(seed)
    process = start(tmp_path)
    wait_for_a_run(process, tmp_path)
    time.sleep(rng.uniform(0, 1.5))
    process.kill()
    process.wait()
    finish(start(tmp_path))
    assert findings(tmp_path) == findings(whole)


def test_a_signal_before_the_first_job_ends_the_study(tmp_path):
    """Tests a signal during data preparation, which takes minutes and starts no worker."""
    with pytest.raises(Interrupted), Worker(str(tmp_path)):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_two_processes_share_a_study(whole, tmp_path):
    write_plan(str(tmp_path), plan())
    outputs = [finish(process) for process in [start(tmp_path), start(tmp_path)]]
    assert all("final/" in output for output in outputs) and findings(tmp_path) == findings(whole)


@pytest.mark.slow
def test_two_machines_without_common_file_locks_share_a_study(whole, tmp_path):
    """Tests two machines on a network file system. Each job is done once: the machines print different jobs."""
    write_plan(str(tmp_path), plan())
    processes = [start(tmp_path, **{MACHINE: "one"})]
    wait_for_a_run(processes[0], tmp_path)
    processes.append(start(tmp_path, **{MACHINE: "other"}))
    done = [re.findall("^((?:trials|final)/.*?): ", finish(process), re.MULTILINE) for process in processes]
    assert all(done) and not set(done[0]) & set(done[1])
    assert findings(tmp_path) == findings(whole)


@pytest.mark.slow
def test_another_order_of_the_jobs_has_the_same_findings(whole, tmp_path):
    write_plan(str(tmp_path), plan())
    output = finish(start(tmp_path, **{REVERSED: "1"}))
    assert output.index(f"{MUON}/seed-2") < output.index(f"{ADAMW}/seed-0")
    assert findings(tmp_path) == findings(whole)


@pytest.mark.slow
def test_deleted_folders_are_computed_again(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "study")
    for folder in (f"{MUON}/seed-0", "trials/adamw"):
        shutil.rmtree(tmp_path / "study" / folder)
    os.remove(tmp_path / "study" / "findings.json")
    output = finish(start(tmp_path / "study"))
    assert f"{MUON}/seed-0" in output and f"{MUON}/seed-1" not in output
    assert findings(tmp_path / "study") == findings(whole)


@pytest.mark.slow
def test_a_study_in_a_store_continues_on_another_machine(whole, tmp_path, monkeypatch):
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'pretrainax[test]'")
    for machine in ("one", "other"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        monkeypatch.setattr(places, "_mirrors", {})
        with local_workdir("memory://bucket/study") as workdir:
            if machine == "one":
                shutil.copytree(whole / "trials", f"{workdir}/trials")
                write_plan(workdir, plan())
            else:
                output = finish(start(workdir))
                assert f"{MUON}/seed-2" in output and "trials/" not in output
                assert pathlib.Path(workdir, "findings.json").read_bytes() == findings(whole)


@pytest.mark.slow
def test_a_signal_ends_the_study_with_code_75(tmp_path):
    write_plan(str(tmp_path), plan())
    process = start(tmp_path)
    wait_for_a_run(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == 75


@pytest.mark.slow
def test_a_run_that_crashes_twice_fails_and_the_study_goes_on(tmp_path):
    write_plan(str(tmp_path), plan(tuning=None))
    output = finish(start(tmp_path, **{CRASHING: "final/muon/default/seed-1"}))
    assert output.count("the worker ended with exit code 9") == 2
    found = read_object(str(tmp_path / "findings.json"))
    assert found["changes"] == [f"final/muon/default/seed-1 failed: {found['changes'][0].partition('failed: ')[2]}"]
    assert sorted(found["outcomes"]["loss"]["muon"]) == ["0", "2"] and len(found["runs"]) == 5


# --- changes of the file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [UserError, RunFailed])
def test_an_error_of_the_worker_keeps_its_exit_code(kind, tmp_path, monkeypatch):
    """Tests that a full disk is not reported as an invalid config."""

    def fail(*_):
        raise kind("no space left")

    monkeypatch.setattr(worker, "study_from", fail)
    reply = json.dumps(worker._reply({"speed": "one", "study": {}}, "", fail))
    program = f"import sys; sys.stdin.readline(); print({reply!r})"
    monkeypatch.setattr(queue, "_PROGRAM", (sys.executable, "-c", program))
    with Worker(str(tmp_path)) as asked, pytest.raises(UserError, match="no space left") as raised:
        asked.ask({"log": ""})
    assert raised.value.exit_code == kind.exit_code


def test_seeds_and_arms_may_be_added(tmp_path):
    write_plan(str(tmp_path), plan())
    grown = plan(("adamw", "muon", "lion"), final=Final(seeds=5, downstream_seeds=2)).study
    changes = extended(read_plan(str(tmp_path)), grown).changes
    assert changes == ("added to arms after the start: lion", "final.seeds increased after the start from 3 to 5")


@pytest.mark.parametrize(
    "change, name",
    [
        ({"question": "Another?"}, "question"),
        ({"final": Final(seeds=2, downstream_seeds=2)}, "final"),
        ({"final": Final(seed=5, seeds=3, downstream_seeds=2)}, "final"),
        ({"measures": (LastLoss("other"),)}, "measures"),
    ],
)
def test_other_changes_are_refused(change, name, tmp_path):
    with pytest.raises(UserError, match=f"the study file changed after the start in {name}: only new arms"):
        extended(plan(), dataclasses.replace(plan().study, **change))


def test_another_config_of_an_arm_is_refused(tmp_path):
    write_plan(str(tmp_path), plan())
    started = read_plan(str(tmp_path))
    assert extended(started, plan().study).changes == ()
    started.configs["muon"]["model"]["d_model"] = 128  # The config file had another width when the study started.
    with pytest.raises(UserError, match="the config of the arm muon changed after the start: model.d_model: 128 -> 32"):
        extended(started, plan().study)


@pytest.mark.parametrize("name", ["text", "spans"])
def test_another_text_under_the_same_path_is_refused(name, tmp_path):
    """Tests a changed text, because runs and scores on the old and the new text are not comparable."""
    for folder in ("text", "spans"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.txt").write_text(f"Some {folder}.")
    study = dataclasses.replace(plan().study, measures=(BitsPerByte("loss", TextFiles(str(tmp_path / "spans"))),))
    flag = f"--config.data.source=TextFiles(path='{tmp_path / 'text'}')"
    study.arms = tuple(dataclasses.replace(arm, flags=(*arm.flags, flag)) for arm in study.arms)
    write_plan(str(tmp_path), with_texts(Plan(study, {})))
    started = read_plan(str(tmp_path))
    assert with_texts(started) == started
    (tmp_path / name / "0.txt").write_text("Another text.")
    message = rf"the text of TextFiles\(path='[^']*/{name}'.*\) changed after the start: restore it, or"
    with pytest.raises(UserError, match=message):
        with_texts(started)
    earlier = started._replace(texts={})  # An earlier version did not write `texts`.
    assert with_texts(earlier).texts.keys() == started.texts.keys()


def test_the_seeds_of_a_group_sequential_study_are_fixed():
    made = plan(stop=Stop("group_sequential", 2))
    with pytest.raises(UserError, match="the levels of a group-sequential study belong to its number of seeds"):
        extended(made, dataclasses.replace(made.study, final=Final(seeds=5, downstream_seeds=2)))


def test_another_order_of_the_arms_has_the_same_jobs(tmp_path):
    folders = [
        {job.folder for job in Results(plan(arms), str(tmp_path)).next_jobs(range(3))}
        for arms in (("adamw", "muon"), ("muon", "adamw"))
    ]
    assert folders[0] == folders[1]


def test_another_tuning_measure_has_other_speeds(tmp_path):
    """Tests that a stored speed belongs to the measure that scores the trials."""
    study, asked = plan().study, []

    def ask(request):
        asked.append(request["speed"])
        return {"speed": {"trial_seconds": float(len(asked))}}

    worker = cast(Worker, SimpleNamespace(num_signals=0, ask=ask))
    first = measure_speeds(study, str(tmp_path), worker)
    assert measure_speeds(study, str(tmp_path), worker) == first and asked == ["adamw", "muon"]
    assert study.tuning is not None and study.tuning.measure == "loss"
    other = dataclasses.replace(study, tuning=dataclasses.replace(study.tuning, measure=""))
    measure_speeds(other, str(tmp_path), worker)
    assert asked == ["adamw", "muon"] * 2


def test_the_measures_of_an_arm_and_of_its_untrained_start_are_timed_once(tmp_path):
    study, twins = plan().study, {}
    start = dataclasses.replace(study.arms[0], name="start", untrained=True)
    study = dataclasses.replace(study, arms=(*study.arms, start))

    def ask(request):
        twins[request["speed"]] = request["twin"]
        return {"speed": {"measure_seconds": float(len(twins))}}

    speeds = measure_speeds(study, str(tmp_path), cast(Worker, SimpleNamespace(num_signals=0, ask=ask)))
    assert twins == {"adamw": None, "muon": None, "start": speeds["adamw"]}


@pytest.mark.parametrize("validations", [1, 10])
def test_timed_runs_validate_as_often_as_the_runs_that_they_estimate(validations):
    """Tests timed runs of a ladder, whose runs validate once.

    With ten validations, its timed runs took minutes and its estimate was too long.
    """
    every = []

    def train(experiment, _):
        every.append(experiment.train.steps / experiment.evaluate.every)
        return 0

    study = dataclasses.replace(plan().study, measures=(), tuning=None)
    measure_speed(study, Arm("gpt", "gpt2:tiny"), train, validations=validations)
    assert every == [validations] * 3
