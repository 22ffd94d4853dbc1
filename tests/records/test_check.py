"""Tests the checker of records: honest records pass, manipulated records fail, and equal records rarely improve."""

import dataclasses
import importlib
import json
import math
import os
import pathlib
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pretrainax.config import UserError, dump
from pretrainax.studies.outcomes import Outcome
from tests.support.runs import ROOT

RECORD = ROOT / "records" / "decoder-1"
DOCUMENTS = 128  # held-out documents of the final score


@pytest.fixture(scope="module")
def modules():
    sys.path.insert(0, str(ROOT / "records"))
    names = ("check", "reference", "result", "rules", "text")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def log_of(modules, seed, steps, core_seconds=1500.0):
    """Returns the log of an honest run, whose loss falls with the logarithm of the step."""
    rng, every, lines = np.random.default_rng(seed), steps // modules.rules.LOGS, []
    logged = [*range(every, steps, every), steps]
    times = np.cumsum(rng.uniform(0.9, 1.1, len(logged)) * np.diff(logged, prepend=0)) * core_seconds / steps
    for i, (step, seconds) in enumerate(zip(logged, times, strict=True)):
        loss = 6 - 0.3 * math.log(1 + i) + rng.normal(0, 0.01)
        line = {"step": step, "split": "train", "loss": loss, "perplexity": math.exp(loss)}
        line |= {"bits_per_token": loss / math.log(2), "tokens": 2048 * step, "flops": 5e9 * step}
        lines.append(line | {"core_seconds": float(seconds), "reference_seconds": rng.uniform(0.23, 0.25)})
    return lines


def write_record(modules, folder, mean=2.0, seeds=range(5), variant="full", config=RECORD / "config.py"):
    """Writes an honest record whose seeds have a standard deviation of 0.004 bits per byte."""
    os.makedirs(folder, exist_ok=True)
    shutil.copy(config, folder / "config.py")
    steps, found = modules.check.experiment_of(str(folder), variant).train.steps, []
    for seed in seeds:
        rng = np.random.default_rng((seed, int(1000 * mean)))
        path = pathlib.Path(modules.result.metrics_path(str(folder), seed))
        path.write_text("".join(json.dumps(line) + "\n" for line in log_of(modules, seed, steps)))
        changes = rng.normal(0, 1e-4, DOCUMENTS).tolist()
        value = mean + rng.normal(0, 0.004)
        found.append(modules.result.SeedResult(seed, value, changes, modules.text.sha256(path)))
    digest = modules.text.sha256(folder / "config.py")
    content = ("decoder", variant, digest, dict(modules.rules.TEXT), found, {"jax": "0.10"}, "x86_64")
    modules.result.write_result(str(folder), modules.result.Result(*content))
    return folder


@pytest.fixture
def record(modules, tmp_path):
    return write_record(modules, tmp_path / "one", mean=1.9)


def edit(modules, folder, seed=0, renew=True, **columns):
    """Replaces values of a log by functions of them; `renew` also updates the SHA-256 in result.json."""
    path = pathlib.Path(modules.result.metrics_path(str(folder), seed))
    lines = modules.result.read_lines(path)
    for line in lines:
        line |= {name: change(line[name], line["step"]) for name, change in columns.items()}
    replace_log(modules, folder, lines, seed, renew)


def replace_log(modules, folder, lines, seed=0, renew=True):
    path = pathlib.Path(modules.result.metrics_path(str(folder), seed))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if renew:
        edit_seeds(modules, folder, lambda s: s._replace(metrics=modules.text.sha256(path)) if s.seed == seed else s)


def edit_seeds(modules, folder, change):
    result = modules.result.read_result(str(folder))
    modules.result.write_result(str(folder), result._replace(seeds=[change(seed) for seed in result.seeds]))


def problems(modules, folder):
    return list(modules.check.problems(str(folder)))


# --- honest records


@pytest.mark.parametrize("name", sorted(path.parent.name for path in (ROOT / "records").glob("*/result.json")))
def test_a_published_record_passes_and_the_table_has_its_score(modules, name):
    folder = ROOT / "records" / name
    assert not problems(modules, folder)
    scores = [seed.bits_per_byte for seed in modules.result.read_result(str(folder)).seeds]
    row = f"({name}/config.py) | {np.mean(scores):.4f} ± {np.std(scores, ddof=1):.4f} (standard deviation)"
    assert row in (ROOT / "records" / "README.md").read_text()


def test_an_improvement_is_accepted(modules, record, tmp_path, monkeypatch, capsys):
    write_record(modules, tmp_path / "two", mean=2.0)
    assert problems(modules, record) == []
    monkeypatch.setattr(sys, "argv", ["check.py", str(record)])
    assert modules.check.main() == 0 and "accepted" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["check.py", str(tmp_path / "two")])
    assert modules.check.main() == 1 and "not accepted" in capsys.readouterr().out


