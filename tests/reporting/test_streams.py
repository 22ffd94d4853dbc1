"""Tests that a command continues if the reader of its output stops."""

import shlex
import subprocess
import sys

import pytest

from tests.support.runs import ROOT

SPEAKING = """
import os, sys
from pretrainax.reporting.streams import keep_streams
keep_streams()
with open(sys.argv[1], "w") as f:
    for i in range(20000):
        print("out", i, flush=i % 2 == 0)
        print("err", i, file=sys.stderr)
    os.write(2, b"a library's words\\n")
    f.write("done")
"""


def speak(path, shell: str) -> int:
    """Runs a shell script in which `speak` is the program; returns the exit code of the script."""
    words = shlex.join([sys.executable, "-c", SPEAKING, str(path)])
    script = f"speak() {{ {words}; }}\n{shell}"
    return subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60).returncode


@pytest.mark.first(3)
@pytest.mark.parametrize(
    "shell",
    [
        "speak | head -1; exit ${PIPESTATUS[0]}",
        "speak 2>&1 | head -1; exit ${PIPESTATUS[0]}",
        "speak 2>&-",
        "speak >&-",
        "speak <&- >&- 2>&-",
        "speak 2>&- | head -1; exit ${PIPESTATUS[0]}",
    ],
)
def test_output_that_nobody_reads_is_dropped(shell, tmp_path):
    assert speak(tmp_path / "done", shell) == 0
    assert (tmp_path / "done").read_text() == "done"  # The file contains nothing that was written to stderr.


@pytest.mark.slow
def test_a_full_disk_is_still_an_error(tmp_path):
    assert speak(tmp_path / "done", "speak > /dev/full") == 1
