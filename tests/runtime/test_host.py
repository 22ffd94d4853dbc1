"""Tests the process before the first array: its devices, its listening address, and its limit on open files."""

import os
import resource
import subprocess
import sys

import pytest

from pretrainax.config import UserError
from pretrainax.runtime.host import _bind_address, raise_open_file_limit
from tests.support.runs import ROOT

START = "from pretrainax import cli\nfrom pretrainax.runtime import host\ncli.run(lambda: host.start_devices() or 0)"


@pytest.fixture
def limits(monkeypatch):
    """Replaces the limits on open files; `limits(24, 1024)` sets soft and hard and returns their later values."""
    now = {}
    monkeypatch.setattr(resource, "getrlimit", lambda which: now["both"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: now.update(both=both))
    return lambda *both: now.update(both=both) or now


@pytest.mark.parametrize(
    "before, after",
    [
        ((24, 1024), (1024, 1024)),
        ((1024, resource.RLIM_INFINITY), (65536, resource.RLIM_INFINITY)),
        ((1 << 20, 1 << 20), (1 << 20, 1 << 20)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)),
    ],
)
def test_as_many_files_as_the_system_lets_one_may_be_open(before, after, limits):
    now = limits(*before)
    raise_open_file_limit()
    assert now["both"] == after


def test_too_few_files_are_one_line(limits):
    limits(24, 24)
    with pytest.raises(UserError, match="the limit on open files is 24; a run needs at least 128: raise it"):
        raise_open_file_limit()


@pytest.mark.parametrize("address", ["127.0.0.1:1234", "127.0.1.1:1", "localhost:1234", "[::1]:1234"])
def test_processes_of_one_machine_listen_to_nothing_else(address):
    assert _bind_address(address) == address


@pytest.mark.parametrize("address", ["host17:1234", "10.0.0.1:1234", "[2001:db8::1]:1234", ""])
def test_processes_of_several_machines_listen_as_jax_has_it(address):
    assert _bind_address(address) is None


@pytest.mark.slow
@pytest.mark.parametrize("platform, code", [("cpu", 0), ("gpux", 2), ("rocm", 2)])
def test_a_platform_that_jax_cannot_start_is_one_line(platform, code):
    env = os.environ | {"JAX_PLATFORMS": platform}
    done = subprocess.run([sys.executable, "-c", START], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert f"JAX_PLATFORMS is {platform!r}, which JAX cannot start" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_plugin_that_fails_is_named_without_its_traceback():
    breaks = (
        "import jax._src.xla_bridge as bridge\n"
        "def fail():\n"
        "    try:\n"
        "        raise RuntimeError('Unable to load cuFFT')\n"
        "    except RuntimeError:\n"
        "        bridge.logger.exception('Jax plugin configuration error')\n"
        "    raise AssertionError\n"
        "import jax\n"
        "jax.devices = fail\n"
    )
    env = os.environ | {"JAX_PLATFORMS": "cuda"}
    done = subprocess.run([sys.executable, "-c", breaks + START], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "cpu (Unable to load cuFFT)" in done.stderr
