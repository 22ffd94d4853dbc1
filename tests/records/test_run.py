"""Tests the whole path of a record on a small text: text, two runs, score, result and checks."""

import importlib
import io
import sys
import tarfile
from types import SimpleNamespace

import pytest

from pretrainax.tokenization.choices import check_tokenizer
from tests.support.runs import ROOT

CONFIG = """
import runpy

from pretrainax.config import RotaryPositions


def get_config(variant=""):
    experiment = runpy.run_path({tiny!r})["get_config"]({kind!r})
    experiment.train.steps, experiment.data.sequence_length = 80, 128
    if {kind!r} != "t5":
        experiment.model.position = RotaryPositions()  # the spans are longer than the learned positions
    return experiment
"""
# These problems depend on the load of the machine, because the test takes only seconds.
OF_TIME = ("core-seconds", "speed of the machine", "replay takes")


@pytest.fixture(scope="module")
def modules():
    sys.path.insert(0, str(ROOT / "records"))
    return SimpleNamespace(
        **{name: importlib.import_module(name) for name in ("check", "result", "rules", "run", "text")}
    )


@pytest.fixture
def texts(modules, tmp_path, monkeypatch):
    """Builds the text from an archive whose books are pages of the documentation."""
    archive, folder = tmp_path / "books.tar.gz", tmp_path / "text"
    with tarfile.open(archive, "w:gz") as tar:
        for number, page in enumerate(sorted((ROOT / "docs" / "how-to").glob("*.md"))):
            book = f"# Title: {page.stem}\n\n-------\n{page.read_text()}".encode()
            info = tarfile.TarInfo(f"collection/Author {number}/{page.name}")
            info.size = len(book)
            tar.addfile(info, io.BytesIO(book))
    for name, value in {"DOCUMENT": 500, "HELD_OUT": 5, "SCORED": 30, "VALIDATED": 10}.items():
        monkeypatch.setattr(modules.text, name, value)
    modules.text.write(str(archive), str(folder))
    for path in folder.iterdir():
        monkeypatch.setitem(modules.rules.TEXT, path.name, modules.text.sha256(path))
    return folder


def test_no_author_is_in_two_files(modules, texts):
    archive = texts.parent / "books.tar.gz"
    found, parts = modules.text.books(str(archive)), modules.text.splits(modules.text.books(str(archive)))
    owners = {
        name: {path for path in found for d in modules.text.documents(found[path]) if d in docs}
        for name, docs in parts.items()
    }
    assert all(owners.values()) and not owners["train.jsonl"] & (owners["heldout.jsonl"] | owners["valid.jsonl"])
    assert not set(parts["heldout.jsonl"]) & set(parts["valid.jsonl"])
    assert not list(modules.text.problems(str(texts)))
    (texts / "train.jsonl").write_text("")
    assert "it must be" in next(modules.text.problems(str(texts)))


def test_an_interruption_between_two_log_lines_keeps_the_core_seconds(modules, tmp_path, monkeypatch):
    def process(start, stop):
        """Runs the steps start + 1 to stop, 3 core-seconds each, and a signal that saves a checkpoint."""
        loop = SimpleNamespace(step=start)
        monkeypatch.setattr(modules.run.time, "process_time", lambda: 3 * (loop.step - start))
        callback = modules.run.CoreSeconds(str(tmp_path))
        callback.on_start(loop, None, {})
        for loop.step in range(start + 1, stop + 1):
            callback.on_step(loop, None, {})
        callback.on_save(loop, None, {})
        return callback.log_metrics(loop, None)["core_seconds"]

    # The first update of each process does not count, because it compiles.
    assert process(0, 7) == 18
    assert process(7, 12) == 18 + 12
    assert process(7, 9) == 18 + 3  # The checkpoint of step 12 is lost.


@pytest.mark.parametrize(
    "record", sorted(path.parent for path in (ROOT / "records").glob("*/config.py")), ids=lambda path: path.name
)
def test_configs_of_records_have_a_tokenizer_with_the_tokens_of_their_objective(modules, record):
    experiment = modules.run.experiment_of(str(record), "short")
    experiment.tokenizer.vocab_size = 400
    check_tokenizer(experiment.tokenizer.build(page.read_text() for page in ROOT.glob("docs/*.md")), experiment)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "bert", "t5"])
def test_a_record_is_trained_scored_and_checked(modules, texts, tmp_path, monkeypatch, kind):
    record, runs = tmp_path / "record", tmp_path / "runs"
    record.mkdir()
    (record / "config.py").write_text(CONFIG.format(tiny=str(ROOT / "tests" / "support" / "tiny.py"), kind=kind))
    command = ["run.py", str(record), f"--text={texts}", f"--workdir={runs}", "--variant=short", f"--to={record}"]
    monkeypatch.setattr(modules.rules, "SEEDS", 2)
    for seeds in ("0", "1"):
        monkeypatch.setattr(sys, "argv", [*command, f"--seeds={seeds}"])
        assert modules.run.main() == 0
    assert not problems(modules, record, texts, runs, replay=True)
    result = modules.result.read_result(str(record))
    better = [result.seeds[0]._replace(bits_per_byte=result.seeds[0].bits_per_byte - 0.05), *result.seeds[1:]]
    modules.result.write_result(str(record), result._replace(seeds=better))
    (found,) = problems(modules, record, texts, runs)
    assert "the model has" in found
    modules.result.write_result(str(record), result)
    change_first_loss(modules, record)
    assert any("a replay has the loss" in line for line in problems(modules, record, texts, replay=True))


def problems(modules, record, texts, runs=None, replay=False):
    found = modules.check.problems(str(record), str(texts), runs and str(runs), replay)
    return [line for line in found if not any(word in line for word in OF_TIME)]


def change_first_loss(modules, record):
    path = modules.result.metrics_path(str(record), 0)
    with open(path) as file:
        first, *others = file.readlines()
    loss = modules.result.read_lines(path)[0]["loss"]
    with open(path, "w") as file:
        file.writelines([first.replace(f'"loss": {loss!r}', f'"loss": {0.9 * loss!r}'), *others])
