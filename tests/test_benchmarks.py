"""The benchmarks of a config run: nothing else would say that they have fallen behind the code."""

import json
import os
import runpy
import subprocess
import sys

import pytest

from pretrainax.config import UserError
from pretrainax.planning.topologies import Topology
from tests.support.runs import FAST, ROOT

TINY = "--config=tests/support/tiny.py:gpt"
NUMBERS = 2 * 8_544 + (512 + 64) * 32 + 2 * 32  # of tiny.py:gpt: 2 blocks, embeddings, the last norm
SMALL = ["--config.data.sequence_length=64", "--config.train.global_batch_size=4", "--config.model.num_layers=1"]


def run(script, *words):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"benchmarks/{script}.py", *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_a_config_is_timed(tmp_path):
    """One with sizes that are open, and rows that are packed by a plan."""
    words = ["--config=bert_base:tiny", *SMALL, "--timed_steps=5", f"--json={tmp_path / 'figures.json'}"]
    done = run("train_step", *words)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["padded_tokens_per_second"] > 0 and figures["parameters"] > 0
    assert figures["mfu"] is figures["mfu_done"] is None  # the peak of a CPU is unknown


@pytest.mark.slow
@pytest.mark.aot
def test_the_bytes_of_a_compiled_step_are_counted(tmp_path):
    try:
        Topology.parse("h100:1").devices()  # of a TPU so small a model never leaves the VMEM
    except UserError as e:
        pytest.skip(str(e))
    done = run(
        "traffic", TINY, "--config.train.scan_unroll=1", "--topology=h100:1", f"--json={tmp_path / 'figures.json'}"
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    total = figures["bytes"]
    assert sum(figures["kinds"].values()) == sum(figures["modules"].values()) == total
    assert 0 < figures["bytes_besides_products"] < total and figures["kernels"] > 0
    assert "decoder/blocks/mlp/up" in figures["modules"] and "residuals" in figures["kinds"]
    # the state of the optimizer is read and written: parameters and two moments
    assert figures["floor"]["update"] - 2 * 4 == 2 * 3 * 4 * NUMBERS <= figures["kinds"]["optimizer"]
    assert figures["floor_bytes"] == sum(figures["floor"].values())
    assert "by kind" in done.stdout and "temporaries" in done.stdout


@pytest.mark.parametrize(
    "words, line", [((), "--topology is missing"), (("--topology=v9:8",), "--topology=v9:8: unknown chip 'v9'")]
)
def test_devices_to_compile_for_that_are_missing_or_unknown_are_one_line(words, line):
    done = run("traffic", TINY, *words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and line in done.stderr


def test_the_tables_of_adaptation_are_of_the_numbers_beside_them(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    adaptation = runpy.run_path(str(ROOT / "benchmarks" / "adaptation.py"))
    found = adaptation["known"](str(ROOT / "docs" / "adapt.json"))
    assert adaptation["measured_sets"](found) and found.keys() == adaptation["MODELS"].keys()
    page = (ROOT / "docs" / "adapt.md").read_text()
    for table in adaptation["tables"](found).split("\n\n"):
        assert table in page, "paste what benchmarks/adaptation.py prints"
