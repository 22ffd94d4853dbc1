"""Runs the benchmarks with small configs, because no other test would detect that a code change broke them."""

import argparse
import collections
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pretrainax.config import UserError
from pretrainax.planning.topologies import Topology
from tests.support import tiny
from tests.support.runs import FAST, ROOT

pytestmark = pytest.mark.slow

TINY = "--config=tests/support/tiny.py:gpt"
NUMBERS = 2 * 8_544 + (512 + 64) * 32 + 2 * 32  # parameters of tiny.py:gpt: 2 blocks, embeddings, the last norm
SMALL = ["--config.data.sequence_length=64", "--config.train.global_batch_size=4", "--config.model.num_layers=1"]


def run(script, *words):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"benchmarks/{script}.py", *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_a_config_is_timed(tmp_path):
    """Tests a config with open sizes, and with rows that are packed by a plan."""
    words = ["--config=bert_base:tiny", *SMALL, "--timed_steps=5", f"--json={tmp_path / 'figures.json'}"]
    done = run("train_step", *words)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["padded_tokens_per_second"] > 0 and figures["parameters"] > 0
    assert figures["mfu"] is figures["mfu_executed"] is None  # the peak of a CPU is unknown


@pytest.mark.slow
@pytest.mark.aot
def test_the_bytes_of_a_compiled_step_are_counted(tmp_path):
    try:
        Topology.parse("h100:1").devices()  # not a TPU, where such small models stay in the VMEM
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
    # The update reads and writes the optimizer's state: parameters and two moments.
    assert figures["floor"]["update"] - 2 * 4 == 2 * 3 * 4 * NUMBERS <= figures["kinds"]["optimizer"]
    assert figures["floor_bytes"] == sum(figures["floor"].values())
    assert "by kind" in done.stdout and "temporaries" in done.stdout


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_a_deterministic_step_moves_at_most_a_hundredth_more(model, tmp_path):
    """Of a GPU: without `sum_by_id`, the gradient of the embeddings of two layers of GPT-2 moved 10.3 GB more."""
    try:
        Topology.parse("h100:1").devices()
    except UserError as e:
        pytest.skip(str(e))
    moved = {}
    for mode in ("False", "True"):
        words = [f"--config=tests/support/tiny.py:{model}", "--topology=h100:1", f"--config.train.deterministic={mode}"]
        done = run("traffic", *words, f"--json={tmp_path / mode}")
        assert done.returncode == 0, done.stderr
        moved[mode] = json.loads((tmp_path / mode).read_text())["bytes"]
    assert moved["True"] <= 1.01 * moved["False"]


