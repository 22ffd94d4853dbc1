"""The command `pretrainax huggingface` compares its imports and exports with transformers, and reports differences."""

import sys

import pytest

from pretrainax.config import UserError
from pretrainax.inference import verification
from pretrainax.inference.verification.comparison import Verification, exact, not_compared
from pretrainax.interop import directories
from pretrainax.storage import hub
from tests.golden import CASES
from tests.golden.case import needs_transformers
from tests.interop.test_hub_models import exchange
from tests.support.huggingface_weights import write_directory, write_run
from tests.support.runs import run

EQUAL = exact("token ids", 3, "texts", []), not_compared("outputs", "too large")
DIFFERENT = exact("token ids", 3, "texts", ["'a' has other ids"])


@pytest.fixture
def compared(monkeypatch):
    """Returns the arguments of each comparison; `compared.result` is the result of the comparisons."""

    class Calls(list):
        result = EQUAL

    calls = Calls()

    def verify(directory, **options):
        calls.append((directory, options["model"]))
        if isinstance(calls.result, Exception):
            raise calls.result
        return Verification("a in transformers and b", tuple(calls.result), 0.1)

    monkeypatch.setattr(verification, "verify", verify)
    return calls


@pytest.fixture
def source(tmp_path):
    write_directory(tmp_path / "source", "bert")
    return str(tmp_path / "source")


def test_an_import_is_compared_with_its_directory_in_one_line(source, compared, tmp_path, monkeypatch, capsys):
    workdir = str(tmp_path / "run")
    assert exchange(monkeypatch, "import", workdir, verify=True, **{"from": source}) == 0
    assert compared == [(source, workdir)]
    _, line = capsys.readouterr().out.splitlines()
    assert line == "verified in 0.1 s: 1 comparisons with transformers are equal; not compared: outputs"


def test_an_export_that_differs_stays_and_is_not_uploaded(source, compared, tmp_path, monkeypatch, capsys):
    directories.import_directory(source, str(tmp_path / "run"))
    compared.result = [DIFFERENT]
    monkeypatch.setattr(hub, "check_push", lambda name: None)
    monkeypatch.setattr(hub, "push", lambda *_: pytest.fail("uploaded"))
    flags = {"to": str(tmp_path / "out"), "push": "me/model"}
    assert exchange(monkeypatch, "export", tmp_path / "run", verify=True, **flags) == 1
    assert (tmp_path / "out" / "model.safetensors").exists() and compared == [(flags["to"], None)]
    out = capsys.readouterr().out
    assert "token ids DIFFERS:\n  'a' has other ids" in out and out.endswith("nothing was uploaded\n")


def test_a_failed_comparison_is_one_line_and_no_failure(source, compared, tmp_path, monkeypatch, capsys):
    compared.result = ImportError("no torch")
    assert exchange(monkeypatch, "import", tmp_path / "run", verify=True, **{"from": source}) == 0
    assert capsys.readouterr().out.endswith("not verified: no torch\n")


def test_noverify_compares_nothing(source, compared, tmp_path, monkeypatch):
    compared.result = [DIFFERENT]
    assert exchange(monkeypatch, "import", tmp_path / "run", verify=False, **{"from": source}) == 0
    assert compared == []


@pytest.mark.parametrize("result, status", [(EQUAL, 0), ([DIFFERENT], 1)])
def test_verify_prints_each_comparison(result, status, compared, monkeypatch, capsys):
    compared.result = result
    assert exchange(monkeypatch, "verify", "", **{"from": "x"}) == status
    out = capsys.readouterr().out
    assert all(comparison.what in out for comparison in result)


def test_verify_needs_a_directory(monkeypatch):
    with pytest.raises(UserError, match="verify needs --from=DIR"):
        exchange(monkeypatch, "verify", "")


def test_an_export_takes_a_run_and_an_import_a_directory(source, tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", CASES["bert"].config)
    with pytest.raises(UserError, match=f"--workdir={source} is a Hugging Face directory, and export takes"):
        exchange(monkeypatch, "export", source, to=str(tmp_path / "out"))
    with pytest.raises(UserError, match="config.json has no model_type, so it is not of a Hugging Face directory"):
        exchange(monkeypatch, "import", tmp_path / "imported", **{"from": str(run)})


@pytest.mark.parametrize(
    "flags, message",
    [
        ({}, "--adapter is for runs with config.tuning, which .*run does not have: leave it out"),
        ({"dtype": "bfloat16"}, "--dtype has no effect with --adapter: leave one of them out"),
        ({"part": "generator"}, "--part has no effect with --adapter: leave one of them out"),
    ],
)
def test_an_adapter_is_of_a_run_with_a_tuning_and_has_no_dtype(flags, message, tmp_path, monkeypatch):
    write_run(tmp_path / "run", CASES["bert"].config)
    with pytest.raises(UserError, match=message):
        exchange(monkeypatch, "export", tmp_path / "run", adapter=True, to=str(tmp_path / "out"), **flags)


@pytest.mark.slow
@needs_transformers
def test_the_commands_verify_with_transformers(source, tmp_path):
    module = ["-m", "pretrainax.huggingface"]
    done = run([sys.executable, *module, "import", f"--from={source}", f"--workdir={tmp_path / 'run'}"])
    assert done.returncode == 0 and "comparisons with transformers are equal" in done.stdout, done.stderr
    done = run([sys.executable, *module, "export", f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"])
    assert done.returncode == 0 and "comparisons with transformers are equal" in done.stdout, done.stderr
    done = run([sys.executable, *module, "verify", f"--from={tmp_path / 'out'}"])
    assert done.returncode == 0 and "pair logits, padded batch" in done.stdout, done.stderr
