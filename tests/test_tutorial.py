"""docs/tutorial.md is gone through as it stands, with small sizes: each command, and the Python at its end."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.support.runs import ENV, ROOT

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
COMMANDS = [
    shlex.split(line) for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]
CONFIG, USE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SMALL = (
    "--config.tokenizer.vocab_size=400 --config.train.steps=3 --config.schedule.warmup_steps=1 "
    "--config.evaluate.batches=1 --config.model.num_layers=1"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text) -> pathlib.Path:
    """Where the reader of the page stands, after all of its commands; what each printed is in a file of its number."""
    root = tmp_path_factory.mktemp("tutorial")
    (root / "books").symlink_to(text)
    (root / "small.py").write_text(CONFIG)
    env = ENV | {"PYTHONPATH": str(ROOT), "HOME": str(root)}
    for number, words in enumerate(COMMANDS):
        small = [*words, *SMALL] if "--config=small.py" in words else words
        done = subprocess.run([sys.executable, "-m", *small], cwd=root, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        (root / f"{number}.txt").write_text(done.stdout + done.stderr)
    return root


def said(folder: pathlib.Path, *start: str) -> str:
    """What the command that begins so has printed."""
    (number,) = [i for i, words in enumerate(COMMANDS) if words[: len(start) + 1] == ["pretrainax", *start]]
    return (folder / f"{number}.txt").read_text()


def test_every_command_leads_to_the_next(folder):
    assert "--config.data.source=\"TextFiles(path='books')\"" in said(folder, "train", "--config=small.py", "--help")
    assert "bytes per token" in said(folder, "tokenizer", "train")
    assert "the text comes back exactly" in said(folder, "tokenizer", "encode")
    assert "loss tokens a batch" in said(folder, "inspect")
    assert "FITS by the estimate" in said(folder, "plan")
    assert "unigram baseline" in said(folder, "train", "--config=small.py", "--workdir=runs/small")
    assert "perplexity" in said(folder, "evaluate", "--from=runs/small")
    assert "left to right" in said(folder, "evaluate", "--source=TextFiles(path='books')")
    assert "as GPT2LMHeadModel" in said(folder, "huggingface")


def test_the_tokenizer_is_kept_where_the_page_says(folder):
    assert os.listdir(folder / "runs" / "tokenizer") and (folder / ".cache" / "pretrainax").is_dir()


def test_the_model_is_used_in_transformers(folder, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.chdir(folder)
    exec(USE, {})
    assert capsys.readouterr().out.startswith("The door opened, and")


def test_the_command_that_is_named_beside_the_others_is_one(folder):
    assert "pretrainax plan --flops=1e17" in PAGE
    words = [sys.executable, "-m", "pretrainax", "plan", "--flops=1e17"]
    done = subprocess.run(words, cwd=folder, env=ENV | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert "python -m pretrainax.main" in done.stdout, done.stderr
