"""Runs each page of docs/tutorials with small sizes: every command in order, and the Python blocks."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.support.docs_pages import DOCS
from tests.support.runs import ENV, ROOT

pytestmark = pytest.mark.slow
SMALL = (
    "--config.tokenizer.vocab_size=400 --config.train.steps=3 --config.schedule.warmup_steps=1 "
    "--config.evaluate.batches=1 --config.model.num_layers=1"
).split()
VERIFY = "--steps=4 --kills=1 --config.model.num_layers=1 --config.data.sequence_length=32".split()
# Additional flags for each page, which make a command small or adapt it to this machine.
FLAGS = {
    "first-model": lambda words: SMALL if "--config=small.py" in words else [],
    "fine-tune": lambda words: fewer_steps(words, 3),
    "compare": lambda words: fewer_steps(words, 2),
    "scale-out": lambda words: (
        VERIFY if "verify-resume" in words else fewer_steps(words, 4 if "--extend" in words else 2)
    ),
}


def fewer_steps(words: list[str], steps: int) -> list[str]:
    """Returns flags that shorten a training command; other commands get none."""
    if not {"train", "launch/local.py"} & set(words):
        return []
    short = [f"--config.train.steps={steps}", "--config.schedule.warmup_steps=1", "--config.evaluate.batches=1"]
    return short + [f"--config.{part}.every={steps}" for part in ("evaluate", "checkpoint")]


def page_commands(name: str) -> list[list[str]]:
    page = (DOCS / "tutorials" / f"{name}.md").read_text()
    return [
        shlex.split(line) for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()
    ]


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / "tutorials" / f"{name}.md").read_text(), re.DOTALL)


def run_page(name: str, root: pathlib.Path) -> dict[str, str]:
    """Runs the commands of a page in `root` and returns the output of each, by the command."""
    env = ENV | {"PYTHONPATH": str(ROOT), "HOME": str(root)}
    outputs = {}
    for words in page_commands(name):
        program = [sys.executable, "-m"] if words[0] == "pretrainax" else []
        program += [sys.executable] if words[0] == "python" else []
        expanded = [path for word in words for path in (sorted(map(str, root.glob(word))) if "*" in word else [word])]
        command = [*program, *expanded[words[0] == "python" :], *FLAGS[name](words)]
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        outputs[shlex.join(words)] = done.stdout + done.stderr
    return outputs


def output_of(outputs: dict[str, str], *start: str) -> str:
    """Returns the output of the command that begins with these words."""
    (output,) = [text for command, text in outputs.items() if command.startswith(shlex.join(["pretrainax", *start]))]
    return output


@pytest.fixture(scope="module")
def first_model(tmp_path_factory, text) -> tuple[pathlib.Path, dict[str, str]]:
    """Returns the reader's folder after all commands of the first tutorial, and their outputs."""
    root = tmp_path_factory.mktemp("tutorial")
    (root / "books").symlink_to(text)
    (root / "small.py").write_text(python_blocks("first-model")[0])
    return root, run_page("first-model", root)


def test_every_command_leads_to_the_next(first_model):
    _, outputs = first_model
    assert "--config.data.source=\"TextFiles(path='books')\"" in output_of(
        outputs, "train", "--config=small.py", "--help"
    )
    assert "bytes per token" in output_of(outputs, "tokenizer", "train")
    assert "decoding restores the text exactly" in output_of(outputs, "tokenizer", "encode")
    assert "loss tokens a batch" in output_of(outputs, "inspect")
    assert "FITS by the estimate" in output_of(outputs, "plan")
    assert "unigram baseline" in output_of(outputs, "train", "--config=small.py", "--workdir=runs/small")
    assert "perplexity" in output_of(outputs, "evaluate", "--from=runs/small")
    assert "left to right" in output_of(outputs, "evaluate", "--source=TextFiles(path='books')")
    assert output_of(outputs, "generate").startswith("The door opened, and")
    assert "as GPT2LMHeadModel" in output_of(outputs, "huggingface")


def test_the_tokenizer_is_stored_where_the_page_says(first_model):
    folder, _ = first_model
    assert os.listdir(folder / "runs" / "tokenizer") and (folder / ".cache" / "pretrainax").is_dir()


def test_the_model_is_used_in_transformers(first_model, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.chdir(first_model[0])
    exec(python_blocks("first-model")[1], {})
    assert capsys.readouterr().out.startswith("The door opened, and")


def test_a_model_is_fine_tuned_compared_and_used(tmp_path):
    (script,) = python_blocks("fine-tune")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=ENV | {"PYTHONPATH": str(ROOT)}, check=True)
    run_page("fine-tune", tmp_path)
    assert "from runs/bert, step 0" in (tmp_path / "runs" / "packages-random" / "seed-0.log").read_text()
    assert (tmp_path / "answers.jsonl").read_text().count('"probabilities"') > 100


def test_models_are_compared(tmp_path):
    outputs = run_page("compare", tmp_path)
    assert (tmp_path / "report.png").exists() and (tmp_path / "report.html").exists()
    assert all("span_bits_per_byte" in text for command, text in outputs.items() if "--bytes-of-spans" in command)


def test_a_run_is_scaled_out(tmp_path):
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    outputs = run_page("scale-out", tmp_path)
    launched = next(text for command, text in outputs.items() if "launch/local.py" in command)
    assert "2 × 4" in launched or "fsdp" in launched, launched
    assert "gcloud compute tpus" in next(text for command, text in outputs.items() if "tpu_vm" in command)
