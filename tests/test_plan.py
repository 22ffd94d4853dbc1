"""Tests `python -m pretrainax.plan`, and the page in docs/ that it writes."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from pretrainax.config import LearnedPositions
from pretrainax.config.config_file import read_config_file
from pretrainax.config.validation import complete
from pretrainax.data.objectives import CausalLM
from pretrainax.models.flops import flops_per_step
from pretrainax.planning import plans_page, report, search
from pretrainax.planning.compiled import Compiled, Usage
from pretrainax.planning.hlo import Buffer, MemoryTraffic
from pretrainax.planning.hlo.memory_traffic import KernelBytes
from pretrainax.planning.topologies import Topology
from pretrainax.planning.traffic import Collective
from pretrainax.reporting import units
from pretrainax.runtime.chips import CHIPS
from tests.golden import CASES
from tests.support import tiny
from tests.support.huggingface_weights import write_run

ROOT = pathlib.Path(__file__).parents[1]


TINY = ("--config=tests/support/tiny.py:gpt",)  # its corpus does not exist; a plan needs no corpus


def run(*words):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.run(
        [sys.executable, "-m", "pretrainax.plan", *words], cwd=ROOT, env=env, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def candidate():
    return search.estimate_run(tiny.get_config("gpt"), Topology.parse("v5e:2x2"))


@pytest.mark.slow
def test_the_command_says_whether_it_fits_what_it_sends_and_what_it_costs():
    done = run(*TINY, "--topology=v5e:2x2", "--nocompile")
    assert done.returncode == 0, done.stderr
    for words in ("FITS by the estimate", "memory of one device", "all-reduce", "MFU", "USD at 1.20 per device hour"):
        assert words in done.stdout


@pytest.mark.slow
def test_the_best_meshes_are_listed():
    done = run(*TINY, "--topology=v5e:2x2", "--search")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:5] == ["fits", "memory", "step", "MFU", "flags"]
    assert "--config.mesh.data=1 --config.mesh.fsdp=4" in done.stdout


@pytest.mark.slow
def test_what_does_not_fit_comes_with_what_would():
    done = run(*TINY, "--config.train.global_batch_size=16777216", "--topology=v5e:2x2", "--nocompile")
    assert "DOES NOT FIT by the estimate" in done.stdout
    assert (
        "changes that make the run fit, simplest change first" in done.stdout
        and "--config.train.accumulate=" in done.stdout
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, line",
    [
        ((), "--config is missing"),
        (TINY, "--topology is missing: the devices of the run, such as v5p:4x4x8 or h100:8"),
        ((*TINY, "--topology=v9:8"), "--topology=v9:8: unknown chip 'v9'"),
        (("--flops=1e17", *TINY), "--config has no effect with --flops: leave one of them out"),
        ((*TINY, "--table"), "--config has no effect with --table: leave one of them out"),
        ((*TINY, "--transfer_from=x", "--topology=h100:1"), "--topology has no effect with --transfer_from: leave"),
        ((*TINY, "--topology=h100:1", "--search", "--prove"), "--prove has no effect with --search: leave one of"),
        (
            (*TINY, "--topology=h100:1", "--mfu=0.9"),
            "--mfu has no effect without a budget: set one of --corpus, --flops",
        ),
        (("--flops=1e17", "--mfu=0.9"), "--mfu has no effect without --topology: set the devices"),
        (("--flops=1e17", "--to=law"), "--to has no effect with --flops: leave one of them out"),
        (("--fit=runs/*", "--law=hoffmann"), "--law has no effect with --fit: leave one of them out"),
        ((*TINY, "--law=hoffmann", "--search"), "--topology is missing"),
        (
            (*TINY, "--law=hoffmann", "--topology=h100:1", "--prove", "--json"),
            "--law has no effect with --json and --search or --prove",
        ),
    ],
)
def test_a_mistake_is_one_line(words, line):
    done = run(*words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and line in done.stderr


@pytest.mark.slow
def test_steps_of_a_budget_in_flops_include_the_teacher(tmp_path):
    model = dataclasses.replace(CASES["gpt2"].config, vocab_size=512)
    teacher, budget = write_run(tmp_path / "teacher", model), "--config.train.budget=1e12 flops"
    sizes = "--config.data.sequence_length=16", "--config.model.position=LearnedPositions(max_length=20)"
    done = run(
        *TINY, *sizes, budget, f"--config.distill=Distillation(teacher='{teacher}')", "--law=besiroglu", "--json"
    )
    assert done.returncode == 0, done.stderr
    student = dataclasses.replace(tiny.get_config("gpt").model, position=LearnedPositions(20))
    steps = int(1e12 / flops_per_step(student, 8, 16, 16, model))
    assert json.loads(done.stdout)["prediction"]["tokens"] == steps * 8 * CausalLM().lengths(16).raw


def test_what_the_compiler_says_stands_beside_the_estimates(candidate):
    usage = {field: 0 for field in Usage.__dataclass_fields__} | {"arguments": 7_000_000, "temporaries": 1_000_000}
    usage["peak"] = None
    found = Compiled(
        fits=True,
        needed=8_000_000,
        available=16 * 10**9,
        memory=Usage(**usage),
        collectives=[Collective("data", "all-reduce", 5_000_000, 2, "decoder/blocks")],
        buffers=[Buffer("decoder/blocks/mlp/up", 3_000_000, "bf16[8,32,64]")],
        traffic=MemoryTraffic(
            [
                KernelBytes("decoder/blocks/mlp/up", "products", True, 4 * 10**9),
                KernelBytes("decoder/blocks", "elementwise", False, 10**9),
            ],
            kernels=1234,
        ),
        seconds=2.0,
    )
    text = report.run_report("tiny", candidate, Topology.parse("v5e:2x2"), found, "compiled in 2 s")
    assert "FITS as compiled: 8.00 MB; the estimate differs from it by" in text
    (line,) = [line for line in text.splitlines() if line.split()[:2] == ["data", "all-reduce"]]
    assert line.endswith("10.00 MB  0%")  # it does not overlap with products
    assert "bf16[8,32,64]" in text
    # The memory time of the products exceeds the compute time of such a small model.
    chip = CHIPS["v5e"]
    counted = 4 * 10**9 / chip.memory_rate + 10**9 / chip.memory_rate + 2 * 5_000_000 / chip.link_rate
    (line,) = [line for line in text.splitlines() if line.startswith("  as compiled")]
    assert line.split()[2:4] == units.short_time(counted).split()
    assert "memory traffic of the compiled step: 5.00 GB by 1,234 kernels, of which 1.00 GB outside products" in text
    assert "products     4.00 GB  80%" in text


def test_a_run_that_would_fit_without_its_moving_average_is_told_so(candidate):
    chip = Topology.parse("v5e:2x2").chip
    large = dataclasses.replace(candidate.memory, ema=chip.memory_bytes)
    words = "of config.train.ema_decay the run fits"
    for ema, fits, said in ((large, False, True), (large, True, False), (candidate.memory, False, False)):
        shown = dataclasses.replace(candidate, memory=ema, fits=fits)
        assert (words in report.run_report("tiny", shown, Topology.parse("v5e:2x2"), None, "")) == said


def test_amounts_are_in_the_units_of_data_sheets():
    assert [units.byte_size(n) for n in (1500, 2.5e6, 16e9, 3e12)] == ["1.50 kB", "2.50 MB", "16.00 GB", "3.00 TB"]


# --- docs/plans.md ---------------------------------------------------------------------------------------------------

LINES = (ROOT / "docs" / "plans.md").read_text().splitlines()


def test_the_page_has_a_row_for_every_config_on_every_topology():
    cells = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in LINES if line.startswith("| ")][2:]
    configs = sorted(file.stem for file in (ROOT / "configs").glob("*.py"))
    assert cells == [(config, topology) for config in configs for topology in plans_page.TOPOLOGIES]


def test_no_run_takes_longer_on_an_h200_than_on_an_h100():
    """Both cards have the same rate of products. With more memory, a run must not recompute more."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in LINES if ":8 | yes |" in line]
    at = plans_page.COLUMNS.index("hours")
    hours = {(row[0], row[1]): float(row[at].replace(",", "")) for row in rows}
    slower = [name for name, chip in hours if chip == "h100:8" and hours.get((name, "h200:8"), 0) > hours[name, chip]]
    assert not slower and ("phi", "h200:8") in hours


