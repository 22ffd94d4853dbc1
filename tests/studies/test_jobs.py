"""Tests the jobs of a study in one process: failures do not end the study, and additions are complete and correct."""

import dataclasses
import json
import math
import os

import numpy as np
import pytest

from pretrainax.config import Diverged, RunFailed, UserError
from pretrainax.files.json_files import read_object
from pretrainax.studies.findings import findings_of
from pretrainax.studies.jobs import Results
from pretrainax.studies.ladder.jobs import LadderJob, perform_rung
from pretrainax.studies.outcomes import Outcome
from pretrainax.studies.perform import perform
from pretrainax.studies.plan import extended, write_plan
from pretrainax.studies.study import Contrast, Final, Tuning
from pretrainax.studies.verdicts import judge
from tests.studies import fake_study
from tests.studies.fake_study import ADAM, RATE, LastLoss, plan
from tests.support.runs import TINY


def finish(made, workdir, train=fake_study.train):
    """Performs all jobs of a plan; returns the results and the labels of the jobs."""
    write_plan(str(workdir), made)
    final, labels = made.study.final, []
    seeds, results = range(final.seed, final.seed + final.seeds), Results(made, str(workdir))
    while jobs := results.next_jobs(seeds):
        assert jobs[0].label not in labels
        labels.append(jobs[0].label)
        assert perform(made, str(workdir), jobs[0], train) == 0
    return results, labels


def diverging(condition, message="step 3: the loss is not finite"):
    """Returns the training function of `fake_study`, except that runs diverge if their config satisfies a condition."""

    def train(experiment, folder):
        os.makedirs(folder, exist_ok=True)
        if condition(experiment):
            raise Diverged(message)
        return fake_study.train(experiment, folder)

    return train


def test_a_trial_that_diverges_counts_as_failed(tmp_path):
    results, _ = finish(plan(), tmp_path, diverging(lambda experiment: experiment.optimizer.learning_rate > 8e-3))
    found = findings_of(results, range(3))
    failed = [trial.values[RATE] for trial in found.trials if trial.value is None]
    assert failed and min(failed) > 8e-3 and found.chosen["adamw"] == {RATE: 3e-3}
    assert sorted(found.outcomes["loss"]["adamw"]) == [0, 1, 2]


def test_a_final_run_that_diverges_is_reported_and_another_one_chooses_for_the_arm(tmp_path):
    train = diverging(lambda x: type(x.optimizer).__name__ == "Muon" and x.train.seed_of("init") == 0)
    results, labels = finish(plan(tuning=None), tmp_path, train)
    found = findings_of(results, range(3))
    assert found.changes == ["final/muon/default/seed-0 failed: step 3: the loss is not finite"]
    assert [label for label in labels if "choose" in label] == [
        "final/adamw/default/seed-0 choose",
        "final/muon/default/seed-1 choose",
    ]
    assert sorted(found.outcomes["loss"]["muon"]) == [1, 2] and found.choices["loss"]["muon"] == {"of": 1}


class DivergingMeasure(LastLoss):
    """A measure that diverges for the runs of one arm and seed, or during the choice of the arm's settings."""

    at = "seed-1"

    def choose(self, folder, experiment, context):
        if self.at == "choose" and "muon" in folder:
            raise Diverged("all rates diverged")
        return super().choose(folder, experiment, context)

    def outcomes(self, folder, experiment, context):
        if "muon" in folder and self.at in folder:
            raise Diverged("the fine-tuning diverged")
        return super().outcomes(folder, experiment, context)


@pytest.mark.parametrize(
    "at, change, seeds",
    [
        ("seed-1", "the measures of final/muon/default/seed-1 failed: the fine-tuning diverged", [0, 2]),
        ("choose", "the settings of the measures of muon were not chosen: all rates diverged", []),
    ],
)
def test_a_measure_that_diverges_does_not_end_the_study(at, change, seeds, tmp_path, monkeypatch):
    monkeypatch.setattr(DivergingMeasure, "at", at)
    results, _ = finish(plan(tuning=None, measures=(DivergingMeasure("loss"),)), tmp_path)
    found = findings_of(results, range(3))
    assert found.changes == [change]
    assert sorted(found.outcomes["loss"]["muon"]) == seeds and sorted(found.outcomes["loss"]["adamw"]) == [0, 1, 2]


class MeasureWithoutNumbers(LastLoss):
    """A measure whose numbers are not finite for some runs: the seed 1 of an arm, and a learning rate of the tuning."""

    outcome = Outcome(math.nan)

    def outcomes(self, folder, experiment, context):
        is_bad = "muon" in folder and experiment.train.seed_of("init") == 1 or experiment.optimizer.learning_rate < 2e-3
        return [self.outcome] if is_bad else super().outcomes(folder, experiment, context)


