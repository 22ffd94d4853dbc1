"""What every test runs under: 8 fake CPU devices, strict promotion of ranks, one compilation cache.

Runs before any test module is imported, so that it may still decide how JAX starts.
"""

import collections
import gc
import os
import pathlib
import sys

from tests.support.runs import FAST, write_text

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {FAST}".strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's remarks at the start of each process

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from absl import flags  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# Writing and reading a small program takes longer than compiling it again: 13 % of the time of a test of configs.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no fault of a test
hypothesis.settings.load_profile("untimed")
flags.FLAGS.mark_as_parsed()  # Grain and TFDS read flags; outside of a command nobody has parsed them


def pytest_make_parametrize_id(val):
    """Names a compressed parameter by its length: it may hold the time at which it was made, and workers that collect
    other names than each other run nothing at all."""
    return f"{len(val)} bytes" if isinstance(val, bytes) and not val.isascii() else None


@pytest.hookimpl(tryfirst=True)  # before those that are not slow are chosen
def pytest_collection_modifyitems(items):
    """Refuses the other names that differ from process to process: those with an address. Makes all cases slow but the
    first few that a test's mark `first` says."""
    wrong = [item.nodeid for item in items if " at 0x" in item.nodeid]
    assert not wrong, f"give these parameters ids: {wrong}"
    seen = collections.Counter()
    for item in items:
        seen[item.nodeid.partition("[")[0]] += 1
        mark = item.get_closest_marker("first")
        if mark is not None and seen[item.nodeid.partition("[")[0]] > mark.args[0]:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Looks for garbage seldom, and never among what is imported: tracing makes many objects, few of them in circles.
    6 % of the time of the tests of the zoo."""
    gc.set_threshold(50_000, 20, 50)
    gc.freeze()


@pytest.fixture(autouse=True)
def strict_promotion_of_dtypes(request):
    """Bricks and models name every change of dtype. The optimizer cannot: Optax adds integers to floats."""
    strict = request.path.parent.name in ("layers", "positions", "models")
    with jax.numpy_dtype_promotion("strict" if strict else "standard"):
        yield


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Drops what a file has compiled: each program takes a few memory maps, of which a process may have 65,530. Beyond
    that it dies of a segmentation fault."""
    yield
    jax.clear_caches()
    gc.collect()


SAMPLED = ("test_samples.py", "test_pretraining.py", "test_finish.py", "test_next_steps.py", "test_evaluate.py")


@pytest.fixture(autouse=True)
def few_samples(request, monkeypatch):
    """Ends the samples of a run early: they take as long as its steps. Their own tests see all of them."""
    samples = sys.modules.get("pretrainax.runs.samples")
    if samples is not None and request.path.name not in SAMPLED:
        monkeypatch.setattr(samples, "SECONDS", 0.1)


@pytest.fixture(params=("with_jit", "without_jit"))
def variant(request):
    """Of a function as it is, or compiled: what chex.variants is to the methods of a TestCase."""
    return jax.jit if request.param == "with_jit" else lambda function: function


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> pathlib.Path:
    """A folder of text: sentences over 300 made-up words."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> pathlib.Path:
    """config.data.cache_dir of the tests that run commands."""
    return tmp_path_factory.mktemp("cache")