@pytest.mark.slow
def test_a_run_that_fits_only_with_recomputation_takes_more_microbatches_if_that_is_faster():
    """phi on 8 H200: one batch with recomputed blocks takes 8.9 s, eight microbatches without recomputation 7.0 s."""
    experiment, topology = read_config_file("phi", None), Topology.parse("h200:8")
    complete(experiment)
    unchanged = search.estimate_run(experiment, topology)
    assert unchanged.fits and unchanged.experiment.train.remat == "block"
    chosen, reason = plans_page.proposal(experiment, topology)
    assert reason == "" and chosen.experiment.train.remat == "none" and chosen.experiment.train.accumulate > 1
    assert chosen.roofline.hours < 0.8 * unchanged.roofline.hours


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_base", "gpt2", "t5_base"])  # all configs take some minutes
def test_the_page_in_docs_is_what_the_code_says_today(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    wanted = plans_page.markdown(list(plans_page.rows([os.path.join("configs", f"{name}.py")]))).splitlines()
    assert [line for line in LINES if line.startswith(f"| {name} |")] == wanted[-len(plans_page.TOPOLOGIES) :]
    assert (
        LINES[: LINES.index("| " + " | ".join(plans_page.COLUMNS) + " |")] == wanted[: -len(plans_page.TOPOLOGIES) - 2]
    )
