"""`python -m pretrainax.inspect` shows the model's input, in the terminal and on a page."""

import subprocess
import sys

import numpy as np
import pytest

from pretrainax import inspect
from pretrainax.config import UserError
from tests.support.pages import Tags


def test_importing_it_loads_no_jax():
    code = "import sys, pretrainax.inspect; print([m for m in ('jax', 'flax') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("widths", ["64", "64,64", "64,x", "0,64"])
def test_widths_that_compare_nothing_are_refused(widths):
    """A width differs from itself by nothing, so that each model would count as one that transfers."""
    with pytest.raises(UserError, match=f"--widths={widths} is not a list of at least two different widths"):
        inspect._check_widths(widths.split(","))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "expected"), [("bert", "[MASK→"), ("t5", "<extra_id_0>"), ("gpt", "loss tokens a batch")]
)
def test_the_command(tmp_path, variant, expected):
    rng = np.random.default_rng(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    lexicon = ["".join(rng.choice(list(letters), rng.integers(2, 8))) for _ in range(300)]
    text = "\n\n".join(" ".join(rng.choice(lexicon, 40)) + "." for _ in range(200))
    (tmp_path / "text.txt").write_text(text)
    out = subprocess.run(
        [sys.executable, "-m", "pretrainax.inspect", f"--config=tests/support/tiny.py:{variant}", "--count=2"]
        + [f"--config.data.source.path={tmp_path}/text.txt", f"--config.data.cache_dir={tmp_path}/cache"]
        + [f"--html={tmp_path}/page.html"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert expected in out and "row 1 ·" in out and "\x1b" not in out and "OFF" not in out
    assert Tags((tmp_path / "page.html").read_text()).tags.count("h3") >= 4


@pytest.mark.slow
def test_rows_of_a_later_step_are_those_of_its_phase(text, cache):
    def shown(*words):
        command = [
            sys.executable,
            "-m",
            "pretrainax.inspect",
            "--config=tests/support/tiny.py:gpt",
            "--count=1",
            *words,
        ]
        command += [f"--config.data.source.path={text}", f"--config.data.cache_dir={cache}"]
        return subprocess.run(command, capture_output=True, text=True)

    phases = "--config.phases=(Phase(steps=30, sequence_length=16), Phase(global_batch_size=4))"
    first, later, no = shown(), shown("--at=31", phases), shown("--at=41", phases)
    assert "row 0 ·" in first.stdout and "phase" not in first.stdout
    assert "phase 2, steps 31 to 40: global_batch_size 4" in later.stdout and "row 120 ·" in later.stdout
    assert "loss tokens a batch" in later.stdout and " 128" in later.stdout
    assert no.returncode == 2 and no.stderr == (
        "pretrainax: --at=41 is after the last step: config.train.steps is 40\n"
    )
