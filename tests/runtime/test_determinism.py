"""Tests the flags of a deterministic run. `benchmarks/gpu.py` measures their effect on a GPU."""

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
    """Sets XLA_FLAGS as a user would, and returns them."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    return "--xla_cpu_max_isa=AVX2"


def test_the_flags_of_a_user_stay_and_none_is_added_twice(given):
    for _ in range(2):
        determinism.set_deterministic_flag()
    assert os.environ["XLA_FLAGS"] == f"{given} {SAME_ORDER}"


def test_the_next_start_finds_the_programs_and_the_autotuning_results(tmp_path):
    """Tests that the key of a program contains XLA's flags, except the folder of autotuning results."""
    code = (
        "import jax; from jax._src import compiler; from pretrainax.runtime import determinism; "
        "determinism.set_deterministic_flag(); jax.default_backend(); jax.default_backend = lambda: 'gpu'; "
        "determinism.cache_programs_in('a run'); jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0); "
        "print(jax.jit(lambda x: x + 1)(1)); options = compiler.get_compile_options(1, 1).executable_build_options; "
        "print(options.debug_options.xla_gpu_per_fusion_autotune_cache_dir)"
    )
    for start in ("first", "next"):
        done = subprocess.run([sys.executable, "-c", code], env=ENV, cwd=tmp_path, capture_output=True, text=True)
        programs = tmp_path / "a run" / "xla"
        autotuning = programs / "xla_gpu_per_fusion_autotune_cache_dir"
        assert (done.returncode, done.stdout) == (0, f"2\n{autotuning}\n"), done.stderr
        assert len(list(programs.glob("jit*-cache"))) == 1, start


@pytest.mark.first(2)
@pytest.mark.parametrize(("backend", "is_kept"), [("gpu", True), ("cpu", False), ("tpu", False)])
def test_programs_are_kept_with_a_run_on_a_gpu(backend, is_kept, tmp_path, monkeypatch):
    changed = {}
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax.config, "update", changed.__setitem__)
    determinism.cache_programs_in(str(tmp_path))
    assert changed == ({"jax_compilation_cache_dir": str(tmp_path / "xla")} if is_kept else {})
