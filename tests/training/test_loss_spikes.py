"""Tests loss spikes: the run detects one, rolls back and skips its data; kills in between change nothing."""

import math
import os
import signal

import numpy as np
import pytest

from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.checkpoints.steps import find_checkpoint
from pretrainax.config import RunFailed, TrainConfig, UserError
from pretrainax.config.validation import validate
from pretrainax.data.pipeline import Batches, phase_batches
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import TextFiles
from pretrainax.runs.train import train
from pretrainax.runtime.signals import PREEMPTED
from pretrainax.training import loop, loss_spikes
from pretrainax.training import train as core
from pretrainax.training.loop_state import Rollback
from pretrainax.training.loss_spikes import SkippingBatches, Spike, find_spike, observe_step, plan_rollback, skipped
from tests.support import tiny
from tests.support.runs import assert_same_run, lines, steps
from tests.support.traces import limit_traces

# --- detection -----------------------------------------------------------------------------------------------------


def settings(**changes) -> TrainConfig:
    few = {"on_spike": "rollback", "spike_window": 5, "spike_steps": 1, "rollback_steps": 3, "rollback_skip": 6}
    return TrainConfig(**few | changes)


def observations(losses, norms=None):
    return [[loss, math.log(norm)] for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True)]


# The median of 1.0 1.1 1.2 1.3 1.5 is 1.2. The distances from it are 0 0.1 0.1 0.2 0.3, and their median is 0.1, so
# the limit is 1.2 + 6 × 1.4826 × 0.1 = 2.08956.
PAST = [1.3, 1.0, 1.5, 1.1, 1.2]


@pytest.mark.parametrize("loss, is_one", [(2.0895, False), (2.0897, True)])
def test_the_limit_is_the_median_and_so_many_robust_deviations(loss, is_one):
    assert (find_spike(observations([*PAST, loss]), settings()) is not None) == is_one


def test_an_outlier_among_the_steps_before_does_not_move_the_limit():
    """Replacing 1.5 by 100 changes neither the median nor the median of the distances, 0.1."""
    past = [100.0 if loss == 1.5 else loss for loss in PAST]
    assert find_spike(observations([*past, 2.0897]), settings()) and not find_spike(
        observations([*past, 2.0895]), settings()
    )


@pytest.mark.parametrize("loss, is_one", [(2.119, False), (2.121, True)])
def test_a_deviation_counts_as_one_per_cent_of_the_loss_at_least(loss, is_one):
    """The limit is 6 × 1 % above 2.0."""
    assert (find_spike(observations([2.0] * 5 + [loss]), settings()) is not None) == is_one


@pytest.mark.parametrize("norm, is_one", [(math.exp(0.59), False), (math.exp(0.61), True)])
def test_the_gradient_norm_counts_by_its_logarithm_and_ten_per_cent_at_least(norm, is_one):
    found = find_spike(observations([2.0] * 6, [1.0] * 5 + [norm]), settings())
    assert (found is not None) == is_one and (not is_one or found.startswith("gradient norm"))


@pytest.mark.parametrize("newest, is_one", [([9, 9, 9], True), ([9, 1, 9], False), ([1, 9, 9], False)])
def test_a_spike_lasts(newest, is_one):
    assert (find_spike(observations([*PAST, *newest]), settings(spike_steps=3)) is not None) == is_one


def test_a_fall_is_no_spike():
    assert find_spike(observations([*PAST, 0.0], [1.0] * 5 + [1e-6]), settings()) is None


def test_nothing_is_judged_before_the_window_is_full():
    assert find_spike(observations([*PAST[1:], 100.0]), settings()) is None


def test_a_spike_is_dated_from_its_first_step():
    recent = observations(PAST)
    observe_step(recent, 6, 9.0, 1.0, settings(spike_steps=2))
    with pytest.raises(Spike, match=r"step 6: loss 9 is a spike: the median before is 1\.2, the limit 2\.09") as found:
        observe_step(recent, 7, 9.0, 1.0, settings(spike_steps=2))
    assert found.value.step == 6


