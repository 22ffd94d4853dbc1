"""Tests that fits recover planted constants, and that insufficient runs raise an error of one line."""

import json
import os

import numpy as np
import pytest

from pretrainax import config as config_lib
from pretrainax.config import Phase, UserError
from pretrainax.data.objectives import CausalLM, ReplacedTokenDetection
from pretrainax.data.sources import TextFiles
from pretrainax.scaling import fit as fit_lib
from pretrainax.scaling.fit import check_enough, fit_report, read_runs
from pretrainax.scaling.law_fit import Problem, fit
from pretrainax.scaling.law_intervals import intervals
from pretrainax.scaling.power_laws import CONSTANTS, LossLaw, Run, law_of
from tests.support import tiny

PLANTED = LossLaw(E=1.7, A=400.0, alpha=0.34, B=900.0, beta=0.33, source="planted", with_embeddings=False)
SIZES = [1e7, 3e7, 1e8, 3e8, 1e9]
RATIOS = [3, 10, 30, 100]  # tokens per parameter


def runs_of(law, noise, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Run(f"run{n:.0e}x{ratio}", int(n), n * ratio, law.loss(n, n * ratio) * np.exp(noise * rng.standard_normal()))
        for n in SIZES
        for ratio in RATIOS
    ]


def write_run(workdir, width=32, steps=40, loss=None, at=None, **changes):
    """Writes the workdir of a finished run; by default, the loss follows PLANTED."""
    experiment = tiny.get_config("gpt")
    experiment.data.source = TextFiles("text")
    experiment.model.d_model, experiment.model.d_ff, experiment.train.steps = width, 4 * width, steps
    for path, value in changes.items():
        part, _, name = path.rpartition("__")
        setattr(getattr(experiment, part) if part else experiment, name, value)
    os.makedirs(workdir)
    (workdir / "config.json").write_text(config_lib.dump(experiment))
    if loss is None:
        size = fit_lib.count_parameters(experiment.model)[1]
        loss = PLANTED.loss(size, steps * 8 * 33)
    lines = [
        {"step": 1, "split": "valid", "loss": 9.0},
        {"step": at or steps, "split": "train", "loss": 5.0},
        {"step": at or steps, "split": "valid", "loss": loss},
    ]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_tokens_of_a_run_in_phases_add_up(tmp_path):
    write_run(tmp_path / "run", phases=(Phase(steps=30, sequence_length=15), Phase(global_batch_size=4)))
    (run,), _, _ = read_runs(str(tmp_path / "*"))
    assert run.tokens == 30 * 8 * 16 + 10 * 4 * 33


# --- the fit --------------------------------------------------------------------------------------------------------


def test_planted_constants_come_back_exactly_without_noise():
    law = fit(runs_of(PLANTED, 0.0), "decoder", "")
    # The optimization stops at a relative change of the cost of 1e-8. A and B are exponentials of the optimized
    # variables.
    for name in CONSTANTS:
        assert getattr(law, name) == pytest.approx(getattr(PLANTED, name), rel=1e-3)


@pytest.mark.first(1)
@pytest.mark.parametrize("seed", range(3))
def test_planted_constants_come_back_from_noisy_runs(seed):
    law = fit(runs_of(PLANTED, 0.003, seed), "decoder", "")
    # The noise is 0.3 % of the loss, because the losses of seeds differ by about 0.02 nats (Kaplan et al. 2020, section
    # 4.2). The tolerances are three standard deviations over 20 sets of such runs, which were 1.4, 3.2, 1.0 and 1.8 %.
    for name, tolerance in (("E", 0.042), ("alpha", 0.096), ("beta", 0.03), ("exponent", 0.054)):
        assert getattr(law, name) == pytest.approx(getattr(PLANTED, name), rel=tolerance)
    # There are eighteen intervals of 95 %, so the test extends each by half of its width.
    for name, (low, high, is_bounded) in intervals(law).of.items():
        spare = (high - low) / 4
        assert is_bounded and low - spare < getattr(PLANTED, name) < high + spare


