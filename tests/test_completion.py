"""Tests the completion script of bash in a real bash, and of zsh and fish if they are installed."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.runs import ROOT, run


@pytest.fixture
def complete(tmp_path):
    """Returns a function that completes a line with the cursor at its end, like bash's readline."""
    script = tmp_path / "bin" / "pretrainax"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m pretrainax "$@"\n')
    script.chmod(0o755)
    out = run([sys.executable, "-m", "pretrainax", "completion", "bash"])
    assert out.returncode == 0, out.stderr

    def complete(line: str, *words: str) -> list[str]:
        """Completes a line, given also as the words into which readline splits it."""
        code = f"""{out.stdout}
COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({" ".join(map(repr, words))}) COMP_CWORD={len(words) - 1}
compopt() {{ :; }}
_pretrainax pretrainax
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
        env = os.environ | {"PATH": f"{script.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(["bash", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return done.stdout.split()

    return complete


@pytest.mark.parametrize(
    "line, words, found",
    [
        ("pretrainax tr", ["tr"], ["train"]),
        ("pretrainax --v", ["--v"], ["--version"]),
        ("pretrainax train --see", ["train", "--see"], ["--seeds="]),
        ("pretrainax train --qui", ["train", "--qui"], ["--quiet"]),
        ("pretrainax train --config=gpt", ["train", "--config", "=", "gpt"], ["gpt2", "gpt3", "gpt_oss"]),
        ("pretrainax train --config=shakes", ["train", "--config", "=", "shakes"], ["shakespeare_char"]),
        ("pretrainax train --config.train.step", ["train", "--config.train.step"], ["--config.train.steps="]),
        ("pretrainax report --config.train.step", ["report", "--config.train.step"], []),
        ("pretrainax evaluate --config.mesh.fs", ["evaluate", "--config.mesh.fs"], ["--config.mesh.fsdp="]),
        ("pretrainax evaluate --split=", ["evaluate", "--split", "="], ["valid", "train", "all"]),
        ("pretrainax huggingface ex", ["huggingface", "ex"], ["export"]),
        ("pretrainax completion z", ["completion", "z"], ["zsh"]),
        ("pretrainax evaluate --from=./runs", ["evaluate", "--from", "=", "./runs"], []),  # readline completes files
        ("pretrainax nothing --x", ["nothing", "--x"], []),
    ],
)
def test_bash_completes_commands_flags_configs_and_fields(line, words, found, complete):
    assert complete(line, "pretrainax", *words) == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_has_its_syntax(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    out = run([sys.executable, "-m", "pretrainax", "completion", shell])
    assert subprocess.run([shell, "-n"], input=out.stdout, capture_output=True, text=True).stderr == ""


def test_another_shell_is_one_line():
    out = run([sys.executable, "-m", "pretrainax", "completion", "tcsh"])
    assert out.returncode == 2 and out.stderr.startswith("pretrainax: the first argument must be bash or zsh or fish")
