"""`python -m pretrainax.evaluate` says of a run what its last validation said."""

import sys

from tests.support.runs import command, last_line, lines, run


def evaluate(workdir):
    return run([sys.executable, "-m", "pretrainax.evaluate", f"--workdir={workdir}"])


def test_the_newest_checkpoint_gives_the_metrics_of_the_last_validation(tmp_path, text, cache):
    flags = "--config.train.steps=2", "--config.evaluate.every=2", "--config.evaluate.batches=1"
    done = run(command("tests/support/tiny.py:gpt", tmp_path, text, cache, *flags))
    assert done.returncode == 0, done.stderr
    out = evaluate(tmp_path)
    assert out.returncode == 0, out.stderr
    said = [line for line in out.stdout.splitlines() if not line.startswith("  · ")]
    (expected,) = lines(tmp_path, "valid")
    shown = {line.split()[0]: line.split()[1] for line in said if len(line.split()) == 2}
    assert {name: f"{expected[name]:,.4f}" for name in ("loss", "perplexity", "accuracy", "bits_per_byte")} == {
        name: shown[name] for name in ("loss", "perplexity", "accuracy", "bits_per_byte")
    }
    assert len([line for line in out.stdout.splitlines() if line.startswith("  · ")]) == 4


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    out = evaluate(tmp_path)
    assert out.returncode == 2
    assert last_line(out).endswith("holds no config.json: give the run directory of pretrainax.main")