@pytest.mark.parametrize("field, value, message", [("variant", "long", "it must be one of"), ("seeds", [], "no seeds")])
def test_a_result_that_names_no_runs_is_an_error(modules, record, monkeypatch, capsys, field, value, message):
    result = modules.result.read_result(str(record))
    modules.result.write_result(str(record), result._replace(**{field: value}))
    monkeypatch.setattr(sys, "argv", ["check.py", str(record)])
    assert modules.check.main() == 2 and message in capsys.readouterr().err


def test_the_best_other_record_of_a_track_stands(modules, record, tmp_path):
    for name, mean in (("worse", 2.1), ("better", 2.0)):
        write_record(modules, tmp_path / name, mean)
    write_record(modules, tmp_path / "short", 1.0, variant="short")
    found = modules.check.standing_record(str(record), modules.result.read_result(str(record)))
    assert os.path.basename(found) == "better"


def test_a_tie_is_no_improvement(modules, record):
    result = modules.result.read_result(str(record))
    assert not modules.check.verdict(result, result).improves


def test_a_difference_within_the_noise_is_no_improvement(modules, record, tmp_path):
    other = modules.result.read_result(str(write_record(modules, tmp_path / "two", mean=1.901)))
    assert not modules.check.verdict(modules.result.read_result(str(record)), other).improves


def test_more_seeds_than_the_standing_record_do_not_count(modules, tmp_path):
    one, two = (write_record(modules, tmp_path / name, m, range(n)) for name, m, n in (("a", 1.9, 8), ("b", 2.0, 5)))
    one, two = (modules.result.read_result(str(folder)) for folder in (one, two))
    fewer = one._replace(seeds=one.seeds[:5])
    assert modules.check.verdict(one, two) == modules.check.verdict(fewer, two)
    assert "8 seeds needed" in modules.check.verdict(two, one).message


# --- manipulated records


def test_an_edited_loss_is_found(modules, record):
    edit(modules, record, renew=False, loss=lambda loss, step: 0.99 * loss)
    assert any("differs from the log" in problem for problem in problems(modules, record))
    edit(modules, record, renew=True)
    assert any("contradicts the loss" in problem for problem in problems(modules, record))


@pytest.mark.parametrize("rows", [slice(0, 30), slice(0, 40, 2), slice(5, 40)], ids=["last", "every second", "first"])
def test_dropped_lines_are_found(modules, record, rows):
    lines = modules.result.read_lines(modules.result.metrics_path(str(record), 0))
    replace_log(modules, record, lines[rows])
    assert any("must have a log line" in problem for problem in problems(modules, record))


def test_shortened_times_are_found(modules, record):
    edit(modules, record, core_seconds=lambda t, step: t / 20)  # This is faster than the products of the reference.
    assert any("more than a machine computes" in problem for problem in problems(modules, record))


def test_times_that_are_shortened_at_the_end_are_found(modules, record):
    middle = modules.result.read_lines(modules.result.metrics_path(str(record), 0))[20]
    start, place = middle["core_seconds"], middle["step"]
    edit(modules, record, core_seconds=lambda t, step: t if step <= place else start + 0.2 * (t - start))
    assert any("the median is" in problem for problem in problems(modules, record))


def test_times_that_go_back_are_found(modules, record):
    edit(modules, record, core_seconds=lambda t, step: 1.0)
    assert any("must increase" in problem for problem in problems(modules, record))


def test_a_run_beyond_the_budget_is_found(modules, record):
    edit(modules, record, core_seconds=lambda t, step: 2 * t)
    assert any("exceed the budget" in problem for problem in problems(modules, record))


def test_a_machine_whose_speed_changes_is_found(modules, record):
    steps = modules.check.experiment_of(str(record), "full").train.steps
    edit(modules, record, reference_seconds=lambda t, step: t if step < steps / 2 else 2.5 * t)
    assert any("speed of the machine changed" in problem for problem in problems(modules, record))


@pytest.mark.parametrize("factor, is_beyond", [(1, False), (1.2, True), (0.6, False)])
def test_the_budget_is_in_the_core_seconds_of_the_reference(modules, record, factor, is_beyond):
    # The run takes 2,250 core-seconds. A machine that computes the reference 1.2 times as fast may use 2,000.
    edit(modules, record, core_seconds=lambda t, step: 1.5 * t, reference_seconds=lambda t, step: t / factor)
    assert any("exceed the budget" in problem for problem in problems(modules, record)) == is_beyond


def test_another_text_is_found(modules, record):
    result = modules.result.read_result(str(record))
    modules.result.write_result(str(record), result._replace(text=result.text | {"train.jsonl": "0" * 64}))
    assert any("names another text" in problem for problem in problems(modules, record))


