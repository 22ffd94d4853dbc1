"""`python -m pretrainax.tokenizer` learns, compares and shows tokenizers."""

import json
import os
import subprocess
import sys

import pytest

from pretrainax import tokenizer as tokenizer_command
from pretrainax.config import UserError
from pretrainax.data.sources import TextFiles
from pretrainax.models.flops import flops_per_step
from pretrainax.tokenization import BPE, Characters
from pretrainax.tokenization.base import load_tokenizer
from pretrainax.tokenization.compare import KINDS
from pretrainax.zoo import preset
from tests.support import tiny

ROOT = os.path.dirname(os.path.dirname(tokenizer_command.__file__))
TIMES = ("encoded_mb_per_second", "training_seconds")
LETTERS = Characters().build(iter(["abcdefghijklmnopqrstuvwxyz \n"]))


def experiment(text, cache, variant="t5"):
    made = tiny.get_config(variant)
    made.data.source, made.data.cache_dir = TextFiles(str(text), valid_fraction=0.1), str(cache)
    return made


# --- costs of a model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False])
def test_costs_are_those_of_the_model_at_this_size(tie, text, cache):
    made = experiment(text, cache)
    made.model = preset("t5_small")
    made.model.tie_embeddings = tie
    costs = tokenizer_command.model_costs(made, LETTERS, bytes_per_token=2.0)
    assert costs["embedding_parameters"] == (1 if tie else 2) * LETTERS.vocabulary.size * 512
    lengths, made.model.vocab_size = made.objective.lengths(made.data.sequence_length), LETTERS.vocabulary.size
    # FLOPs of an update with a batch of 8, divided by the bytes of its text.
    assert costs["flops_per_byte"] == pytest.approx(
        flops_per_step(made.model, 8, lengths.inputs, lengths.targets) / (8 * lengths.raw * 2)
    )


# --- train ---------------------------------------------------------------------------------------------------------


def test_train_saves_what_the_preparation_uses(text, cache, tmp_path, capsys):
    made = experiment(text, cache)
    made.tokenizer = BPE(vocab_size=350)
    said = tokenizer_command.train(made, str(tmp_path / "made"))
    assert said.startswith("BPE of 350 ids: ") and said.endswith(f"saved to {tmp_path / 'made'}")
    assert "training the tokenizer" in capsys.readouterr().err
    again = tokenizer_command.train(made, str(tmp_path / "again"))
    assert "training the tokenizer" not in capsys.readouterr().err
    first, second = (load_tokenizer(str(tmp_path / name)) for name in ("made", "again"))
    assert first.fingerprint == second.fingerprint
    assert said.split(";")[0] == again.split(";")[0]  # compares the metrics; the rest depends on time


# --- report --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reported(text, cache, tmp_path_factory):
    """Creates the same report twice, and returns each table and directory."""
    made = experiment(text, cache)
    folders = [tmp_path_factory.mktemp("report") for _ in range(2)]
    tables = [tokenizer_command.report(made, list(KINDS), [330, 400, 9000], str(f)) for f in folders]
    return list(zip(tables, folders, strict=True))


def results(folder):
    return json.loads((folder / "report.json").read_text())


def test_report_has_each_kind_at_each_size(reported):
    rows = results(reported[0][1])["rows"]
    assert [(row["kind"], row["size"]) for row in rows] == [(kind, size) for kind in KINDS for size in (330, 400)]
    by = {(row["kind"], row["size"]): row for row in rows}
    for kind in KINDS:
        assert by[kind, 400]["bytes_per_token"] > by[kind, 330]["bytes_per_token"] > 1
        assert by[kind, 400]["restored_share"] == (0 if kind == "wordpiece" else 1)
    assert by["unigram", 400]["vocabulary"] == 500  # 100 sentinels


def test_a_size_that_the_text_is_too_small_for_is_skipped(reported):
    table, folder = reported[0]
    skipped = results(folder)["skipped"]
    assert [(s["kind"], s["size"]) for s in skipped] == [(kind, 9000) for kind in KINDS]
    assert all("this text is enough for" in s["reason"] for s in skipped)
    assert (
        "\nSkipped 4:\n" in table and table.count(" 9,000: config.tokenizer.vocab_size is 9000, but this text is") == 4
    )


def test_report_is_the_same_each_time(reported):
    first, second = (results(folder) for _, folder in reported)
    for row in first["rows"] + second["rows"]:
        assert all(row.pop(name) > 0 for name in TIMES)
    assert first == second
    assert len({(folder / "report.png").read_bytes() for _, folder in reported}) == 1


def test_report_is_written_as_it_is_returned(reported):
    for table, folder in reported:
        assert (folder / "report.md").read_text() == table
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len(lines) == 2 + 8 and len({len(line) for line in lines}) == 1


def test_no_validation_text_is_explained(tmp_path, cache):
    (tmp_path / "some.txt").write_text("some text\n" * 100)
    (tmp_path / "none.txt").write_text("\n \n")
    made = experiment(tmp_path / "some.txt", cache)
    made.data.source.valid_path = str(tmp_path / "none.txt")
    with pytest.raises(UserError, match=r"config\.data\.source holds no validation text"):
        tokenizer_command.report(made, ["bpe"], [300], None)


# --- the command ---------------------------------------------------------------------------------------------------


def run(*flags, stdin=""):
    command = [sys.executable, "-m", "pretrainax.tokenizer", *flags]
    return subprocess.run(command, input=stdin, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_command_trains_and_encodes(text, cache, tmp_path):
    flags = [f"--config.data.source.path={text}", f"--config.data.cache_dir={cache}", f"--to={tmp_path / 'made'}"]
    # Two worker processes find the classes of the config by the names in this process.
    flags += ["--config.data.prepare_workers=2", "--config.tokenizer=BPE(vocab_size=340)"]
    trained = run("train", f"--config={ROOT}/tests/support/tiny.py:gpt", *flags)
    assert trained.returncode == 0 and "BPE of 340 ids" in trained.stdout, trained.stderr
    shown = run("encode", f"--tokenizer={tmp_path / 'made'}", stdin="tis se\n")
    assert shown.returncode == 0 and shown.stdout.endswith("decoding restores the text exactly\n"), shown.stderr


def test_help_has_the_commands_and_their_flags():
    said = run("--help").stdout
    assert "encode --tokenizer=DIR" in said and "--sizes" in said and "--config" in said


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "flags, said",
    [
        (["report", "--kinds=bpee"], "--kinds has 'bpee', did you mean 'bpe'?"),
        (["report", "--sizes=8k"], "--sizes has '8k', it must be whole numbers above 0, as 8000,32000"),
        (["encode"], "encode needs --tokenizer=DIR"),
        (["train", "--to=/dev/null/x"], "--to=/dev/null/x cannot be written: Not a directory"),
        (["make"], "the first argument must be train or report or encode; got 'make'"),
    ],
)
def test_a_mistake_is_one_line(flags, said):
    done = run(*flags)
    assert (done.returncode, done.stderr) == (2, f"pretrainax: {said}\n")
