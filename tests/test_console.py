"""Tests the console script `pretrainax`, which runs every command by its name."""

import configparser
import pkgutil
import subprocess
import sys

import pytest

from pretrainax.config.reference import first_sentence
from tests.support.runs import ROOT, run
from tests.test_structure import COMMANDS

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
NAMES = {"train" if c == "main" else c.replace("_", "-") for c in COMMANDS if c not in ("cli", "__main__", "api")} | {
    "zoo"
}


@pytest.fixture
def pretrainax():
    """Returns the function that an installation would call for the script `pretrainax`."""
    name, _, target = SETUP["options.entry_points"]["console_scripts"].strip().partition(" = ")
    assert name == "pretrainax"
    return pkgutil.resolve_name(target)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_alone_it_lists_every_command_with_what_it_does(words, pretrainax, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pretrainax", *words])
    pretrainax()
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    assert listed.keys() == NAMES
    summary, _, example = first_sentence(pkgutil.resolve_name("pretrainax.verify_resume").__doc__).partition(": ")
    assert listed["verify-resume"] == summary and example.startswith("`python -m pretrainax.verify_resume")


# The `main` of evaluate is in another module, and zoo is a package.
@pytest.mark.parametrize("command", ["evaluate", "zoo"])
def test_help_begins_with_the_docstring_of_the_command(command):
    done = run([sys.executable, "-m", "pretrainax", command, "--help"])
    docstring = pkgutil.resolve_name("pretrainax." + {"zoo": "zoo.__main__"}.get(command, command)).__doc__
    assert done.returncode == 0 and done.stdout.strip().startswith(docstring.strip()), done.stderr


def test_an_unknown_command_names_the_nearest_and_ends_with_2(pretrainax, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pretrainax", "trian"])
    with pytest.raises(SystemExit) as end:
        pretrainax()
    assert end.value.code == 2
    assert capsys.readouterr().err == "pretrainax: no command 'trian', did you mean 'train'?\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, module, flags, code",
    [
        ("zoo", "zoo", ["--only=gpt1"], 0),
        ("train", "main", ["--config=configs/t5_base.py", "--config.train.stpes=3"], 2),
        ("verify-resume", "verify_resume", ["--config=tests/support/tiny.py:gpt", "--steps=1"], 2),
        ("verify_resume", "verify_resume", ["--config=tests/support/tiny.py:gpt", "--steps=1"], 2),
        ("tokenizer", "tokenizer", ["encode"], 2),
    ],
)
def test_a_command_does_what_its_module_does(command, module, flags, code):
    by_name, by_module = (
        run([sys.executable, "-m", *words, *flags]) for words in (["pretrainax", command], [f"pretrainax.{module}"])
    )
    assert by_name.returncode == by_module.returncode == code
    assert (by_name.stdout, by_name.stderr) == (by_module.stdout, by_module.stderr)


@pytest.mark.slow
def test_a_run_with_loader_workers_starts_by_its_name(tmp_path, text, cache):
    flags = [f"--config.data.source.path={text}", f"--config.data.cache_dir={cache}", "--config.data.workers=1"]
    done = run(
        [sys.executable, "-m", "pretrainax", "train", "--config=tests/support/tiny.py:gpt", f"--workdir={tmp_path}"]
        + [*flags, "--config.train.steps=2"]
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curves.png").exists()


@pytest.mark.slow
def test_a_config_file_may_import_what_lies_beside_it(tmp_path):
    """The installed script is in another folder, and only `python -m` adds the current folder to the path."""
    (tmp_path / "mine.py").write_text("STEPS = 7")
    (tmp_path / "config.py").write_text(
        "import mine\nfrom tests.support import tiny\n\n"
        "def get_config(variant=''):\n    e = tiny.get_config('gpt')\n    e.train.steps = mine.STEPS\n    return e\n"
    )
    script = (
        f"import sys; sys.path[0] = '/'; sys.path.append({str(ROOT)!r})\nfrom pretrainax.__main__ import main\nmain()"
    )
    words = [sys.executable, "-c", script, "train", "--config=config.py", "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert "--config.train.steps=7" in done.stdout, done.stderr
