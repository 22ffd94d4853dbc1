"""Tests arms without training: initial parameters, no budget, no trials, and no measures of training steps."""

import dataclasses
import shutil

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.studies import estimate
from pretrainax.studies.checks import check_study
from pretrainax.studies.jobs import RUN, Results, experiment_of
from pretrainax.studies.measures import Throughput
from pretrainax.studies.outcomes import FinalRun
from pretrainax.studies.perform import perform
from pretrainax.studies.plan import Plan
from pretrainax.studies.report import build, render_markdown
from pretrainax.studies.study import Arm, Contrast
from pretrainax.studies.trainer import Trainer
from tests.studies.fake_study import RATE, LastLoss, plan
from tests.support.made_studies import whole_study
from tests.support.runs import arrays, steps, write_text

SPEED = {
    "step_seconds": 0.5,
    "fixed_seconds": 4.0,
    "choose_seconds": 0.0,
    "measure_seconds": 1.0,
    "trial_seconds": 0.0,
    "devices": "1 x cpu",
}


def untrained_plan(*flags: str, **changes) -> Plan:
    """Returns the study of `fake_study` with an untrained arm instead of Muon."""
    started = plan()
    trained, arm = started.study.arms[0], Arm("untrained", started.study.arms[0].config, flags, untrained=True)
    trained = dataclasses.replace(trained, flags=(*trained.flags, *flags))
    contrast = Contrast("loss", "adamw", "untrained")
    assert started.study.tuning is not None
    tuning = dataclasses.replace(started.study.tuning, grid={RATE: (0.3, 1.0, 3.0)})
    changes = {"arms": (trained, arm), "primary": contrast, "tuning": tuning} | changes
    length = started.lengths["adamw"]
    lengths = {"adamw": length, "untrained": length._replace(steps=0, flops=0.0)}
    return Plan(dataclasses.replace(started.study, **changes), lengths)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("untrained")
    return f"--config.data.source.path={write_text(folder / 'text')}", f"--config.data.cache_dir={folder / 'cache'}"


def test_the_run_has_the_parameters_before_the_first_update(text, tmp_path):
    started, train = untrained_plan(*text), Trainer().train
    job = Results(started, str(tmp_path)).final("untrained", 3, "train", {"untrained": {}})
    for _ in range(2):  # The second call simulates a kill before the result file was written.
        assert perform(started, str(tmp_path), job, train) == 0
    result = Results(started, str(tmp_path)).of(job)
    assert result is not None and result["steps"] == result["flops"] == 0 and not result["failed"]
    assert steps(tmp_path / job.folder / RUN) == [0]
    trained = experiment_of(started, job._replace(arm="adamw"))
    trained.train.steps, trained.checkpoint.keep_at = 2, (0,)
    assert train(trained, str(tmp_path / "trained")) == 0
    shutil.rmtree(tmp_path / "trained" / "checkpoints" / "2")
    own, other = arrays(tmp_path / job.folder / RUN), arrays(tmp_path / "trained")
    assert own.keys() == other.keys() and all(np.array_equal(own[name], other[name]) for name in own)


def test_the_arm_has_no_trials_and_no_steps(tmp_path):
    started = untrained_plan()
    assert {job.arm for job in Results(started, str(tmp_path)).next_jobs(range(3))} == {"adamw"}
    without_tuning = Results(untrained_plan(tuning=None), str(tmp_path)).next_jobs(range(2))
    assert [(job.arm, job.stop) for job in without_tuning[:2]] == [("adamw", None), ("untrained", 0)]
    found = estimate.estimates(started, {"adamw": SPEED, "untrained": SPEED | {"step_seconds": 0.0}})["untrained"]
    assert found.flops == 0 and found.seconds == 3 * (4.0 + 1.0)  # The terms are the starts and measures of three runs.
    assert "total: 3 trials and 6 final runs" in estimate.report(started, dict.fromkeys(started.lengths, SPEED), None)


def test_a_measure_of_training_steps_is_a_mistake(text):
    study = untrained_plan(*text, measures=(LastLoss("loss"), Throughput("speed"))).study
    with pytest.raises(
        UserError, match=r"arms\[1\] \(untrained\): measures\[1\] \(speed\): it measures training steps"
    ):
        check_study(study, "study.toml")
    arms = tuple(dataclasses.replace(arm, untrained=True) for arm in study.arms)
    with pytest.raises(UserError, match="arms has only untrained arms: train at least one"):
        check_study(dataclasses.replace(study, arms=arms, measures=study.measures[:1]), "study.toml")


def test_the_report_names_the_arm_and_compares_the_costs_of_the_others():
    study, findings = whole_study()
    arms = [dataclasses.replace(arm, untrained=arm.name == "lion") for arm in study.arms]
    runs = [
        x if x.arm != "lion" else FinalRun(**x._asdict() | {"steps": 0, "flops": 0.0, "lines": []})
        for x in findings.runs
    ]
    trials = [trial for trial in findings.trials if trial.arm != "lion"]
    study = dataclasses.replace(study, arms=tuple(arms))
    report = build(study, findings._replace(runs=runs, trials=trials))
    text = render_markdown(report)
    assert "- Without training, budget and trials: lion." in text and "| lion | 0 | 0 | 0 | 0 | 5 | 0 | 0 |  |" in text
    assert len(next(section for section in report.sections if section.title == "Curves").plots) == 3
