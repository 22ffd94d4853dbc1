"""`python -m pretrainax.report` compares runs in a plot and on a page, and reports what a run lacks."""

import json
import re
import subprocess
import sys

import pytest

from pretrainax.reporting import run_lines, runs_page, runs_plot
from pretrainax.reporting.run_groups import Record
from pretrainax.reporting.runs_table import make_report
from pretrainax.training import metrics
from tests.support.runs import ENV, ROOT


def write_run(folder, losses, **counted):
    """Writes metrics.jsonl of a run: a line every 10 steps of one second each, and a validation after the last line."""
    folder.mkdir(parents=True)
    lines = []
    for i, loss in enumerate(losses, start=1):
        counts = {name: each * 10 * i for name, each in counted.items()}
        lines.append({"step": 10 * i, "split": "train", "loss": loss, "step_seconds": 1.0, **counts})
    lines.append({**lines[-1], "split": "valid", "loss": losses[-1] + 0.125})
    del lines[-1]["step_seconds"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "wide", [5.0, 4.0, 3.5], text_tokens=512)
    write_run(folder / "deep<script>", [5.5, None, 3.25])
    return folder


def report(*args):
    command = [sys.executable, "-m", "pretrainax.report", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def made(runs, tmp_path_factory):
    output = tmp_path_factory.mktemp("made") / "both"
    done = report(runs, "--by=tokens", f"--output={output}")
    assert done.returncode == 0, done.stderr
    return done, output.with_suffix(".png").read_bytes(), output.with_suffix(".html").read_text()


@pytest.mark.slow
def test_the_page_has_each_run_over_each_axis_that_it_counted(made):
    data = json.loads(re.search(r"^const data = (.*);$", made[2], re.MULTILINE)[1])
    deep, wide = data["runs"]  # in the order of the folder
    assert (deep["name"], wide["name"]) == ("deep<script>", "wide")
    train, valid = wide["curves"]["loss"]["train"], wide["curves"]["loss"]["valid"]
    assert train["x"] == {"step": [10, 20, 30], "tokens": [5120, 10240, 15360], "time": [10, 20, 30]}
    assert train["y"]["tokens"] == [5.0, 4.0, 3.5]
    assert (valid["x"]["time"], valid["y"]["time"]) == ([30], [3.625])
    assert deep["curves"]["loss"]["train"]["y"] == {"step": [5.5, None, 3.25], "time": [5.5, None, 3.25]}
    assert [name for name, _ in data["axes"]] == ["step", "tokens", "time"]


def test_the_page_loads_nothing_and_no_name_of_a_run_ends_its_script(made):
    page = made[2]
    assert "default-src 'none'" in page
    assert re.findall(r"""(?:src|href)=["'](?!data:)""", page) == []
    assert page.count("<script>") == page.count("</script>") == 1 and "{{" not in page


def test_the_picture_is_a_png_and_in_the_page_too(made):
    assert made[1].startswith(b"\x89PNG") and "data:image/png;base64,iVBOR" in made[2]


def test_what_a_run_lacks_is_said(made):
    said = "deep<script> is left out: --by=tokens needs text_tokens, which its lines do not have"
    assert said in made[0].stderr and said.replace("<", "&lt;").replace(">", "&gt;") in made[2]


def test_a_run_without_a_config_is_in_the_unknown_group_and_says_why(made):
    said = "group ?: not comparable with other runs, because records are missing (deep<script>: no config.json; "
    assert said in made[0].stderr and "no best" not in made[0].stdout


def test_json_has_raw_values_with_their_units_and_the_groups(runs):
    done = report(runs, "--json", "--metrics=loss")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["units"] == {"loss": "nats per target"} and values["differing_fields"] == []
    assert [(group["name"], group["best"]) for group in values["groups"]] == [("?", None)]


def test_a_run_that_is_named_twice_counts_once(runs):
    done = report(runs, f"{runs}/wide/", "--json")
    assert [run["name"] for run in json.loads(done.stdout)["runs"]] == ["deep<script>", "wide"], done.stderr


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--metrics=los"], "--metrics=los: no run has this metric; they have loss"),
        (["--by=flops"], "--by=flops: no run has counted this; use --by=step"),
        (["/nowhere"], "/nowhere is not a folder: give the --workdir of a run"),
        (["--json"], "--output has no effect with --json, which writes no files: leave one of them out"),
    ],
)
def test_mistakes_are_a_line(runs, tmp_path, flags, said):
    done = report(runs, *flags, f"--output={tmp_path}/report")
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_folders_without_runs_are_named(tmp_path):
    assert f"{tmp_path} holds no run: neither it nor a folder in it has a metrics.jsonl" in report(tmp_path).stderr
    (tmp_path / "metrics.jsonl").touch()
    assert f"{tmp_path} has no line in its metrics.jsonl yet" in report(tmp_path).stderr
    assert "give the folders of runs" in report().stderr


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "field, value",
    [
        ("loss", 1e308),
        ("loss", 10**400),
        ("text_tokens", "many"),
        ("text_tokens", [1]),
        ("step_seconds", True),
        ("step_seconds", {}),
        ("gradient_norm", "x"),
        ("step", 10**400),
        ("step", -(10**400)),
    ],
)
def test_a_value_that_cannot_be_drawn_is_left_out_and_counted(field, value, tmp_path):
    write_run(tmp_path / "a", [5.0, 4.0, 3.5], text_tokens=512)
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    lines[1][field] = value
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read, counts = run_lines.drawable_numbers(metrics.read_metrics(str(tmp_path / "a" / "metrics.jsonl")))
    run = run_lines.RunLines("a", run_lines.with_seconds(read))
    assert counts == {field: 1} and len(read) == 4 - (field == "step")
    for by in ("step", "tokens", "time"):
        record = Record(None, {}, missing="no config.json")
        report = make_report([run], [record], run_lines.metrics_of([run]), by, [])
        runs_plot.draw(str(tmp_path / "a.png"), report)
        page = runs_page.render(report, b"")
        assert "Infinity" not in page and "NaN" not in page


@pytest.mark.slow
def test_the_command_says_which_values_are_left_out(tmp_path):
    write_run(tmp_path / "a", [5.0, 1e308, 3.5], text_tokens=512)
    command = [sys.executable, "-m", "pretrainax.report", str(tmp_path / "a"), f"--output={tmp_path}/r"]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stderr.endswith("a: metrics.jsonl has values of loss that cannot be drawn; left out: 1\n")
    with open(tmp_path / "a" / "metrics.jsonl", "a") as f:
        f.write('{"step": "4", "split": "train", "loss": 1.0}\n{"step": 5, "split": 1, "loss": 2}\n{"step": 6, "spl')
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120)
    lines = len((tmp_path / "a" / "metrics.jsonl").read_bytes().splitlines()) - 1  # the run is writing the last line
    assert done.returncode == 0
    assert "a: metrics.jsonl has invalid lines, not JSON or" in done.stderr
    assert f"left out: 2 of {lines} lines" in done.stderr
