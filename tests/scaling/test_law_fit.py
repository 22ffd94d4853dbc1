"""Simulated ladders: the intervals cover the known law, no ladder raises, and a law without evidence is marked."""

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.scaling import law_fit
from pretrainax.scaling.fit import MIN_RUNS, check_enough
from pretrainax.scaling.law_fit import Run, fit, interval, unidentified
from pretrainax.scaling.picture import draw_law
from pretrainax.scaling.power_laws import CONSTANTS, LossLaw

SHOWN = ("E", "alpha", "beta", "exponent")


def ladder(rng, count, noise, sizes=None):
    """Runs of a random law, with random sizes and amounts of text; the first two runs have the same size."""
    alpha, beta = rng.uniform(0.2, 0.5, 2)
    n = np.resize(sizes, count) if sizes is not None else np.exp(rng.uniform(np.log(1e4), np.log(1e9), count))
    n[1] = n[0]
    d = n * np.exp(rng.uniform(np.log(2), np.log(200), count))
    a, b = (
        s * np.exp(x * np.log(v).mean()) for s, x, v in zip(rng.uniform(0.4, 2, 2), (alpha, beta), (n, d), strict=True)
    )
    law = LossLaw(rng.uniform(0.5, 3), a, alpha, b, beta, "planted", with_embeddings=False)
    losses = law.loss(n, d) * np.exp(noise * rng.standard_normal(count))
    return law, [Run(f"{i}", int(x), float(y), float(z)) for i, (x, y, z) in enumerate(zip(n, d, losses, strict=True))]


@pytest.mark.first(15)
@pytest.mark.parametrize("seed", range(500))
def test_no_ladder_raises_and_all_constants_are_finite(seed, monkeypatch):
    monkeypatch.setattr(law_fit, "RESAMPLES", 20)
    rng = np.random.default_rng(seed)
    _, runs = ladder(rng, int(rng.integers(4, 13)), 10 ** rng.uniform(-5, -1))
    if len(runs) < MIN_RUNS:
        with pytest.raises(UserError, match="more runs"):
            check_enough("runs/*", runs)
        return
    check_enough("runs/*", runs)
    law, resampled = fit(runs, "decoder", "")
    logs = [one.log_optimum(1e18) for one in (law, *resampled)]
    constants = [getattr(one, name) for one in (law, *resampled) for name in (*CONSTANTS, "exponent")]
    assert np.isfinite(logs).all() and np.isfinite(constants).all() and min(constants) > 0
    unidentified(resampled, runs)


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 12, 20])
def test_the_intervals_contain_the_law_in_95_percent_of_ladders(count):
    hits = []
    for seed in range(200):
        law, runs = ladder(np.random.default_rng(seed), count, 0.003, np.geomspace(1e6, 1e8, 4))
        _, resampled = fit(runs, "decoder", "", seed)
        intervals = [interval([getattr(one, name) for one in resampled]) for name in SHOWN]
        hits.append([low <= getattr(law, name) <= high for name, (low, high) in zip(SHOWN, intervals, strict=True)])
    # two standard deviations of a mean of 200 ladders, whose four intervals overlap: 2 * sqrt(0.95 * 0.05 / 200)
    assert np.mean(hits) == pytest.approx(0.95, abs=0.031)


# --- laws without evidence --------------------------------------------------------------------------------------------


def planted(n, d, noise=0.0, seed=0):
    law = LossLaw(1.7, 400.0, 0.34, 900.0, 0.33, "planted", with_embeddings=False)
    n, d = np.asarray(n, float), np.asarray(d, float)
    losses = law.loss(n, d) * np.exp(noise * np.random.default_rng(seed).standard_normal(len(n)))
    return [Run(f"{i}", int(x), float(y), float(z)) for i, (x, y, z) in enumerate(zip(n, d, losses, strict=True))]


def test_a_wide_ladder_identifies_its_law():
    runs = planted(np.repeat([1e6, 1e7, 1e8], 3), np.tile([1e8, 1e9, 1e10], 3), 0.001)
    assert unidentified(fit(runs, "decoder", "")[1], runs) == ()


@pytest.mark.parametrize("term, other", [("A / N^alpha", "B / D^beta"), ("B / D^beta", "A / N^alpha")])
def test_a_term_whose_variable_hardly_varies_is_named_with_the_runs_that_would_identify_it(term, other):
    narrow, wide = np.repeat([1.0e8, 1.02e8, 1.04e8], 3), np.tile([1e6, 1e7, 1e8], 3)
    n, d = (narrow, 10 * wide) if term.startswith("A") else (wide, narrow)
    runs = planted(n, d, 0.003)
    lines = unidentified(fit(runs, "decoder", "")[1], runs)
    (line,) = [line for line in lines if line.startswith(term)]
    assert "the runs have 100 M to 104 M" in line and "add runs below and above" in line
    assert not any(other in line for line in lines)


def test_the_picture_of_a_law_without_evidence_is_drawn(tmp_path):
    # alpha and beta near 0: N_opt is a power of 1 / (alpha + beta), which is beyond the range of floats
    law = LossLaw(1.0, 300.0, 0.01, 1e-6, 0.01, "", with_embeddings=False)
    runs = planted([1e6, 1e6, 1e7, 1e8, 1e8, 1e8], [1e8, 1e9, 1e9, 1e9, 1e10, 1e8])
    draw_law(str(tmp_path / "law.png"), law, [law] * 5, runs)
    assert (tmp_path / "law.png").read_bytes()[:4] == b"\x89PNG"
