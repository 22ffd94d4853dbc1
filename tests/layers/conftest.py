"""Kernels for other hardware, on the CPU."""

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
    jax.clear_caches()  # the kernels are jitted inside: what another test traced would come back
    yield
    jax.clear_caches()
