"""Replaces files of some formats by FIFOs, devices and links; `tests.fuzz.special_files` tries all formats."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FORMATS = "sentencepiece,saved_wordpiece,directory_gpt2,config,safetensors_index,json_lines,json_lines_gz"


@pytest.mark.slow
def test_what_is_no_regular_file_is_refused_in_one_line_and_a_link_to_one_is_read():
    words = [sys.executable, "-m", "tests.fuzz.special_files", f"--only={FORMATS}", "--kinds=link,fifo,zero"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert int(re.search(r"(\d+) special files, 0 faults", done.stdout)[1]) >= 30