@pytest.mark.parametrize(
    "words, line", [((), "--topology is missing"), (("--topology=v9:8",), "--topology=v9:8: unknown chip 'v9'")]
)
def test_devices_to_compile_for_that_are_missing_or_unknown_are_one_line(words, line):
    done = run("traffic", TINY, *words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and line in done.stderr


# --- gpu.py ----------------------------------------------------------------------------------------------------------


def without(folder, *modules):
    """Returns a flag for a folder of packages that fail on import, as on a machine without them."""
    for module in modules:
        (folder / module).mkdir(parents=True)
        (folder / module / "__init__.py").write_text(f"raise ModuleNotFoundError(\"No module named '{module}'\")\n")
    return f"--packages={folder}"


def test_all_that_a_gpu_is_wanted_for_runs_to_its_end(tmp_path, of_benchmarks):
    """On a bare machine: without what only the loading of data needs."""
    bare = without(tmp_path / "packages", "grain", "array_record", "portpicker", "tensorflow_datasets", "tensorflow")
    done = run("gpu", f"--out={tmp_path}", "--tiny", "--minutes=60", bare)  # far more than necessary
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    ended = {line["part"]: line["ended"] for line in lines if line["what"] == "end"}
    if importlib.util.find_spec("torch") is None:
        assert "torch is not installed" in ended.pop("peers")
    assert set(ended.values()) == {"done"}, (ended, done.stdout, done.stderr)
    assert not [line for line in lines if line["what"].endswith("failed")]
    found = {(line["part"], line["what"]): line for line in lines}
    # bfloat16 rounds at 2^-8 = 0.4 %.
    for case in (line for line in lines if line["what"] == "attention"):
        assert case["error"] < 0.01 and case["error of gradients"] < 0.02, case
    assert {line["case"] for line in lines if line["what"] == "attention"} == set(of_benchmarks("gpu_kernels").CASES)
    assert found["kernels", "experts"]["error"] < 0.01 and found["kernels", "loss"]["error"] < 1e-3
    assert all(line["in_a_process"] and line["in_another_process"] for line in lines if line["what"] == "bits")
    assert found["gpt2", "step"]["tokens_per_second"] > 0 and found["gpt2", "compiled"]["moved_gb"] > 0
    kernels = [line["autotuning"] for line in lines if line["part"] == "t5" and line["what"] == "kernel"]
    assert kernels == ["off"] * 10 + ["on"] * 10
    page = (tmp_path / "table.md").read_text()
    assert all(f"## {part}\n" in page for part in ended) and "| causal | xla |" in page


@pytest.mark.parametrize(
    "words, line",
    [
        (("--only=gpt9",), "--only=gpt9: unknown part. The parts are environment, kernels"),
        (("--minutes=0.5",), "--minutes=0.5 is too short. Set at least 1"),
        (
            ("--packages=/nowhere",),
            "--packages=/nowhere is not a folder. Install the wheels there: pip install --no-index",
        ),
        ((), "JAX finds no GPU (its backend is 'cpu'). Set --tiny, or use a machine with a GPU."),
    ],
)
def test_what_gpu_py_cannot_begin_with_is_one_line(words, line, tmp_path):
    done = run("gpu", f"--out={tmp_path}", *words)
    assert done.returncode == 2 and done.stderr.startswith(f"gpu.py: {line}") and done.stderr.count("\n") == 1


def test_a_wheel_that_is_missing_is_named(tmp_path):
    done = run("gpu", f"--out={tmp_path}", "--tiny", without(tmp_path / "packages", "optax"))
    assert done.returncode == 2
    wanted = "gpu.py: ModuleNotFoundError: No module named 'optax': benchmarks/README.md lists the wheels "
    assert done.stderr == f"{wanted}for --packages\n"


def test_the_wheels_of_the_readme_require_no_others():
    """pip installs these wheels without their requirements. A new version of a package may require another package."""
    on_the_machine = {"jax", "jaxlib", "numpy", "ml-dtypes", "fsspec"}  # installed with jax and torch
    unused = {"click", "hf-xet", "markdown-it-py", "prometheus-client", "psutil", "typer"}
    command = re.search(
        r"--dest=wheels (.*)\n    pip install", (ROOT / "benchmarks" / "README.md").read_text(), re.DOTALL
    )
    wheels = {canonicalize_name(name) for name in command[1].replace("\\", "").split()}
    required = set()
    for name in wheels:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            required |= set(map(Requirement, importlib.metadata.requires(name) or ()))
    machine = {"extra": "", "python_version": "3.12", "platform_machine": "x86_64"}
    names = {canonicalize_name(x.name) for x in required if x.marker is None or x.marker.evaluate(machine)}
    assert names - wheels - on_the_machine - unused == set()


@pytest.fixture
def of_benchmarks(monkeypatch):
    """Imports a script of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_a_part_that_fails_or_takes_too_long_stops_no_other(tmp_path, of_benchmarks, monkeypatch):
    gpu = of_benchmarks("gpu")
    given = argparse.Namespace(out=str(tmp_path), packages="", tiny=True)
    parts = {
        "fails": "raise SystemExit('no such kernel')",
        "fails in JAX": "import jax; jax.jit(lambda x: x @ x)(jax.numpy.ones((2, 3)))",  # a note follows the error
        "hangs": "import subprocess; subprocess.run(['sh', '-c', 'echo $$ && sleep 60'])",
    }
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    for name, code in parts.items():
        (tmp_path / "gpu_kernels.py").write_text(code)
        gpu.run_part(name, 3.0 if name == "hangs" else 60.0, given)
    ended = [line["ended"] for line in gpu.read(str(tmp_path))]
    assert ended[0::2] == ["failed with status 1: no such kernel", "timed out after 3 s"]
    assert ended[1].startswith("failed with status 1: TypeError: dot_general requires contracting dimensions")
    # The child process of the part has ended too. Otherwise it would occupy the GPU's memory.
    state = pathlib.Path("/proc") / (tmp_path / "hangs.log").read_text().strip() / "stat"
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_parts_see_one_gpu(of_benchmarks, monkeypatch):
    gpu = of_benchmarks("gpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu.environment("")["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert gpu.environment("")["CUDA_VISIBLE_DEVICES"] == "3"


def test_parts_have_the_memory_of_a_gpu_by_one_of_jaxs_two_names(of_benchmarks, monkeypatch):
    """JAX finds no GPU if both are set."""
    gpu, new, former = of_benchmarks("gpu"), "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    for name in (new, former):
        monkeypatch.delenv(name, raising=False)
    assert gpu.environment("")[new] == "0.92"
    monkeypatch.setenv(new, "0.5")
    assert gpu.environment("")[new] == "0.5" and former not in gpu.environment("")
    monkeypatch.delenv(new)
    monkeypatch.setenv(former, "0.6")
    assert gpu.environment("")[former] == "0.6" and new not in gpu.environment("")


def test_a_gpu_that_jax_cannot_start_is_explained(tmp_path):
    (plugin := tmp_path / "packages" / "jax_plugins" / "broken").mkdir(parents=True)
    (plugin / "__init__.py").write_text("def initialize():\n    raise RuntimeError('Unable to load cuDNN.')\n")
    done = run("gpu", f"--out={tmp_path}", f"--packages={tmp_path / 'packages'}")
    line = "gpu.py: JAX finds no GPU (its backend is 'cpu'; RuntimeError: Unable to load cuDNN.). Set --tiny, or use a "
    assert (done.returncode, done.stderr) == (2, f"{line}machine with a GPU.\n")


def test_a_step_is_compared_with_its_plan_also_without_a_trace(tmp_path):
    """The machine may lack CUPTI, which traces a GPU."""
    code = (
        "import gpu_steps; from pretrainax.config import UserError\n"
        "from pretrainax.planning.topologies import Topology\n"
        "def read_trace(path): raise UserError('no kernel')\n"
        "gpu_steps.read_trace, gpu_steps.current_topology = read_trace, lambda: Topology.parse('h200:1')\n"
        "gpu_steps.step('bert', lambda *a, **k: print(*a, *k.items()), True)"
    )
    paths = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    whats = [line.partition(" (")[0] for line in lines]
    assert whats == 2 * ["step", "compiled", "plan", "trace failed"] + ["compiling"]
    assert all("'UserError: no kernel'" in line for line in lines if line.startswith("trace"))
    for line, tuning in zip([line for line in lines if line.startswith("plan")], ("off", "on"), strict=True):
        assert f"('autotuning', '{tuning}')" in line
        assert all(f"('{name}', " in line for name in ("ms", "measured_ms", "memory_gb", "measured_peak_gb"))
        assert all(f"('{name}', " in line for name in ("besides_products_gb", "compiled_besides_products_gb"))


def test_torch_takes_the_batches_of_the_steps_and_runs_eagerly_if_it_cannot_compile(of_benchmarks, monkeypatch):
    pytest.importorskip("torch")
    steps, torch_side = of_benchmarks("gpu_steps"), of_benchmarks("against_torch")
    taken, recorded = [], []

    def theirs(name, size, kind):
        if kind.startswith("compiled") and name == "gpt2":
            raise RuntimeError("Failed to find C compiler.")
        taken.append(torch_side.batch_of(name, size, 100)["tokens"].shape)
        return lambda steps: 0.0

    monkeypatch.setattr(torch_side, "theirs", theirs)
    platforms = steps.jax.config.jax_platforms
    steps.peers(lambda what, **metrics: recorded.append({"what": what} | metrics), tiny=False)
    assert steps.jax.config.jax_platforms == "cpu"  # JAX takes no memory of a GPU from torch
    steps.jax.config.update("jax_platforms", platforms)
    rows = [row for row in recorded if row["what"] != "left out"]
    assert taken == [(steps.CASES[name].rows, steps.CASES[name].length) for name in ("gpt2", "bert")]
    assert [(row["what"], row["side"], row["kind"], row.get("batch")) for row in rows] == [
        ("peer failed", "transformers gpt2", "compiled_autocast", None),
        ("peer", "transformers gpt2", "autocast", "32 x 1024"),
        ("peer", "transformers bert", "compiled_autocast", "32 x 512"),
    ]
    assert rows[0]["error"] == "RuntimeError: Failed to find C compiler."
    assert rows[2]["tokens_per_second"] == pytest.approx(32 * 512 / (rows[2]["ms"] / 1e3))


def test_a_sweep_takes_no_loss_of_another_config(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sweep, trained = importlib.import_module("sweep"), []

    def train(name, experiment, workdir, trainer):
        trained.append(experiment.train.steps)
        return float(experiment.train.steps)

    monkeypatch.setattr(sweep, "_train", train)
    trial = collections.namedtuple("Trial", ["name"])("planned")
    for steps in (40, 60, 40):  # the plan of a trial depends on the amount of text
        experiment = tiny.get_config("gpt")
        experiment.train.steps = steps
        assert sweep.train_all([trial], lambda _, made=experiment: made, str(tmp_path)) == {trial: steps}
    assert trained == [40, 60]
