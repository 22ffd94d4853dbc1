"""`python -m pretrainax.inspect` shows what a model will see, in the terminal and on a page."""

import subprocess
import sys

import numpy as np
import pytest

from tests.support.pages import Tags


def test_importing_it_loads_no_jax():
    code = "import sys, pretrainax.inspect; print([m for m in ('jax', 'flax') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


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
