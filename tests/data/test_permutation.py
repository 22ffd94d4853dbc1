"""Tests functions of an index: permutations, shares of streams, random numbers."""

import numpy as np
import pytest

from pretrainax.data.mixture_schedule import MixtureSchedule
from pretrainax.data.permutation import permute
from pretrainax.data.rng import CounterRng


@pytest.mark.parametrize("size", [*range(1, 35), 1000, 4097])
def test_a_permutation_hits_every_place_once(size):
    assert sorted(permute(i, size, (1, 2, 3, 4, 5, 6)) for i in range(size)) == list(range(size))


def test_permutations_are_uniform():
    """Checks that many keys move every index of range(5) to every place equally often."""
    counts = np.zeros((5, 5))
    draws = np.random.default_rng(0).integers(2**64, size=(5000, 6), dtype=np.uint64).tolist()
    for keys in draws:
        for i in range(5):
            counts[i, permute(i, 5, tuple(keys))] += 1
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(5000 * 0.2 * 0.8)  # 5 standard deviations


def test_draws_follow_from_their_place_alone():
    one, other = CounterRng(3), CounterRng(3)
    [other.at(0, i).random(7) for i in (5, 1, 2**40)]
    np.testing.assert_array_equal(one.at(0, 9).random(5), other.at(0, 9).random(5))


def test_draws_of_other_places_differ():
    draws = {
        (s, i): tuple(CounterRng(seed).at(s, i).random(3)) for seed in (0, 1) for s in (0, 1) for i in (0, 1, 2**33)
    }
    assert len(set(draws.values())) == 6 and len({tuple(CounterRng(s).at(0, 0).random(3)) for s in range(9)}) == 9


def test_a_small_integer_does_not_linger_from_the_draw_before():
    """A 32-bit draw leaves half of a 64-bit word, which must not become a draw of the next place."""
    draws = CounterRng(0)
    first = draws.at(0, 1).integers(1 << 30, size=3, dtype=np.uint32).tolist()
    draws.at(0, 2).integers(1 << 30, size=1, dtype=np.uint32)
    assert draws.at(0, 1).integers(1 << 30, size=3, dtype=np.uint32).tolist() == first


def taken(shares, rows):
    return [shares[row] for row in range(rows)]


def test_a_single_stream_has_every_row():
    assert taken(MixtureSchedule([(0, (2.0,))]), 5) == [(0, n) for n in range(5)]


@pytest.mark.parametrize("weights", [(1, 1), (0.7, 0.3), (8, 1, 1), (0.999, 0.001), (1, 0, 2)])
def test_streams_count_their_own_rows_without_gaps(weights):
    seen = [0] * len(weights)
    for stream, n in taken(MixtureSchedule([(0, weights)]), 10_000):
        assert n == seen[stream]
        seen[stream] += 1
    for count, weight in zip(seen, weights, strict=True):
        # Within a cycle of 4,096 rows, the schedule rounds a share to a row.
        assert abs(count - 10_000 * weight / sum(weights)) <= 4


@pytest.mark.parametrize("weights", [(0.7, 0.3), (0.5, 0.3, 0.2)])
def test_any_run_of_rows_has_nearly_its_shares(weights):
    streams = np.array([stream for stream, _ in taken(MixtureSchedule([(0, weights)]), 9000)])
    for start in range(0, 8900, 37):
        counts = np.bincount(streams[start : start + 100], minlength=len(weights))
        assert np.abs(counts - 100 * np.array(weights)).max() <= 2


def test_a_later_stage_goes_on_where_the_streams_were():
    shares = MixtureSchedule([(0, (1, 1, 0)), (1000, (0, 1, 3)), (3001, (1, 0, 0))])
    seen = [0, 0, 0]
    for row, (stream, n) in enumerate(taken(shares, 5000)):
        assert n == seen[stream]
        seen[stream] += 1
        assert stream in ({0, 1} if row < 1000 else {1, 2} if row < 3001 else {0})
    assert seen[0] == 500 + 1999 and abs(seen[2] - 1500) <= 2


def test_a_small_weight_is_not_forgotten():
    assert any(stream == 1 for stream, _ in taken(MixtureSchedule([(0, (1, 1e-9))]), 2**18 + 1))


def test_a_small_weight_is_kept_to():
    rows = sum(stream == 1 for stream, _ in taken(MixtureSchedule([(0, (1, 1e-4))]), 2**18))
    assert abs(rows - 2**18 * 1e-4) < 1
