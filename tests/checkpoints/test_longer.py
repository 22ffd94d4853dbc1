"""Runs that continue after their planned end equal a longer plan bit by bit, or are rejected without --extend."""

import dataclasses
import json

import pytest

from pretrainax.checkpoints import longer
from pretrainax.config import Phase, UserError
from pretrainax.data.objectives import MaskedLM, NextSentencePrediction, ObjectiveMixture, RateChange
from pretrainax.data.sources import PythonDocs, SourceMixture, TextFiles
from pretrainax.optim import WarmupConstant, WarmupCosine, WarmupInverseSquareRoot, WarmupLinear, WarmupStableDecay
from pretrainax.runs.train import train
from tests.support import tiny
from tests.support.runs import arrays, lines, steps

pytestmark = pytest.mark.slow


def make(steps, schedule, source=None):
    experiment = tiny.get_config("gpt")
    experiment.train.steps, experiment.schedule = steps, schedule
    experiment.data.source = source or PythonDocs()
    return experiment


# --- allowed continuations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [WarmupConstant(5), WarmupInverseSquareRoot(5)])
@pytest.mark.parametrize("done", [0, 3, 10, 20])
def test_a_rate_that_does_not_depend_on_the_steps_needs_no_word(schedule, done):
    assert longer.extend(make(20, schedule), make(40, schedule), done, agreed=False) == "extended from 20 to 40 steps"


@pytest.mark.parametrize("schedule", [WarmupCosine(5), WarmupLinear(5), WarmupStableDecay(5, decay_steps=10)])
def test_a_rate_that_does_is_shown_and_asked_for(schedule):
    old, new = make(20, schedule), make(40, schedule)
    with pytest.raises(UserError) as refused:
        longer.extend(old, new, 20, agreed=False)
    line = str(refused.value)
    assert "config.train.steps is raised from 20 to 40" in line and "Add --extend" in line
    rates = [float(schedule.build(3e-3, length)(20)) for length in (20, 40)]
    for rate, length in zip(rates, (20, 40), strict=True):
        assert f"{rate:.3g} in the schedule of {length} steps" in line
    said = longer.extend(old, new, 20, agreed=True)
    assert said.startswith("extended from 20 to 40 steps: the learning rate of step 21 is")


@pytest.mark.parametrize(
    "schedule, same, other",
    [(WarmupCosine(5), 5, 8), (WarmupLinear(5), 5, 8), (WarmupStableDecay(5, decay_steps=10), 11, 13)],
)
def test_a_run_whose_rates_so_far_are_those_of_the_longer_plan_needs_no_word(schedule, same, other):
    old, new = make(20, schedule), make(40, schedule)
    assert longer.extend(old, new, same, agreed=False) == "extended from 20 to 40 steps"
    with pytest.raises(UserError, match=f"the {other} completed steps differ"):
        longer.extend(old, new, other, agreed=False)


def test_steps_are_never_lowered():
    schedule = WarmupConstant(5)
    for agreed in (False, True):
        with pytest.raises(UserError, match="config.train.steps is 10, the run was planned for 20: .* not lowered"):
            longer.extend(make(20, schedule), make(10, schedule), 5, agreed)


def test_stages_of_a_mixture_that_have_passed_are_asked_for():
    sources = (PythonDocs(), PythonDocs())
    source = SourceMixture(sources=sources, weights=(1, 1), stages=((0.5, (0, 1)),))
    old, new = (make(length, WarmupConstant(5), source) for length in (20, 40))
    assert longer.extend(old, new, 10, agreed=False)
    with pytest.raises(UserError, match="the stages of config.data.source"):
        longer.extend(old, new, 11, agreed=False)
    without = SourceMixture(sources=sources, weights=(1, 1))
    assert longer.extend(*(make(n, WarmupConstant(5), without) for n in (20, 40)), 20, agreed=False)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda masked: masked,
        lambda masked: NextSentencePrediction(masking=masked),
        lambda masked: ObjectiveMixture(objectives=(MaskedLM(), masked)),
    ],
)
def test_a_rate_of_masks_that_has_begun_to_change_is_asked_for(wrapped):
    old, new = (make(length, WarmupConstant(5)) for length in (20, 40))
    old.objective = new.objective = wrapped(MaskedLM(rate=0.3, rate_change=RateChange(to=0.1, begin=0.5)))
    assert longer.extend(old, new, 10, agreed=False)
    with pytest.raises(UserError, match="rate_change in config.objective"):
        longer.extend(old, new, 11, agreed=False)


PHASED = (Phase(steps=10, sequence_length=16), Phase())


@pytest.mark.parametrize("last", [Phase(), Phase(steps=10)])
def test_phases_that_stay_where_they_were_need_no_word(last):
    old, new = make(20, WarmupConstant(5)), make(40, WarmupConstant(5))
    old.phases, new.phases = (PHASED[0], last), PHASED
    assert longer.extend(old, new, 20, agreed=False) == "extended from 20 to 40 steps"


