"""Runs all command lines of `tests.fuzz.mistakes`, in a separate process that forks for each."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]


def test_every_mistake_is_answered_by_one_line_and_exit_code_2():
    command = [sys.executable, "-m", "tests.fuzz.mistakes"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert int(re.search(r"([\d,]+) mistakes, 0 failures", done.stdout)[1].replace(",", "")) > 150