def test_no_more_steps_are_remembered_than_are_judged():
    recent = []
    for step in range(1, 30):
        observe_step(recent, step, 2.0, 1.0, settings(spike_steps=3))
    assert len(recent) == 5 + 3


# --- the skipped data ----------------------------------------------------------------------------------------------


class OnePhase:
    """A run whose batches are their own indices."""

    def at(self, step):
        return range(1000)


def test_batches_are_skipped_from_a_step_on():
    batches = SkippingBatches(OnePhase(), [Rollback(spike=104, step=100, skipped=200)])
    assert [batches[i] for i in (0, 99, 100, 101)] == [0, 99, 300, 301]


@pytest.mark.parametrize(
    "second, at", [(150, {99: 99, 100: 300, 149: 349, 150: 550}), (80, {79: 79, 80: 480, 120: 520})]
)
def test_a_second_rollback_starts_where_the_first_one_ended(second, at):
    rollbacks = [Rollback(spike=step + 4, step=step, skipped=200) for step in (100, second)]
    assert {i: i + skipped(i, rollbacks) for i in at} == at


def test_a_rollback_leaves_out_the_spike_and_the_steps_before_it():
    decided = plan_rollback(Spike(50, ""), [], settings())
    assert decided == Rollback(spike=50, step=46, skipped=6)  # Batches 46 to 51; step 50 has batch 49.
    assert plan_rollback(Spike(2, ""), [], settings()).step == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rollback_skip": 100}, "config.train.rollback_skip is 100, it must be more than .*rollback_steps 100"),
        ({"spike_deviations": 0.0}, "config.train.spike_deviations is 0.0"),
        ({"spike_window": 1}, "config.train.spike_window is 1"),
        ({"on_spike": "rolback"}, "did you mean 'rollback'"),
        ({}, "config.checkpoint.keep 2 covers the last 5 steps, config.train.rollback_steps is 100"),
    ],
)
def test_settings_that_cannot_work_are_named(change, message):
    experiment = tiny.get_config("gpt")
    experiment.train.on_spike = "rollback"
    for name, value in change.items():
        setattr(experiment.train, name, value)
    with pytest.raises(UserError, match=message):
        validate(experiment)


# --- runs ----------------------------------------------------------------------------------------------------------


def spiking(text, cache):
    """Makes the config of a run that confirms a spike after two steps, and rolls back three."""
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.mesh.data = 8
    experiment.train = settings(
        steps=20, global_batch_size=8, log_every=2, spike_window=8, spike_steps=2, rollback_steps=3, rollback_skip=6
    )
    experiment.evaluate.every, experiment.evaluate.batches = 6, 1
    experiment.checkpoint.every, experiment.checkpoint.keep = 2, 3
    return experiment


@pytest.fixture(scope="module", autouse=True)
def without_the_pictures_of_the_end():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "finish", lambda *_: None)
        yield


@pytest.fixture
def experiment(text, cache):
    return spiking(text, cache)


@pytest.fixture(scope="module")
def whole(text, cache, tmp_path_factory):
    """Trains a run with a spike and without interruption."""
    workdir = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, (12, 13, 14), rare)
        assert train(spiking(text, cache), str(workdir)) == 0
    return workdir


RARE = 399  # the newest token of the vocabulary


def plant(monkeypatch, bad, change):
    """Applies `change` to the batches with the numbers `bad`."""
    whole = Batches.__getitem__

    def batch(batches, index):
        rows = whole(batches, index)
        return rows | change(rows) if index in bad and batches.rows else rows

    monkeypatch.setattr(Batches, "__getitem__", batch)


def rare(rows):
    """Makes targets of a token that the model has learned not to predict."""
    return {"targets": np.full_like(rows["targets"], RARE)}


def overflow(rows):
    return {"loss_weights": rows["loss_weights"] * np.float32(1e38)}


@pytest.fixture
def planted(monkeypatch):
    plant(monkeypatch, (12, 13, 14), rare)  # batches of steps 13, 14 and 15