def test_phases_that_move_are_asked_for_where_a_step_done_was_of_another():
    old, new = make(20, WarmupConstant(5)), make(40, WarmupConstant(5))
    old.phases = new.phases = (Phase(share=0.5, sequence_length=16), Phase())
    assert longer.extend(old, new, 10, agreed=False) == "extended from 20 to 40 steps"
    with pytest.raises(
        UserError, match="step 11 was trained in phase 2, steps 11 to 20: .*, and would now be in phase 1, steps"
    ):
        longer.extend(old, new, 11, agreed=False)
    assert "step 11 was trained in phase 2" in longer.extend(old, new, 11, agreed=True)


def test_the_rates_of_each_phase_are_compared():
    old, new = make(20, WarmupCosine(5)), make(40, WarmupCosine(5))
    old.phases = new.phases = (Phase(steps=10), Phase(learning_rate=1.0))
    rates = [float(WarmupCosine(5).build(1.0, length)(11)) for length in (20, 40)]
    with pytest.raises(UserError) as refused:
        longer.extend(old, new, 11, agreed=False)
    line = "the learning rate of step 12 is {:.3g} in the schedule of 20 steps and {:.3g} in the schedule of 40 steps"
    assert line.format(*rates) in str(refused.value)


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(text, cache):
    """Returns a run of 4 steps at a constant learning rate."""
    experiment = make(4, WarmupConstant(2), TextFiles(path=str(text)))
    experiment.data.cache_dir, experiment.mesh.data = str(cache), 8
    experiment.evaluate.batches, experiment.checkpoint.every = 1, 3
    return experiment


def of(experiment, steps, **parts):
    """Returns a new config, as the next command would have it."""
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, steps=steps), **parts)


@pytest.fixture(scope="module")
def whole(short, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    assert train(of(short, 9), str(workdir)) == 0
    return workdir


def test_a_run_that_is_extended_twice_is_that_of_the_longer_plan_bit_for_bit(short, whole, tmp_path, capfd):
    for length in (4, 6, 9):
        assert train(of(short, length), str(tmp_path)) == 0
    assert "extended from 6 to 9 steps" in capfd.readouterr().err
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 9
    expected, got = arrays(whole), arrays(tmp_path)
    assert expected.keys() == got.keys() and steps(tmp_path)[-1] == 9
    assert all(got[path].tobytes() == expected[path].tobytes() for path in expected)
    assert lines(tmp_path, "train") == lines(whole, "train")
    starts = json.loads((tmp_path / "goodput.json").read_text())
    assert [(start["step"], start["done"]) for start in starts] == [(4, True), (6, True), (9, True)]
    with pytest.raises(UserError, match="config.train.steps is 4, the run was planned for 9"):
        train(of(short, 4), str(tmp_path))
    assert train(of(short, 9), str(tmp_path)) == 0  # the same command again


def test_another_field_is_refused_whatever_the_steps(short, whole):
    changed = of(short, 20, optimizer=dataclasses.replace(short.optimizer, learning_rate=1.0))
    for extend in (False, True):
        with pytest.raises(UserError, match="another config: optimizer.learning_rate: 0.003 -> 1.0, train.steps"):
            train(changed, str(whole), extend=extend)


def test_nothing_to_extend_is_said(short, tmp_path):
    with pytest.raises(UserError, match="--extend requires an existing run"):
        train(short, str(tmp_path / "run"), extend=True)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_a_schedule_with_an_end_goes_on_when_asked(short, tmp_path, capfd):
    cosine = {"schedule": WarmupCosine(2)}
    assert train(of(short, 4, **cosine), str(tmp_path)) == 0
    with pytest.raises(UserError, match="Add --extend"):
        train(of(short, 6, **cosine), str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 4
    assert train(of(short, 6, **cosine), str(tmp_path), extend=True) == 0
    assert "extended from 4 to 6 steps: the learning rate of step 5 is" in capfd.readouterr().err
    rate = WarmupCosine(2).build(3e-3, 6)
    logged = {line["step"]: line["learning_rate"] for line in lines(tmp_path, "train")}
    assert logged[5] == pytest.approx(float(rate(4))) and logged[6] == pytest.approx(float(rate(5)))
    # The user sets --extend only once. The same command resumes without it.
    assert train(of(short, 6, **cosine), str(tmp_path)) == 0


@pytest.mark.slow
def test_a_run_that_ended_for_lack_of_patience_goes_on_with_more(short, tmp_path, capfd):
    still = {"optimizer": dataclasses.replace(short.optimizer, learning_rate=0.0)}
    impatient = dataclasses.replace(short.evaluate, every=1, patience=2)
    assert train(of(short, 6, evaluate=impatient, **still), str(tmp_path)) == 0
    assert "to continue, run the same command with a larger config.evaluate.patience" in capfd.readouterr().err
    assert steps(tmp_path)[-1] < 6
    patient = dataclasses.replace(impatient, patience=None)
    assert train(of(short, 6, evaluate=patient, **still), str(tmp_path)) == 0
    assert steps(tmp_path)[-1] == 6
