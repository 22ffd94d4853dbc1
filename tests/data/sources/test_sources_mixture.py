"""Tests the weights of a mixture of corpora: the paper's formula, their change by stage, and their validation."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax import config as config_lib
from pretrainax.config import Choice
from pretrainax.data.sources import JsonLines, PythonDocs, SourceMixture, TextFiles

DOCS, LINES, BOOKS = PythonDocs(), JsonLines(path="."), TextFiles(path=".")
THREE = (DOCS, LINES, BOOKS)


def first_weights(mixture, sizes):
    ((start, weights),) = mixture.weight_stages(sizes)
    assert start == 0 and sum(weights) == pytest.approx(1)
    return weights


def test_weights_follow_the_examples():
    assert first_weights(SourceMixture(THREE), [100, 300, 600]) == pytest.approx((0.1, 0.3, 0.6))


def test_limit_caps_what_a_source_counts():
    assert first_weights(SourceMixture(THREE, limit=100), [100, 300, 50]) == pytest.approx((0.4, 0.4, 0.2))


def test_temperature_is_an_exponent_of_capped_counts():
    """Checks Raffel et al. 2020, section 3.5.2: min(e, K) ** (1 / T), normalised."""
    rates = np.minimum([100, 300, 5000], 400) ** (1 / 2)
    assert first_weights(SourceMixture(THREE, limit=400, temperature=2.0), [100, 300, 5000]) == pytest.approx(
        tuple(rates / rates.sum())
    )


def test_high_temperature_mixes_equally():
    weights = first_weights(SourceMixture(THREE, temperature=1e9), [1, 10**6, 10**12])
    assert weights == pytest.approx((1 / 3,) * 3)


@given(sizes=st.lists(st.integers(1, 2**40), min_size=3, max_size=3), temperature=st.floats(1e-3, 1e3))
def test_weights_of_any_sizes_are_finite(sizes, temperature):
    weights = first_weights(SourceMixture(THREE, temperature=temperature), sizes)
    assert np.isfinite(weights).all() and min(weights) >= 0


def test_given_weights_are_normalised():
    assert first_weights(SourceMixture(THREE, weights=(1, 1, 2)), [5, 5, 5]) == (0.25, 0.25, 0.5)


def test_stages_change_the_weights():
    mixture = SourceMixture((DOCS, LINES), weights=(9, 1), stages=((0.5, (1, 1)), (0.8, (0, 5))))
    assert mixture.weight_stages([1, 1]) == [(0.0, (0.9, 0.1)), (0.5, (0.5, 0.5)), (0.8, (0.0, 1.0))]


def test_mixture_within_a_mixture_keeps_its_share():
    inner = SourceMixture((LINES, BOOKS), weights=(1, 3), stages=((0.7, (1, 1)),))
    outer = SourceMixture((DOCS, inner), stages=((0.5, (0.2, 0.8)),))
    assert [type(c) for c in outer.components()] == [PythonDocs, JsonLines, TextFiles]
    stages = outer.weight_stages([100, 200, 100])
    assert [start for start, _ in stages] == [0.0, 0.5, 0.7]
    for (_, weights), wanted in zip(stages, [(0.25, 0.1875, 0.5625), (0.2, 0.2, 0.6), (0.2, 0.4, 0.4)], strict=True):
        assert weights == pytest.approx(wanted)


def test_a_single_source_is_its_own_component():
    assert (DOCS.components(), DOCS.weight_stages([7])) == ((DOCS,), [(0.0, (1.0,))])


def test_mixture_holds_pairs_if_a_source_does():
    translation = dataclasses.replace(LINES, target_field="de")
    assert not SourceMixture(THREE).pairs and SourceMixture((DOCS, translation)).pairs
    assert [c.pairs for c in SourceMixture((DOCS, translation)).components()] == [False, True]


PROBLEMS = {
    "weights has 2 weights, config.data.source.sources has 3 sources": {"weights": (1, 1)},
    "weights is (1, -1, 1): they must not be negative, and not all 0": {"weights": (1, -1, 1)},
    "weights is (0, 0, 0): they must not be negative, and not all 0": {"weights": (0, 0, 0)},
    "weights is (1, nan, 1): they must not be negative, and not all 0": {"weights": (1, float("nan"), 1)},
    "weights is (1, inf, 1): they must not be negative, and not all 0": {"weights": (1, float("inf"), 1)},
    "stages[0][1] is (0, 0, 0): they must not be negative, and not all 0": {"stages": ((0.5, (0, 0, 0)),)},
    "stages[1][1] has 1 weights, config.data.source.sources has 3 sources": {"stages": ((0.5, (1, 1, 1)), (0.6, (1,)))},
    "stages start at [0.8, 0.5]: they must increase, and be between 0 and 1": {
        "stages": ((0.8, (1, 1, 1)), (0.5, (1, 1, 1)))
    },
    "stages start at [1.0]: they must increase, and be between 0 and 1": {"stages": ((1.0, (1, 1, 1)),)},
    "temperature is 0.0, it must be greater than 0": {"temperature": 0.0},
    "limit is 0, it must be at least 1": {"limit": 0},
    "weights are set, so that config.data.source.temperature and limit have no effect: remove them": {
        "weights": (1, 1, 1),
        "limit": 5,
    },
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_impossible_mixture_is_a_problem_of_the_config(problem):
    (got,) = SourceMixture(THREE, **PROBLEMS[problem]).problems(None)
    assert got == f"config.data.source.{problem}"


def test_empty_mixture_is_a_problem_of_the_config():
    assert "config.data.source.sources is empty: give at least one" in SourceMixture(()).problems(None)


def test_problem_of_a_source_names_its_place():
    inner = SourceMixture((DOCS, JsonLines(path="/no/such/file")))
    assert list(SourceMixture((DOCS, inner)).problems(None)) == [
        "config.data.source.sources[1].sources[1].path is '/no/such/file', which does not exist"
    ]


def test_error_while_reading_names_the_place(tmp_path):
    _, empty = SourceMixture((DOCS, TextFiles(path=str(tmp_path)))).components()
    with pytest.raises(config_lib.UserError, match=r"config\.data\.source\.sources\[1\]\.path is .*: no \.txt file"):
        empty.shards("train")


def test_what_is_no_source_is_a_problem_of_the_config():
    (problem,) = SourceMixture((DOCS, "books")).problems(None)
    assert problem == "config.data.source.sources[1] is str, it must be a Source"


def test_mixture_goes_through_json():
    mixture = SourceMixture((DOCS, SourceMixture((LINES, BOOKS))), weights=(1.0, 2.0), stages=((0.5, (1.0, 0.0)),))
    assert config_lib.from_json(SourceMixture, json.loads(json.dumps(config_lib.to_json(mixture)))) == mixture


def test_mixture_comes_from_a_flag():
    text = (
        "SourceMixture(sources=(PythonDocs, JsonLines(path='.'), SourceMixture(sources=[TextFiles(path='.')])), "
        "stages=((0.5, (1, 1, 0)),))"
    )
    wanted = SourceMixture((DOCS, LINES, SourceMixture((BOOKS,))), stages=((0.5, (1, 1, 0)),))
    assert Choice.parse(text) == wanted