@pytest.fixture
def used(monkeypatch):
    """Returns a dict with the number of the batch that each step used most recently."""
    numbers, whole = {}, SkippingBatches.__getitem__

    def note(batches, step):
        numbers[step + 1] = batches.index(step)
        return whole(batches, step)

    monkeypatch.setattr(SkippingBatches, "__getitem__", note)
    return numbers


def test_a_planted_spike_is_rolled_back_and_its_batches_are_never_used_again(
    experiment, tmp_path, planted, used, capsys, monkeypatch
):
    limit_traces(monkeypatch)  # The checkpoint's state has the same sharding, so nothing compiles twice.
    assert train(experiment, str(tmp_path)) == 0
    assert [used[step] for step in (8, 9, 10, 11, 20)] == [7, 8, 15, 16, 25]
    assert "step 13: " in (shown := capsys.readouterr().err)
    assert "rollback 1: back to step 8; after step 9 the run skips 6 batches" in shown
    train_lines = lines(tmp_path, "train")
    assert [line["step"] for line in train_lines] == list(range(2, 21, 2))
    assert [line["skipped_batches"] for line in train_lines] == [0] * 4 + [6] * 6
    assert [line["tokens"] for line in train_lines] == [
        256 * line["step"] for line in train_lines
    ]  # only of steps that were not rolled back
    assert shown.count(" s after the start") == 1
    loop_state = read_run_json(find_checkpoint(str(tmp_path)))["extra"]
    assert loop_state["rollbacks"] == [{"spike": 13, "step": 9, "skipped": 6}]


@pytest.mark.slow
def test_a_second_spike_within_what_is_run_again_goes_back_to_the_oldest_checkpoint(
    experiment, tmp_path, monkeypatch, used
):
    """After the first rollback the only checkpoint is step 8, not step 7; batches 16 to 18 are now steps 11 to 13."""
    plant(monkeypatch, (12, 13, 14, 16, 17, 18), rare)
    assert train(experiment, str(tmp_path)) == 0
    assert [used[step] for step in (8, 9, 20)] == [7, 20, 31]
    loop_state = read_run_json(find_checkpoint(str(tmp_path)))["extra"]
    assert loop_state["rollbacks"] == [{"spike": 13, "step": 9, "skipped": 6}, {"spike": 11, "step": 8, "skipped": 6}]


@pytest.mark.slow
def test_a_spike_that_began_before_the_only_checkpoint_costs_no_more_than_needed(experiment, tmp_path, planted):
    """The run detects a spike of steps 13 and 14 after 14, and uses its only checkpoint, 13, instead of restarting."""
    experiment.checkpoint.every, experiment.checkpoint.keep, experiment.train.log_every = 13, 1, 1
    experiment.evaluate.every, experiment.train.rollback_steps = 100, 0
    assert train(experiment, str(tmp_path)) == 0
    loop_state = read_run_json(find_checkpoint(str(tmp_path)))["extra"]
    assert loop_state["rollbacks"] == [{"spike": 13, "step": 13, "skipped": 6}]
    assert [line["step"] for line in lines(tmp_path, "train")] == list(range(1, 21))


@pytest.mark.slow
def test_a_rollback_deletes_no_checkpoint_that_is_damaged(experiment, tmp_path, monkeypatch, planted):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(loss_spikes, "observe_step", killing(at=13))
        train(experiment, str(tmp_path))
    (tmp_path / "checkpoints" / "12" / "run.json").write_text("{")
    experiment.checkpoint.every = experiment.evaluate.every = 100  # from 10 on: no other save replaces it
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(loss_spikes, "observe_step", killing(at=9))  # after the rollback
        train(experiment, str(tmp_path))
    assert steps(tmp_path) == [8, 12]


def test_any_number_of_processes_leaves_out_the_same_batches(experiment):
    prepared, rollbacks = prepare(experiment), [Rollback(spike=13, step=9, skipped=6)]
    one, *two = (
        SkippingBatches(phase_batches(experiment, prepared, index, count), rollbacks)
        for index, count in ((0, 1), (0, 2), (1, 2))
    )
    for step in (8, 9, 10):
        halves = [half[step]["tokens"] for half in two]
        np.testing.assert_array_equal(np.concatenate(halves), one[step]["tokens"])


