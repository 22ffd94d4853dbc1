"""Compares the tables of docs/studies/index.md and docs/adapt.md with the reports in docs/studies/*.json."""

import json
import re
import statistics

import pytest

from pretrainax.scaling.law_checks import form_problems
from pretrainax.scaling.law_fit import fit
from pretrainax.scaling.power_laws import Run, effective_tokens
from tests.support.runs import ROOT

DOCS = ROOT / "docs"
MODELS = {"LLaMA": "causal", "ModernBERT": "masked", "T5": "spans"}
NUMBER = r"[-+]?\d+\.\d+"


def report(name: str):
    return json.loads((DOCS / "studies" / f"{name}.json").read_text())


def same(written: str, exact: float) -> bool:
    """Returns True if a number in a document is a rounded value."""
    # The tolerance is half a unit of the last digit, and a little more, because the report also rounds its numbers.
    return abs(float(written) - exact) <= 0.51 * 10 ** -len(written.partition(".")[2])


def all_same(written: str, exact: str) -> bool:
    """Returns True if the numbers in a document are the rounded numbers in a cell of the report."""
    numbers = re.findall(NUMBER, written), re.findall(NUMBER, exact)
    return all(same(a, float(b)) for a, b in zip(*numbers, strict=True))


def cells(page: str, title: str) -> list[list[str]]:
    """Returns the rows of the tables in one section of a page, as lists of cells."""
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [[x.strip() for x in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]


def test_the_table_of_objectives_is_of_its_report():
    names = {"causal": "causal", "prefix LM": "prefix", "replaced tokens": "replaced", "masked": "masked"}
    names |= {"spans": "spans", "UL2": "ul2"}
    rows, found = report("objectives")["tables"]["Measures"], 0
    for first, *scores in cells((DOCS / "studies" / "index.md").read_text(), "Objectives"):
        if (arm := names.get(first.partition(" (")[0])) is None:
            continue
        for written, row in zip(scores, rows, strict=True):
            assert all_same(written, row[arm]), (arm, written, row[arm])
            found += 1
    assert found == 3 * len(names)
    header = cells((DOCS / "studies" / "index.md").read_text(), "Objectives")[0]
    assert [x.partition("(")[2].rstrip(")").lower() for x in header[2:]] == ["accuracy", "f1"]
    assert [row["measure"] for row in rows[1:]] == ["sst2 (accuracy)", "conll2000 (f1)"]


def test_the_primary_verdict_of_objectives_is_that_of_its_report():
    page = re.sub(r"\s+", " ", (DOCS / "studies" / "index.md").read_text())
    (primary,) = (contrast for contrast in report("objectives")["contrasts"] if contrast["role"] == "primary")
    low, high = primary["interval"]
    assert primary["verdict"] == "worse" and primary["one"] == "spans" and primary["other"] == "causal"
    assert f"by {-primary['difference']:.3f} bits per byte" in page
    assert f"interval {-high:.3f} to {-low:.3f}; 5 seeds" in page


@pytest.mark.parametrize("family", ["GPT", "BERT", "T5"])
def test_the_table_of_optimizers_is_of_its_report(family):
    of = report(f"optimizers-{family.lower()}")
    (losses,) = of["tables"]["Measures"]
    contrasts, losses_before = {x["one"]: x for x in of["contrasts"]}, []
    for name, loss, better, _ in cells((DOCS / "studies" / "index.md").read_text(), f"Optimizers of a {family}")[2:]:
        arm = name.lower().replace("schedule-free adamw", "schedule-free").replace("stableadamw", "stable-adamw")
        assert loss == losses[arm]
        losses_before.append(float(loss.partition(" ")[0]))
        if arm == "adamw":
            assert not better
            continue
        difference, low, high = re.findall(NUMBER, better)
        contrast = contrasts[arm]
        assert same(difference, contrast["difference"])
        assert same(low, contrast["interval"][0]) and same(high, contrast["interval"][1])
    assert len(losses_before) == 12 and losses_before == sorted(losses_before)
    assert all(row["trials"] == of["tables"]["Costs"][0]["trials"] for row in of["tables"]["Costs"])


@pytest.mark.parametrize("task, measure", [("chunks", "conll2000"), ("SST-2", "sst2")])
def test_the_effects_of_pretraining_are_those_of_the_report(task, measure):
    contrasts = {
        (x["measure"], x["one"]): x for x in report("objectives")["contrasts"] if x["other"].endswith("-untrained")
    }
    (scores,) = (row for row in report("objectives")["tables"]["Measures"] if row["measure"].startswith(measure))
    metric, current, found = re.findall(r"\((.*)\)", scores["measure"])[0], "", 0
    for row in cells((DOCS / "adapt.md").read_text(), "The experiment"):
        current = row[0] or current
        if len(row) != 7 or not current.startswith(task) or row[1] not in MODELS:
            continue
        assert f"({metric})" in current.lower()
        arm = MODELS[row[1]]
        contrast = contrasts[measure, arm]
        for written, name in zip(row[3:5], (arm, f"{arm}-untrained"), strict=True):
            assert all_same(written, scores[name]), (row, scores[name])
        difference, level, low, high = re.findall(NUMBER, row[5])
        assert same(difference, contrast["difference"]) and same(level, 100 * (1 - contrast["level"]))
        assert same(low, contrast["interval"][0]) and same(high, contrast["interval"][1])
        assert row[6] == contrast["verdict"]
        found += 1
    assert found == len(MODELS)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_the_steps_of_a_precision_study_are_those_of_its_report(family):
    page = (DOCS / "studies" / "index.md").read_text()
    steps = page.partition(f"`precision-{family}.toml`, ")[2].partition(" steps,")[0].split()[-1]
    assert {row["steps"] for row in report(f"precision-{family}")["tables"]["Arms"]} == {steps}


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_the_checks_of_a_ladder_have_the_numbers_of_its_runs(name):
    law = report(f"ladder-{name}")["law"]
    runs = [Run(**run) for run in (*law["runs"], *law.get("too_small", ()))]
    lack, prediction = form_problems(fit(runs, "decoder", ""))
    page = " ".join((DOCS / "studies" / "index.md").read_text().split())
    assert re.search(r"by [\d.]+ %, and equal runs with other seeds by [\d.]+ % \(p = [\de.-]+\)", lack)[0] in page
    numbers = r"the (\d+) runs .* of ([\d.]+) to ([\d.]+) .* have ([\d.]+)$"
    count, *losses = re.search(numbers, prediction).groups()
    low, high, measured = (f"{float(x):.2f}" for x in losses)
    text = (
        f"A law of the {count} runs with at most 1/8 of the FLOPs predicts {low} to {high} for the largest ones, which"
    )
    assert f"{text} have {measured}." in page


def test_the_runs_of_the_ladder_with_muon_have_the_numbers_of_the_page():
    law = report("ladder-gpt-muon")["law"]
    runs = [Run(**run) for run in (*law["runs"], *law["too_small"])]
    line, _ = form_problems(fit(runs, "decoder", ""))
    (of_law, of_seeds), p = re.findall(r"([\d.]+) %", line), re.search(r"\(p = .*\)", line)[0]
    page = " ".join((DOCS / "studies" / "index.md").read_text().split())
    assert f"All {len(runs)} differ from it by {of_law} % {p}" in page
    assert f"Equal runs with other seeds differ by {of_seeds} %" in page
    losses = {}
    for run in runs:
        losses.setdefault((run.parameters, round(run.tokens, -6)), []).append(run.loss)
    sizes = [min(n for n, _ in losses), max(n for n, _ in losses)]
    less, more = (sum(losses[sizes[0], d]) / 2 - sum(losses[sizes[1], d]) / 2 for d in (1e6, 8e6))
    assert f"the loss falls by {less:.2f} nats with 1 M tokens and by {more:.2f} with 8 M" in page


@pytest.mark.parametrize("megabytes, digits", [(1, 3), (4, 4), (12, 4)])
def test_the_grid_on_little_text_is_of_its_runs(megabytes, digits):
    runs, names = report(f"scarce-{megabytes}MB"), {"half": 0.5, "planned": 1.0, "double": 2.0}
    grid = {(r["factor"], r["weight_decay"], r["dropout"]): r["loss"] for r in runs if r["seed"] == 0}
    page, size, found = (DOCS / "studies" / "index.md").read_text(), "", 0
    title = "Little text" if megabytes == 1 else f"Little text, {megabytes} MB"
    for name, _, decay, *losses in cells(page, title)[2:]:
        size = name or size
        for dropout, loss in zip((0.0, 0.1, 0.2), losses, strict=True):
            assert same(loss, grid[names[size], float(decay), dropout])
            found += 1
    assert found == 27

    def mean(*setting):
        losses = [r["loss"] for r in runs if (r["factor"], r["weight_decay"], r["dropout"]) == setting]
        assert len(losses) == 4
        return sum(losses) / 4

    if megabytes == 1:
        other = statistics.mean(r["loss"] for r in report("scarce-1MB-plan"))
        gain = f"{mean(1.0, None, None) - other:.3f} nats"
        assert f"It has {other:.3f} over the same 4 seeds: {gain}" in page
        assert f"was {gain} better on 1 MB" in (DOCS / "how-to" / "choose-a-size.md").read_text()
    planned, best = mean(1.0, None, None), mean(1.0, 0.1, 0.0)
    above = f"{planned - best:.{digits}f} nats above"
    assert above in (DOCS / "how-to" / "choose-a-size.md").read_text()
    assert f"the planned run has {planned:.3f}. It is {above} the best" in " ".join(page.split())


def test_the_tables_of_transfer_are_of_their_runs():
    losses: dict[tuple, list[float]] = {}  # losses of the seeds
    for r in report("transfer"):
        kind = "transferred" if r["transferred"] else "standard"
        losses.setdefault((r["family"], r["width"], r["depth"], kind, r["rate"]), []).append(r["loss"])
    runs = {key: statistics.mean(seeds) for key, seeds in losses.items()}
    columns, found = [], 0
    for row in cells((DOCS / "studies" / "index.md").read_text(), "Transfer of learning rates"):
        columns = row if {"width", "layers"} & {*row} else columns
        size = {"family": "GPT", "width": "64", "layers": "2"} | dict(zip(columns, row, strict=True))
        for column, loss in zip(columns[2:], row[2:], strict=True):
            if re.fullmatch(NUMBER, loss):
                kind, _, rate = column.partition(", ")
                of = size["family"].lower(), int(size["width"]), int(size["layers"]), kind, float(rate)
                assert same(loss, runs[of])
                found += 1
    assert found > 40
    guide = " ".join((DOCS / "how-to" / "transfer.md").read_text().split())
    assert f"of {runs['gpt', 128, 2, 'transferred', 0.004]:.3f} with 8" in guide
    assert f"at the best rate was {runs['gpt', 128, 2, 'standard', 0.004]:.3f}" in guide


@pytest.mark.parametrize("name", ["GPT", "GPT with Muon", "BERT", "BERT with transfer", "T5", "T5 with transfer"])
def test_the_score_of_a_ladder_is_of_its_report(name):
    score = report(f"ladder-{name.lower().replace(' with ', '-')}")["score"]
    _, _, predicted, measured = cells((DOCS / "studies" / "index.md").read_text(), f"A ladder of a {name}")
    first, last = re.search(r"`(\w{8})…(\w+)`", predicted[0]).groups()
    assert score["prediction_sha256"].startswith(first) and score["prediction_sha256"].endswith(last)
    found = [*re.findall(r"\d+\.\d+", predicted[1]), *re.findall(r"-?\d+\.\d+", measured[1])]
    exact = [score["predicted"], *score["interval"], score["measured"], 100 * score["error"]]
    assert len(found) == 5 and all(same(a, b) for a, b in zip(found, exact, strict=True)), (found, exact)
    assert ("outside the interval" in measured[1]) is not score["is_in_interval"]


def test_the_table_of_repeated_text_is_of_its_runs():
    found, rows = report("repeated"), cells((DOCS / "studies" / "index.md").read_text(), "Repeated text")[2:]
    assert len(rows) == 4
    for epochs, _, difference, worth, *laws in rows:
        runs = [run for run in found["runs"] if round(run["epochs"]) == int(epochs)]
        assert len(runs) == 8
        assert same(difference.split()[0], statistics.mean(run["loss"] - run["loss_of_new_text"] for run in runs))
        worths = [run["worth"] for run in runs]
        assert worth == "not known" if None in worths else same(worth.split()[0], statistics.mean(worths) / 1e6)
        for written, law in zip(laws, found["fits"], strict=True):
            tokens = effective_tokens(runs[0]["tokens"], runs[0]["epochs"], law["repetition"])
            assert same(written, law["share"] * tokens / 1e6)
