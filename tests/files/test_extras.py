"""Packages of extras are optional: every command starts without them, and a message names the extra."""

import configparser
import os
import sys

import pytest

from pretrainax.config import UserError
from pretrainax.files.extras import import_extra, missing, needs
from pretrainax.tasks import Classification, Regression, TextGeneration, TokenClassification
from tests.support.runs import ENV, ROOT, command, run
from tests.test_structure import COMMANDS

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
OPTIONAL = "sklearn seqeval rouge_score sacrebleu tensorflow_datasets importlib_resources datasets pyarrow".split()
TASKS = (
    (Classification(labels=("a", "b")), ["sklearn"]),
    (Regression(), ["sklearn"]),
    (TokenClassification(labels=("O", "B-X", "I-X")), ["seqeval"]),
    (TextGeneration(scores=("rouge", "bleu", "chrf")), ["rouge_score", "sacrebleu"]),
)


@pytest.fixture
def without_extras(tmp_path):
    """Returns an environment in which processes cannot import the optional packages."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({OPTIONAL}))\n"
    )
    return ENV | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "hidden"), str(ROOT)])}


def test_a_message_names_the_package_as_pypi_does_and_its_extra():
    assert needs("F1", ["sklearn.metrics"], "metrics") == (
        "F1 needs the package scikit-learn: pip install 'pretrainax[metrics]'"
    )
    assert needs("a", ["rouge_score", "sacrebleu"], "metrics").startswith(
        "a needs the packages rouge-score and sacrebleu:"
    )
    with pytest.raises(UserError, match=r"^x needs the package no-such: pip install 'pretrainax\[data\]'$"):
        import_extra("no_such.module", "data", "x")
    assert missing(["json", "no_such"]) == ["no_such"]


def test_packages_of_extras_are_no_requirements():
    required = SETUP["options"]["install_requires"]
    extras = "\n".join(SETUP["options.extras_require"][name] for name in ("metrics", "tfds", "data"))
    for name in OPTIONAL:
        distribution = {"sklearn": "scikit-learn", "importlib_resources": "importlib_resources"}.get(
            name, name.replace("_", "-")
        )
        assert distribution not in required and distribution in extras


@pytest.mark.parametrize("task, packages", TASKS, ids=lambda value: type(value).__name__)
def test_a_task_names_the_packages_of_its_metrics_before_it_trains(task, packages, monkeypatch):
    assert list(task.packages) == packages
    monkeypatch.setitem(sys.modules, packages[0], None)
    assert missing(task.packages) == packages[:1]


def test_every_command_starts_without_them(without_extras):
    names = [f"pretrainax.{name}" for name in COMMANDS if name not in ("__main__", "prepare_beam")]
    done = run(
        [sys.executable, "-c", f"import {', '.join(names)}, pretrainax.tasks, pretrainax.scoring"], without_extras
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_model_trains_without_them_and_a_task_names_what_it_lacks(without_extras, tmp_path, text, cache):
    flags = ["--config.train.steps=2", "--config.evaluate.every=2"]
    done = run(command("tests/support/tiny.py:bert", tmp_path / "run", text, cache, *flags), without_extras)
    assert done.returncode == 0, done.stderr
    words = [f"--config.checkpoint.init_from={tmp_path}/run", "--config.objective=Regression()"]
    done = run([sys.executable, "-m", "pretrainax.main", "--config=finetune:regression", *words], without_extras)
    assert done.returncode == 2
    assert "config.objective is Regression, which needs the package scikit-learn: pip install" in done.stderr
