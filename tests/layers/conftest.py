"""The fixture that runs kernels of accelerators on the CPU."""

import jax
import pytest
from jax.experimental import pallas


@pytest.fixture
def interpreted(monkeypatch):
    """Runs Pallas kernels as ordinary JAX operations, on the CPU."""
    compiled = pallas.pallas_call
    monkeypatch.setattr(
        pallas, "pallas_call", lambda *args, **options: compiled(*args, **(options | {"interpret": True}))
    )
    jax.clear_caches()  # The kernels call jit internally, so the cache may contain traces of other tests.
    yield
    jax.clear_caches()
