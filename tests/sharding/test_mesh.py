"""Tests the compute capability of a process's GPUs, as JAX's devices report it."""

from types import SimpleNamespace

import jax
import pytest

from pretrainax.sharding.mesh import gpu_capability


@pytest.mark.parametrize(
    "name, expected", [("8.9", (8, 9)), ("12.0", (12, 0)), ("gfx942", (0, 0)), ("gfx90a:sramecc+:xnack-", (0, 0))]
)
def test_an_architecture_of_amd_has_no_compute_capability(name, expected, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=name)])
    assert gpu_capability() == expected