def test_more_noise_makes_wider_intervals():
    widths = []
    for noise in (0.001, 0.01):
        low, high, _ = intervals(fit(runs_of(PLANTED, noise), "decoder", "")).of["alpha"]
        widths.append(high - low)
    assert widths[1] > 3 * widths[0]


def test_a_run_that_went_wrong_does_not_move_the_fit():
    runs = runs_of(PLANTED, 0.001)
    runs[7] = runs[7]._replace(loss=1.2 * runs[7].loss)  # The Huber loss counts this as an error of 1 %.
    law = fit(runs, "decoder", "")
    assert law.exponent == pytest.approx(PLANTED.exponent, rel=0.05)


def test_the_slope_is_that_of_the_prediction():
    problem = Problem([Run("", 10**6, 1e8, 3.0), Run("", 10**8, 1e9, 2.0)], False)
    t, step = np.array([0.5, 0.1, 0.3, -0.2, 0.4]), 1e-6
    for i in range(5):
        moved = t + step * (np.arange(5) == i)
        # The difference is one-sided, so its error is about the size of the step.
        assert problem.slope(t)[:, i] == pytest.approx((problem.predict(moved) - problem.predict(t)) / step, abs=1e-5)


# --- runs -----------------------------------------------------------------------------------------------------------


def test_n_d_and_the_last_validation_loss_are_read(tmp_path):
    write_run(tmp_path / "a", width=64, steps=50, loss=4.25)
    (run,), experiment, left_out = read_runs(f"{tmp_path}/*")
    # These are two blocks with biases and norms, and the final norm.
    assert run.parameters == 2 * (12 * 64**2 + 13 * 64) + 2 * 64
    assert run.tokens == 50 * 8 * 33 and run.loss == 4.25 and not left_out
    assert experiment.model.family == "decoder"


def electra_run(workdir, loss, **figures):
    """Writes the workdir of an ELECTRA; `figures` are further metrics of its last validation."""
    write_run(workdir, loss=9.0)
    experiment = config_lib.load(str(workdir / "config.json"))
    experiment.objective = ReplacedTokenDetection()
    (workdir / "config.json").write_text(config_lib.dump(experiment))
    with open(workdir / "metrics.jsonl", "a") as f:
        f.write(json.dumps({"step": 40, "split": "valid", "loss": loss, **figures}) + "\n")


def test_the_loss_of_an_electra_is_the_discriminators(tmp_path):
    electra_run(tmp_path / "a", loss=5.0, replaced_loss=0.25)
    electra_run(tmp_path / "b", loss=5.0)
    (run,), experiment, left_out = read_runs(f"{tmp_path}/*")
    assert run.loss == 0.25 and experiment.select_by == "replaced_loss"
    assert left_out == [f"{tmp_path}/b: no validation replaced_loss at its last step, 40"]


