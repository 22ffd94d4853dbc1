"""The setup of all tests: 8 fake CPU devices, strict promotion of ranks, one compilation cache.

This file runs before the import of test modules, so it can set the environment in which JAX starts.
"""

import collections
import gc
import os
import pathlib
import sys

from tests.support.runs import FAST, write_text

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {FAST}".strip()
# Suppresses XLA's messages at the start of each process.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from absl import flags  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# Writing and reading a small program takes longer than compiling it again: 13 % of the time of a test of configs.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

hypothesis.settings.register_profile("untimed", deadline=None)  # a slow machine must not fail a test
hypothesis.settings.load_profile("untimed")
flags.FLAGS.mark_as_parsed()  # Grain and TFDS read flags, which only commands parse


def pytest_make_parametrize_id(val):
    """Names compressed data by its length, because the data may contain a timestamp.

    If the workers collect tests with different names, they run no tests.
    """
    return f"{len(val)} bytes" if isinstance(val, bytes) and not val.isascii() else None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects slow tests
def pytest_collection_modifyitems(items):
    """Rejects test names that contain an address, because they differ between processes.

    It also marks all cases after the first N as slow, for tests with the mark `first(N)`.
    """
    wrong = [item.nodeid for item in items if " at 0x" in item.nodeid]
    assert not wrong, f"give these parameters ids: {wrong}"
    seen = collections.Counter()
    for item in items:
        seen[item.nodeid.partition("[")[0]] += 1
        mark = item.get_closest_marker("first")
        if mark is not None and seen[item.nodeid.partition("[")[0]] > mark.args[0]:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Runs the garbage collector rarely, and excludes imported objects from it.

    Tracing creates many objects, but few cycles. This saves 6 % of the time of the zoo's tests.
    """
    gc.set_threshold(50_000, 20, 50)
    gc.freeze()


@pytest.fixture(autouse=True)
def strict_promotion_of_dtypes(request):
    """Layers and models must cast dtypes explicitly. The optimizer cannot, because Optax adds integers to floats."""
    strict = request.path.parent.name in ("layers", "positions", "models")
    with jax.numpy_dtype_promotion("strict" if strict else "standard"):
        yield


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Drops the compiled programs of a test file.

    Each program takes a few memory maps. A process with more than 65,530 memory maps ends with a segmentation fault.
    """
    yield
    jax.clear_caches()
    gc.collect()


SAMPLED = ("test_samples.py", "test_pretraining.py", "test_finish.py", "test_next_steps.py", "test_evaluate.py")


@pytest.fixture(autouse=True)
def few_samples(request, monkeypatch):
    """Ends the samples of a run early, because they take as long as its steps; tests of samples get all samples."""
    samples = sys.modules.get("pretrainax.runs.samples")
    if samples is not None and request.path.name not in SAMPLED:
        monkeypatch.setattr(samples, "SECONDS", 0.1)


@pytest.fixture(params=("with_jit", "without_jit"))
def variant(request):
    """Returns a wrapper that keeps or compiles a function, like chex.variants for the methods of a TestCase."""
    return jax.jit if request.param == "with_jit" else lambda function: function


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> pathlib.Path:
    """Returns a folder of text: sentences of 300 made-up words."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> pathlib.Path:
    """Returns the value of config.data.cache_dir in tests that run commands."""
    return tmp_path_factory.mktemp("cache")
