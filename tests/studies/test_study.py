"""Tests `pretrainax study` from the file to the report, with real runs."""

import sys

import pytest

from pretrainax.files.json_files import read_object
from tests.support.runs import TINY, last_line, run, write_text

FILE = """
question = "Are equal arms equal?"
primary = {{measure = "loss", one = "one", other = "other"}}
[budget]
flops = 1.135e9
[final]
seeds = {seeds}
[[arms]]
name = "one"
config = "{config}"
flags = {flags}
[[arms]]
name = "other"
config = "{config}"
flags = {flags}
[[measures]]
type = "ValidationLoss"
name = "loss"
"""


def study(folder, *flags: str, seeds: int = 2):
    """Runs the command on a file in `folder`."""
    text = [f"--config.data.source.path={write_text(folder / 'text')}", f"--config.data.cache_dir={folder / 'cache'}"]
    content = FILE.format(config=f"{TINY}:gpt", flags=text, seeds=seeds)
    (folder / "study.toml").write_text(content)
    args = [sys.executable, "-m", "pretrainax.study", str(folder / "study.toml"), f"--workdir={folder / 'study'}"]
    return run([*args, *flags], timeout=900)


def test_a_mistake_is_one_line(tmp_path):
    done = study(tmp_path, seeds=1)
    assert done.returncode == 2 and "final.seeds is 1, it must be at least 2" in last_line(done)


@pytest.mark.slow
def test_a_whole_study(tmp_path):
    done = study(tmp_path, "--go")
    assert done.returncode == 0, done.stderr
    assert "total: 0 trials and 4 final runs" in done.stdout and "time of all jobs" in done.stderr
    plan, found = (read_object(str(tmp_path / "study" / name)) for name in ("plan.json", "findings.json"))
    for final in found["runs"]:
        assert final["flops"] == plan["lengths"][final["arm"]]["flops"] <= 1.135e9
    # Equal arms have equal runs, so there is no difference to find.
    assert found["outcomes"]["loss"]["one"] == found["outcomes"]["loss"]["other"]
    assert "Are equal arms equal?" in (tmp_path / "study" / "report.md").read_text()