def test_another_config_is_found(modules, record):
    with open(record / "config.py", "a") as file:
        file.write("# a comment\n")
    assert problems(modules, record) == ["config.py differs from the config of the runs"]


@pytest.mark.parametrize("seeds", [range(4), [0, 1, 2, 3, 5], [3, 17, 21, 40, 77]], ids=["few", "gap", "best of many"])
def test_other_seeds_are_found(modules, tmp_path, seeds):
    folder = write_record(modules, tmp_path / "one", 1.9, seeds)
    assert any("the seeds are" in problem for problem in problems(modules, folder))


def test_a_log_that_is_used_twice_is_found(modules, record):
    edit_seeds(modules, record, lambda s: s._replace(metrics="same"))
    assert "two seeds have the same log" in problems(modules, record)


@pytest.mark.parametrize(
    "field, value",
    [
        ("checkpoint.init_from", "hf:org/name"),
        ("model.family", "encoder"),
        ("tokenizer.path", "tokenizers/of-other-text"),
        ("train.steps", 0),
    ],
    ids=["trained parameters", "another family", "trained tokenizer", "steps of a budget"],
)
def test_a_config_outside_the_rules_is_found(modules, field, value):
    experiment = modules.check.experiment_of(str(RECORD), "full")
    section, name = field.split(".")
    experiment = dataclasses.replace(
        experiment, **{section: dataclasses.replace(getattr(experiment, section), **{name: value})}
    )
    (problem,) = modules.rules.config_problems(experiment, "decoder")
    assert field in problem


@pytest.mark.parametrize(
    "field, value, problem",
    [
        ("model.d_ff", 384, None),
        ("model.d_ff", 768, "model.d_ff: 768 -> 384"),
        ("train.steps", 9000, "the run was planned for 9000"),
        ("train.steps", 60, "another number of steps"),
    ],
    ids=["the record's", "wider", "longer", "shorter"],
)
def test_runs_of_another_config_are_found(modules, tmp_path, field, value, problem):
    of_run = modules.rules.prepared(modules.check.experiment_of(str(RECORD), "full"), "/another/machine/text", 0)
    section, name = field.split(".")
    setattr(getattr(of_run, section), name, value)
    (tmp_path / "config.json").write_text(dump(of_run))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    experiment = modules.check.experiment_of(str(RECORD), "full")
    found = list(modules.check.run_problems(SimpleNamespace(seed=0), experiment, str(tmp_path)))
    assert not found if problem is None else len(found) == 1 and problem in found[0]


@pytest.mark.parametrize("factor, is_honest", [(1.0, True), (0.5, False)])
def test_smaller_errors_over_documents_are_found(modules, record, tmp_path, monkeypatch, factor, is_honest):
    seed = modules.result.read_result(str(record)).seeds[0]
    scored = SimpleNamespace(outcomes=lambda *_: [Outcome(seed.bits_per_byte, np.array(seed.changes))])
    monkeypatch.setattr(modules.rules, "measure", lambda texts: scored)
    written = seed._replace(changes=[factor * change for change in seed.changes])
    found = list(modules.check.score_problems(written, None, str(tmp_path), "text"))
    assert not found if is_honest else "influences of the held-out documents" in found[0]


def test_a_damaged_result_is_one_line(modules, record):
    (record / "result.json").write_text("{}")
    with pytest.raises(UserError, match="no result of a record"):
        problems(modules, record)


# --- error rate


@pytest.mark.parametrize("seed_spread, document_spread", [(0.004, 0.0), (0.004, 0.02), (0.004, 0.05)])
def test_equal_records_seldom_improve(modules, seed_spread, document_spread):
    """Draws scores of two records with equal expectations from effects of seeds, documents, and their pairs."""
    rng, trials, seeds, documents = np.random.default_rng(0), 4000, 5, 40

    def outcomes(document_effects):
        noise = rng.normal(0, 0.2 * document_spread, (seeds, documents))  # noise of pairs of a seed and a document
        scores = document_effects + noise
        values = rng.normal(2.0, seed_spread, seeds) + scores.mean(1)
        # the change of a mean if one of its terms is omitted
        changes = (scores - scores.mean(1, keepdims=True)) / (documents - 1)
        return {s: [Outcome(float(values[s]), changes[s])] for s in range(seeds)}

    found = 0
    for _ in range(trials):
        one, other = (SimpleNamespace(outcomes=outcomes(rng.normal(0, document_spread, documents))) for _ in range(2))
        found += modules.check.verdict(one, other).improves
    # The tolerance is two standard errors of a share of 1 % in this number of trials.
    assert found / trials <= modules.rules.LEVEL + 2 * math.sqrt(modules.rules.LEVEL / trials)