@pytest.mark.slow
def test_the_steps_before_a_rollback_are_those_of_a_run_without_one(experiment, tmp_path, monkeypatch):
    assert train(experiment, str(tmp_path / "calm")) == 0
    plant(monkeypatch, (12, 13, 14), rare)
    assert train(experiment, str(tmp_path / "planted")) == 0
    calm, planted = ([line for line in lines(tmp_path / name) if line["step"] <= 8] for name in ("calm", "planted"))
    assert calm == planted and len(calm) == 5
    assert read_run_json(find_checkpoint(str(tmp_path / "calm")))["extra"]["rollbacks"] == []


class Killed(Exception):
    """Simulates a kill: the run neither saves nor cleans up."""


def killing(at, time=1):
    """Makes a `loss_spikes.observe_step` that raises `Killed` when it observes step `at` for the `time`-th time."""
    whole, calls = loss_spikes.observe_step, []

    def observe_step(recent, step, *values):
        calls.append(step)
        if calls.count(at) == time:
            raise Killed
        whole(recent, step, *values)

    return observe_step


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["during the rollback", "before the next save", "after the next save"])
def test_a_kill_around_a_rollback_changes_nothing(moment, whole, experiment, tmp_path, planted, monkeypatch):
    with monkeypatch.context() as patch:
        if moment == "during the rollback":
            restore_or_init = loop.restore_or_init

            def killed(run, checkpoints, up_to=None):
                if up_to is not None:
                    raise Killed
                return restore_or_init(run, checkpoints)

            patch.setattr(loop, "restore_or_init", killed)
        else:
            patch.setattr(
                loss_spikes, "observe_step", killing({"before the next save": 9, "after the next save": 14}[moment], 2)
            )
        with pytest.raises(Killed):
            train(experiment, str(tmp_path))
    assert train(experiment, str(tmp_path)) == 0
    assert_same_run(tmp_path, whole)


def late(experiment):
    """Makes the run keep so few checkpoints that none is old enough for the rollback: it uses the oldest one."""
    experiment.checkpoint.keep, experiment.train.rollback_steps = 2, 4
    return experiment


@pytest.fixture(scope="module")
def whole_and_late(text, cache, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("late")
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, (12, 13, 14), rare)
        assert train(late(spiking(text, cache)), str(workdir)) == 0
    assert read_run_json(find_checkpoint(str(workdir)))["extra"]["rollbacks"][0]["step"] == 10  # and not 8
    return workdir


@pytest.mark.slow
def test_a_kill_between_a_save_and_its_deletions_does_not_change_where_a_run_goes_back_to(
    whole_and_late, experiment, tmp_path, planted, monkeypatch
):
    whole = Checkpoints._delete_older

    def killed(checkpoints, newest):
        if newest == 12:
            raise Killed
        whole(checkpoints, newest)

    with monkeypatch.context() as patch, pytest.raises(RunFailed, match="could not save step 12: Killed"):
        patch.setattr(Checkpoints, "_delete_older", killed)
        train(late(experiment), str(tmp_path))
    assert steps(tmp_path) == [6, 8, 10, 12]
    assert train(late(experiment), str(tmp_path)) == 0
    assert_same_run(tmp_path, whole_and_late)


@pytest.mark.slow
@pytest.mark.parametrize("at", [(9,), (11,), (11, 17)])
def test_signals_do_not_change_where_a_run_goes_back_to(at, whole_and_late, experiment, tmp_path, planted, monkeypatch):
    """Each signal saves an extra step; if this step counted for `keep`, the run would delete an older checkpoint."""
    for stop in at:
        with monkeypatch.context() as patch:

            def leave(running, stop=stop):
                running.preemption.requested |= running.loop_state.step == stop

            patch.setattr(loop.Loop, "_check_corpora", leave)
            assert train(late(experiment), str(tmp_path)) == PREEMPTED
        assert steps(tmp_path)[-1] == stop
    assert train(late(experiment), str(tmp_path)) == 0
    assert_same_run(tmp_path, whole_and_late)


