"""Devices that JAX_PLATFORMS asks for and the machine lacks."""

import os
import subprocess
import sys

import pytest

from tests.support.runs import ROOT

START = "from pretrainax import cli\nfrom pretrainax.runtime import host\ncli.run(lambda: host.start_devices() or 0)"


@pytest.mark.parametrize("platform, code", [("cpu", 0), ("gpux", 2), ("rocm", 2)])
def test_a_platform_that_jax_cannot_start_is_one_line(platform, code):
    env = os.environ | {"JAX_PLATFORMS": platform}
    done = subprocess.run([sys.executable, "-c", START], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert f"JAX_PLATFORMS is {platform!r}, which JAX cannot start" in done.stderr.splitlines()[-1]


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
