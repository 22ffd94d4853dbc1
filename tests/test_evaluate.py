"""`python -m pretrainax.evaluate` says of a run what its last validation said, of which step, text and batches."""

import pathlib
import shutil
import sys

import pytest

from pretrainax import evaluate as evaluate_module
from pretrainax.config.validation import get
from tests.support import tiny
from tests.support.huggingface_weights import write_directory
from tests.support.runs import command, last_line, lines, run, write_text


def evaluate(workdir, *flags):
    return run([sys.executable, "-m", "pretrainax.evaluate", f"--workdir={workdir}", *flags])


def shown(out) -> dict[str, list[str]]:
    """The words of each line, by its first."""
    assert out.returncode == 0, out.stderr
    return {line.split()[0]: line.split()[1:] for line in out.stdout.splitlines() if line.strip()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text, cache) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("evaluate") / "run"
    flags = "--config.train.steps=2", "--config.evaluate.every=2", "--config.evaluate.batches=1"
    done = run(command("tests/support/tiny.py:gpt", workdir, text, cache, *flags))
    assert done.returncode == 0, done.stderr
    return workdir


def test_the_newest_checkpoint_gives_the_metrics_of_the_last_validation(trained, text):
    out = evaluate(trained)
    said = shown(out)
    (expected,) = lines(trained, "valid")
    for name in ("loss", "perplexity", "accuracy", "bits_per_byte"):
        assert said[name][0] == f"{expected[name]:,.4f}"
    assert said["accuracy"][-1] == "(teacher-forced)"
    assert said["step"] == ["2"] and f"TextFiles(path='{text}'" in out.stdout
    assert said["batches"][0] == "1" and int(said["batches"][2].rstrip(",")) > 1 and said["batches"][4] == "8"
    assert len([line for line in out.stdout.splitlines() if line.startswith("  · ")]) == 4


def test_another_text_is_evaluated_wherever_the_run_is_now(trained, tmp_path, cache):
    """With the run's tokenizer: one that is trained on the other text would give other ids."""
    shutil.copytree(trained, tmp_path / "moved")
    write_text(tmp_path / "other")
    for file in (tmp_path / "other").iterdir():
        file.write_text(file.read_text()[::-1])
    source = f"TextFiles(path='{tmp_path}/other')"
    out = evaluate(tmp_path / "moved", f"--config.data.source={source}", "--config.evaluate.batches=0")
    said = shown(out)
    (first,) = lines(trained, "valid")
    assert source[:-1] in out.stdout and said["loss"][0] != f"{first['loss']:,.4f}"
    assert said["batches"][0] == said["batches"][2].rstrip(",") != "1"


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--config=tests/support/tiny.py:gpt", "--config=FILE is not for this command: it takes the config of the run"),
        ("--config.optimizer.learning_rate=1", "--config.optimizer.learning_rate changes nothing in an evaluation"),
        ("--config.model.num_layers=1", "--config.model.num_layers changes nothing in an evaluation: leave it out"),
        ("--config.tokenizer.path=x", "--config.tokenizer.path changes nothing in an evaluation: leave it out"),
        ("--config.evaluate.batchs=1", "config.evaluate has no field 'batchs', did you mean 'batches'?"),
        ("--config.data.source.path=no/such", "config.data.source.path is 'no/such', which does not exist"),
    ],
)
def test_what_would_be_ignored_is_refused(trained, flag, message):
    out = evaluate(trained, flag)
    assert out.returncode == 2 and message in last_line(out)


def test_what_counts_are_fields():
    for path in evaluate_module.COUNT:
        get(tiny.get_config(), path)


def test_a_tokenizer_that_is_not_that_of_the_checkpoint_is_one_line(trained, tmp_path, cache, text):
    shutil.copytree(trained, tmp_path / "run")
    vocabulary = tmp_path / "run" / "tokenizer" / "vocabulary.json"
    vocabulary.write_text(vocabulary.read_text().replace("<|endoftext|>", "<|end|>"))
    out = evaluate(tmp_path / "run")
    assert out.returncode == 2 and "whose ids mean other text: put the run's own tokenizer/ folder back" in last_line(
        out
    )


def test_an_imported_model_asks_for_a_text(tmp_path):
    source = write_directory(tmp_path / "source", "gpt2")
    done = run(
        [sys.executable, "-m", "pretrainax.huggingface", "import", f"--from={source}", f"--workdir={tmp_path}/run"]
    )
    assert done.returncode == 0, done.stderr
    out = evaluate(tmp_path / "run")
    assert out.returncode == 2
    assert "an imported model comes without text; give one, as --config.data.source=" in last_line(out)


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    out = evaluate(tmp_path)
    assert out.returncode == 2
    assert last_line(out).endswith("holds no config.json: give the run directory of pretrainax.main")