def test_runs_that_select_by_other_figures_or_validate_otherwise_do_not_compare(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", evaluate__select_by="bits_per_byte")
    with pytest.raises(UserError, match="are not comparable: evaluate.select_by: 'loss' -> 'bits_per_byte'"):
        read_runs(f"{tmp_path}/*")
    write_run(tmp_path / "c", evaluate__objective=CausalLM(mask_documents=True))
    with pytest.raises(UserError, match=r"are not comparable: evaluate.objective: None -> CausalLM\("):
        read_runs(f"{tmp_path}/[ac]")
    write_run(tmp_path / "d", evaluate__parameters="ema")
    with pytest.raises(UserError, match="are not comparable: evaluate.parameters: 'trained' -> 'ema'"):
        read_runs(f"{tmp_path}/[ad]")


@pytest.mark.parametrize("figure, is_one", [("accuracy", False), ("perplexity", False), ("text_loss/source=x", True)])
def test_a_law_is_fit_to_a_loss(figure, is_one, tmp_path):
    write_run(tmp_path / "a", evaluate__select_by=figure)
    if is_one:
        assert read_runs(f"{tmp_path}/*")[1].select_by == figure
        return
    with pytest.raises(UserError, match=rf"these runs have .*select_by={figure}; a fit needs a loss \("):
        read_runs(f"{tmp_path}/*")


def test_an_unfinished_run_is_left_out(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", steps=100, at=60)
    runs, _, left_out = read_runs(f"{tmp_path}/*")
    assert [os.path.basename(run.workdir) for run in runs] == ["a"]
    assert left_out == [f"{tmp_path}/b: no validation loss at its last step, 100"]


def test_a_loss_that_is_not_finite_is_left_out(tmp_path):
    write_run(tmp_path / "a")
    text = (tmp_path / "a" / "metrics.jsonl").read_text()
    (tmp_path / "a" / "metrics.jsonl").write_text(text.replace(text.split('"loss": ')[-1], "null}\n"))
    assert read_runs(f"{tmp_path}/*")[0] == []


def test_runs_of_other_text_are_refused(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", data__sequence_length=16)
    with pytest.raises(UserError, match=r"are not comparable: data.sequence_length: 32 -> 16"):
        read_runs(f"{tmp_path}/*")


def test_no_runs_are_told(tmp_path):
    with pytest.raises(UserError, match="no matching folder has a config.json and a metrics.jsonl"):
        read_runs(f"{tmp_path}/*")


def test_a_broken_config_names_its_run(tmp_path):
    write_run(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{")
    with pytest.raises(UserError, match=f"{tmp_path}/a"):
        read_runs(f"{tmp_path}/*")


@pytest.mark.parametrize(
    "points, missing",
    [
        ([], "6 more runs, 3 more sizes, 3 more amounts of text, one size with two amounts of text"),
        ([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)], "1 more sizes"),
        ([(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6)], "one size with two amounts of text"),
        ([(1, 1), (2, 1), (3, 2), (3, 3)], "2 more runs"),
    ],
)
def test_too_few_runs_are_told_with_what_is_missing(points, missing):
    with pytest.raises(UserError, match=f"too few for 5 constants; missing: {missing}$"):
        check_enough("runs/*", [Run("", n, d, 3.0) for n, d in points])


# --- output files ---------------------------------------------------------------------------------------------------


def test_a_report_of_workdirs_gives_a_law_that_the_plan_takes(tmp_path):
    for width in (32, 128, 512):
        for steps in (100, 1_000, 10_000):
            write_run(tmp_path / "runs" / f"{width}-{steps}", width=width, steps=steps)
    write_run(tmp_path / "runs" / "stopped", steps=500, at=200)
    text = fit_report(f"{tmp_path}/runs/*", str(tmp_path / "out"))
    assert "left out: " in text and "alpha" in text and "95% interval" in text
    law = law_of(str(tmp_path / "out" / "law.json"))
    # The losses are 4 to 60. E is the smallest of the three terms, so its estimate is the least accurate.
    assert law.exponent == pytest.approx(PLANTED.exponent, rel=1e-2) and not law.with_embeddings
    assert law.config is not None and law.config["tokenizer"]["type"] == "ByteBPE"
    assert (tmp_path / "out" / "law.png").read_bytes()[:4] == b"\x89PNG"
    again = json.loads((tmp_path / "out" / "law.json").read_text())
    assert len(again["runs"]) == 9 and len(again["left_out"]) == 1 and set(again["intervals"]) >= set(CONSTANTS)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    for width in (32, 64, 96):
        for steps in (10, 100, 1_000):
            write_run(tmp_path / "runs" / f"{width}-{steps}", width=width, steps=steps)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        fit_report(f"{tmp_path}/runs/*", str(tmp_path / "file"))
