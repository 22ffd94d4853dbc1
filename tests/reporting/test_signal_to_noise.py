"""The signal-to-noise ratio of metrics."""

import numpy as np
import pytest

from pretrainax.reporting.signal_to_noise import last_values, signal_to_noise


def study(gap: float, models=2, seeds=5, seed=0):
    """Returns values of the last checkpoints of models whose means are `gap` apart; seeds have a spread of 1."""
    rng = np.random.default_rng(seed)
    return [[[model * gap + rng.normal()] for _ in range(seeds)] for model in range(models)]


def test_signal_and_noise_by_hand():
    found = signal_to_noise([[[1.0], [3.0]], [[6.0], [8.0]]])
    assert found is not None
    assert found.signal == 5.0 and found.seeds == pytest.approx(2**0.5) and found.noise == pytest.approx(1.0)
    assert not found.decides and found.ratio == pytest.approx(5.0)


def test_the_p_value_is_that_of_the_studentized_range():
    gap = 6.085  # This is the 5 % quantile of the range of two means with 2 degrees of freedom (Tukey's table).
    found = signal_to_noise([[[0.0], [2.0]], [[gap], [gap + 2.0]]])
    assert found is not None and found.p_value == pytest.approx(0.05, abs=2e-4)  # The table has this number of digits.


def test_a_trend_over_checkpoints_is_not_noise():
    found = signal_to_noise([[[5.0, 4.0, 3.0, 2.0, 1.0]], [[6.0, 5.1, 3.9, 3.1, 1.9]]])
    assert found is not None and found.seeds is None and found.checkpoints < 0.1 and found.decides


def test_one_model_or_unknown_noise_gives_nothing():
    assert signal_to_noise([[[1.0], [2.0]]]) is None
    assert signal_to_noise([[[1.0]], [[2.0]]]) is None
    assert signal_to_noise([[[1.0], [2.0]], [[]]]) is None


def test_equal_values_of_all_models_and_seeds_have_no_signal():
    found = signal_to_noise([[[1.0], [1.0]], [[1.0], [1.0]]])
    assert found is not None and found.ratio == 0 and not found.decides


@pytest.mark.parametrize("models", [2, 5])
def test_equal_models_are_decided_in_five_percent_of_cases(models):
    decided = np.mean([signal_to_noise(study(0.0, models, seed=i)).decides for i in range(300)])
    assert decided < 0.05 + 3 * 0.0126  # The tolerance is three standard errors of 300 draws.


def test_a_large_gap_is_decided():
    # The gap is 8 standard errors of a difference.
    assert all(signal_to_noise(study(5.0, seed=i)).decides for i in range(20))


def test_only_the_last_validations_count():
    lines = [{"split": "valid", "step": i, "loss": float(i)} for i in range(8)] + [{"split": "train", "loss": 9.0}]
    assert last_values(lines, "loss") == [3.0, 4.0, 5.0, 6.0, 7.0] and last_values(lines, "accuracy") == []
