"""With --json, stdout is exactly one JSON value, for each command that has the flag."""

import json
import re
import sys

import pytest

from pretrainax.config import ledger
from tests.support.runs import ROOT, TINY, run


def printed(*words: str, code: int = 0):
    """Returns the value that a command prints as JSON."""
    out = run([sys.executable, "-m", "pretrainax", *words, "--json"])
    assert out.returncode == code, out.stderr
    return json.loads(out.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_zoo_lists_the_presets():
    (preset,) = printed("zoo", "--only=mixtral_8x7b")
    assert preset["preset"] == "mixtral_8x7b" and preset["parameters"] > preset["active"] > 10**10
    assert preset["config"].startswith("configs/mixtral.py")


def test_plan_prints_bytes_seconds_and_proposals():
    plan = printed("plan", f"--config={TINY}:gpt", "--topology=h100:2", "--nocompile")
    assert (plan["topology"], plan["devices"], plan["fits"], plan["proposals"]) == ("h100:2", 2, True, [])
    assert plan["peak_bytes"] <= sum(plan["memory_bytes"].values()) and plan["compiled"] is None
    least, most = plan["step_seconds_range"]
    assert 0 < least < plan["step_seconds"] < most and plan["mesh"]["data"] == 2


@pytest.mark.slow
def test_plan_prints_the_proposals_for_a_run_that_does_not_fit():
    batch = "--config.train.global_batch_size=4194304"
    plan = printed("plan", f"--config={TINY}:gpt", "--topology=v5e:1x1", "--nocompile", batch)
    assert not plan["fits"] and plan["peak_bytes"] > plan["limit_bytes"]
    assert plan["proposals"][0]["fits"] and "--config." in plan["proposals"][0]["flags"]


@pytest.mark.slow
def test_plan_prints_the_best_meshes():
    meshes = printed("plan", f"--config={TINY}:gpt", "--topology=h100:2", "--search")
    assert len(meshes) > 1 and all(mesh["fits"] for mesh in meshes)
    assert meshes == sorted(meshes, key=lambda mesh: mesh["hours"])


@pytest.mark.slow
def test_plan_prints_the_optimal_run_of_a_budget():
    plan = printed("plan", "--flops=1e17", "--topology=h100x8")
    assert plan["topology"] == "h100:8" and plan["hours"] > 0
    assert plan["flops"] == pytest.approx(1e17, rel=1e-3)
    assert plan["flops"] == pytest.approx(plan["tokens"] * plan["flops_per_token"])


@pytest.mark.parametrize("words", [["--table"], ["--fit=runs/*"]])
def test_plan_refuses_json_for_what_has_another_format(words):
    out = run([sys.executable, "-m", "pretrainax", "plan", *words, "--json"])
    assert out.returncode == 2 and re.search("leave (--json|one of them) out", out.stderr)


def test_inspect_prints_rows_and_statistics_also_while_it_prepares_the_text(text, tmp_path):
    flags = [f"--config.data.source.path={text}", f"--config.data.cache_dir={tmp_path}"]
    page = f"--html={tmp_path}/page.html"
    shown = printed("inspect", f"--config={TINY}:bert", "--count=2", page, *flags)
    (rate,) = [statistic for statistic in shown["statistics"] if statistic["name"] == "mask rate"]
    assert rate["expected"] == 0.15 and not rate["off"] and abs(rate["measured"] - 0.15) < rate["tolerance"]
    assert len(shown["views"]) == 2 and shown["views"][0]["panels"][0]["pieces"][0]["tokens"] >= 1
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("words", [["--config=gpt2"], ["--preset=macbert_base"]])
def test_recipe_prints_values_with_their_sources(words):
    recipe = printed("recipe", *words)
    assert len(recipe["fields"]) > 10 and all(field["source"] for field in recipe["fields"])
    assert {field["from"] for field in recipe["fields"]} <= {*ledger.STATUSES}


def test_recipe_marks_a_value_that_differs():
    (steps,) = printed("recipe", "--config=gpt2", "--only=train.steps", "--config.train.steps=7")["fields"]
    assert steps["value"] == 7 and steps["expected"] != 7 and not steps["agrees"]


def test_report_prints_the_points_of_each_run_and_writes_no_file(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lines = [{"split": "train", "step": step, "loss": 3.0 / step, "accuracy": None} for step in (1, 2)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text.replace("null", "NaN") + "damaged\n")
    before = [*ROOT.glob("report*")]
    report = printed("report", str(tmp_path), "--metrics=loss")
    assert [row["name"] for row in report["runs"]] == ["a", "b"] and (report["by"], report["metrics"]) == (
        "step",
        ["loss"],
    )
    assert report["runs"][0]["points"][1] == {"split": "train", "step": 2, "loss": 1.5}
    assert any("invalid lines" in note for note in report["notes"]) and [*ROOT.glob("report*")] == before


def test_the_docs_list_the_keys():
    page = (ROOT / "docs" / "how-to" / "shell.md").read_text()
    plan = printed("plan", f"--config={TINY}:gpt", "--topology=h100:2", "--nocompile")
    assert [key for key in plan if f"`{key}`" not in page] == []
