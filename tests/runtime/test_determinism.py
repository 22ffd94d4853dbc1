"""Tests of the flags of a deterministic run. `benchmarks/gpu.py` measures what they do on a GPU."""

import os
import subprocess
import sys

import jax
import pytest

from pretrainax.runtime import determinism
from tests.support.runs import ENV

SAME_ORDER = "--xla_gpu_exclude_nondeterministic_ops=true"


@pytest.fixture
def given(monkeypatch):
    """What XLA_FLAGS are before."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    return "--xla_cpu_max_isa=AVX2"


def test_the_flags_of_a_user_stay_and_none_is_added_twice(given):
    for _ in range(2):
        determinism.set_deterministic_flags()
    assert os.environ["XLA_FLAGS"] == f"{given} {SAME_ORDER}"


def test_the_next_start_takes_what_the_first_has_found(given, tmp_path, monkeypatch):
    file = tmp_path / "autotuning.textproto"
    determinism.set_deterministic_flags(str(tmp_path))
    written = f"--xla_gpu_dump_autotune_results_to='{file}'"
    assert os.environ["XLA_FLAGS"] == f"{given} {SAME_ORDER} {written}"
    file.write_text("version: 3\n")
    monkeypatch.setenv("XLA_FLAGS", given)
    determinism.set_deterministic_flags(str(tmp_path))
    read = f"--xla_gpu_load_autotune_results_from='{file}'"
    assert os.environ["XLA_FLAGS"] == f"{given} {SAME_ORDER} {read} {written}"


def test_one_process_of_several_writes(given, tmp_path, monkeypatch):
    monkeypatch.setattr(determinism.distributed_state(), "process_id", 1)
    determinism.set_deterministic_flags(str(tmp_path))
    assert os.environ["XLA_FLAGS"] == f"{given} {SAME_ORDER}"


def test_xla_knows_the_flags_and_reads_a_path_with_a_space(tmp_path):
    """It ends a process with a flag that it does not know."""
    (folder := tmp_path / "a run").mkdir()
    (folder / determinism.AUTOTUNING).write_text("version: 3\n")
    code = (
        "import jax; from pretrainax.runtime.determinism import set_deterministic_flags; "
        f"set_deterministic_flags({str(folder)!r}); print(jax.jit(lambda x: x + 1)(1))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.first(2)
@pytest.mark.parametrize(("backend", "is_kept"), [("gpu", True), ("cpu", False), ("tpu", False)])
def test_programs_are_kept_with_a_run_on_a_gpu(backend, is_kept, tmp_path, monkeypatch):
    changed = {}
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax.config, "update", changed.__setitem__)
    determinism.cache_programs_in(str(tmp_path))
    assert changed == ({"jax_compilation_cache_dir": str(tmp_path / "xla")} if is_kept else {})
