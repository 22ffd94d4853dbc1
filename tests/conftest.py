"""What every test runs under: 8 fake CPU devices, strict promotion of ranks, one compilation cache.

Runs before any test module is imported, so that it may still decide how JAX starts.
"""

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]  # the last of two values wins
).strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's remarks at the start of each process

import jax  # noqa: E402
from absl import flags  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# A second run of the tests compiles nothing that has not changed.
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

flags.FLAGS.mark_as_parsed()  # Grain and TFDS read flags; outside of a command nobody has parsed them