@pytest.mark.slow
def test_a_signal_during_a_rollback_saves_after_it(whole, experiment, tmp_path, planted, monkeypatch):
    restore_or_init = loop.restore_or_init

    def signalled(run, checkpoints, up_to=None):
        if up_to is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        return restore_or_init(run, checkpoints, up_to)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "restore_or_init", signalled)
        assert train(experiment, str(tmp_path)) == PREEMPTED
    assert steps(tmp_path) == [8, 9]
    assert train(experiment, str(tmp_path)) == 0
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_rolled_back_too(experiment, tmp_path, monkeypatch, capsys):
    plant(monkeypatch, (4,), overflow)
    assert train(experiment, str(tmp_path)) == 0
    assert "not finite at step 5 (examples 32 to 39)" in (shown := capsys.readouterr().err)
    assert "back to step 2; after step 2 the run skips 6 batches" in shown
    assert all(line["loss"] is not None for line in lines(tmp_path))


@pytest.mark.slow
def test_one_more_rollback_than_allowed_is_one_line(experiment, tmp_path, monkeypatch):
    plant(monkeypatch, range(12, 100), rare)
    experiment.train.max_rollbacks = 1
    with pytest.raises(RunFailed, match=r"step \d+: .* was rolled back 1 times, which is config\.train\.max_rollbacks"):
        train(experiment, str(tmp_path))


@pytest.mark.slow
def test_a_run_that_stopped_at_a_spike_may_be_resumed_with_a_rollback(whole, experiment, tmp_path, planted):
    experiment.train.on_spike = "stop"
    with pytest.raises(RunFailed, match=r"step 13: .* is a spike: the median before is .*, the limit"):
        train(experiment, str(tmp_path))
    experiment.train.on_spike = "rollback"
    assert train(experiment, str(tmp_path)) == 0
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
def test_the_noise_of_a_short_run_is_no_spike(experiment, tmp_path):
    """The run includes the first, steep steps, and single gradient norms that are five times the others."""
    experiment.train.steps, experiment.train.log_every, experiment.evaluate.every = 100, 20, 100
    experiment.train.spike_window, experiment.train.spike_steps = 16, TrainConfig().spike_steps
    experiment.checkpoint.every = 50
    experiment.train.on_spike = "stop"
    assert train(experiment, str(tmp_path)) == 0


# --- the observations of a step ------------------------------------------------------------------------------------


def test_a_step_is_remembered_by_its_loss_and_the_logarithm_of_its_gradient_norm():
    recent = []
    for step, norm in enumerate((math.e, 0.0), 1):
        observe_step(recent, step, 3.0, norm, settings())
    assert recent == [[3.0, 1.0], [3.0, math.log(1e-30)]]


def test_what_is_exactly_at_the_limit_is_no_spike():
    limit = 2.0 + 6.0 * (0.01 * 2.0)
    assert find_spike(observations([2.0] * 5 + [limit]), settings(spike_deviations=6.0)) is None
    assert find_spike(observations([2.0] * 5 + [math.nextafter(limit, 3.0)]), settings(spike_deviations=6.0))


def test_a_run_that_is_to_stop_at_a_spike_stops_and_one_that_ignores_them_remembers_nothing():
    with pytest.raises(RunFailed, match=r"step 6: loss 9 is a spike: .*; lower config\.optimizer\.learning_rate"):
        observe_step(observations(PAST), 6, 9.0, 1.0, settings(on_spike="stop"))
    recent = observations(PAST)
    observe_step(recent, 6, 9.0, 1.0, settings(on_spike="ignore"))
    assert recent == observations(PAST)


def test_as_many_rollbacks_as_are_allowed_are_made():
    once = [Rollback(spike=9, step=5, skipped=6)]
    assert plan_rollback(Spike(50, "step 50: x"), once, settings(max_rollbacks=2)).step == 46
    with pytest.raises(RunFailed, match="step 50: x; the run was rolled back 1 times, which is config.train.max_roll"):
        plan_rollback(Spike(50, "step 50: x"), once, settings(max_rollbacks=1))


def test_a_spike_says_what_was_seen():
    assert str(Spike(50, "step 50: x")) == "step 50: x"