@pytest.mark.parametrize("outcome", [Outcome(math.nan), Outcome(math.inf), Outcome(1.0, np.array([0.1, math.nan]))])
def test_a_measure_that_is_not_finite_counts_as_failed(outcome, tmp_path, monkeypatch):
    """The smallest rate is the first trial, which would otherwise have the smallest cost: no number is below NaN."""
    monkeypatch.setattr(MeasureWithoutNumbers, "outcome", outcome)
    tuning = Tuning({RATE: (0.3, 1.0, 3.0)}, measure="bits")
    made = plan(tuning=tuning, measures=(MeasureWithoutNumbers("bits"),), primary=Contrast("bits", "adamw", "muon"))
    results, _ = finish(made, tmp_path)
    found = findings_of(results, range(3))
    assert found.chosen["adamw"] == {RATE: 3e-3}
    (change,) = found.changes
    assert change.startswith("the measures of final/muon/") and "seed-1 failed: bits is not finite" in change
    assert sorted(found.outcomes["bits"]["muon"]) == [0, 2]
    assert "2 of 3 seeds are finished" in judge(made.study, found)[0].text


@pytest.mark.parametrize("error", [UserError, RunFailed])
def test_a_wrong_config_or_a_full_disk_is_no_result_of_a_run(error, tmp_path):
    def train(experiment, folder):
        raise error("could not write: No space left on device")

    with pytest.raises(error, match="No space left"):
        finish(plan(tuning=None), tmp_path, train)
    assert not list(tmp_path.rglob("result.json"))


def test_a_rung_of_a_ladder_that_diverges_is_reported(tmp_path):
    job = LadderJob("trunk", f"{TINY}:gpt", ())
    assert perform_rung(job, str(tmp_path), diverging(lambda _: True)) == 0
    assert read_object(str(tmp_path / "trunk" / "result.json"))["failed"] == "step 3: the loss is not finite"


def test_an_added_arm_that_changes_the_best_values_of_an_old_one_repeats_its_final_runs(tmp_path):
    best = {"adamw": (3e-3 * 1.15, 3e-4), "muon": (3e-3, 3e-4), "muon2": (3e-3, 9e-4)}

    def train(experiment, folder):
        fake_study.train(experiment, folder)
        arm = os.path.relpath(folder, tmp_path).split(os.sep)[1]
        rates = experiment.optimizer.learning_rate, getattr(experiment.optimizer, "adam_learning_rate", best[arm][1])
        loss = sum(math.log(rate / wanted) ** 2 for rate, wanted in zip(rates, best[arm], strict=True))
        lines = [json.loads(line) | {"loss": loss} for line in open(os.path.join(folder, "metrics.jsonl"))]
        with open(os.path.join(folder, "metrics.jsonl"), "w") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
        return 0

    first = plan(tuning=Tuning({RATE: (0.5, 1.0, 2.0), ADAM: (0.5, 1.0, 2.0)}))
    results, _ = finish(first, tmp_path, train)
    before = results.search().chosen["adamw"][RATE]
    arms = (*first.study.arms, dataclasses.replace(first.study.arms[1], name="muon2"))
    study = dataclasses.replace(first.study, arms=arms, final=Final(seeds=4, downstream_seeds=2))
    grown = extended(first, study)._replace(lengths=dict.fromkeys(best, first.lengths["adamw"]))
    results, _ = finish(grown, tmp_path, train)
    found = findings_of(results, range(4))
    after = found.chosen["adamw"][RATE]
    assert after != before
    commands = [run.command for run in found.runs if run.arm == "adamw"]
    assert len(commands) == 4 and all(f"learning_rate={after!r}" in command for command in commands)
    unused = f"the runs in final/adamw/{RATE}={before!r} are not used"
    assert found.changes[-1] == f"an addition to the study changed the best values of adamw: {unused}"


def test_an_added_measure_is_computed_by_jobs(tmp_path):
    first = plan(tuning=None)
    finish(first, tmp_path)
    study = dataclasses.replace(first.study, measures=(*first.study.measures, LastLoss("added")))
    results, labels = finish(extended(first, study), tmp_path)
    assert len(labels) == 2 + 6 and all(label.endswith(("choose", "measure")) for label in labels)
    found = findings_of(results, range(3))
    assert found.choices["added"] == {"adamw": {"of": 0}, "muon": {"of": 0}}
    assert sorted(found.outcomes["added"]["muon"]) == [0, 1, 2]
