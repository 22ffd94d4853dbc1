"""Tests that benchmarks/repeated.py recovers a planted value of repeated text."""

import gzip
import importlib.util
import json

import pytest

from pretrainax.scaling.power_laws import Run, effective_tokens
from tests.support.runs import ROOT

UNIQUE, SIZES = 5e5, (25_000, 60_000, 100_000, 150_000)


@pytest.fixture(scope="module")
def repeated():
    spec = importlib.util.spec_from_file_location("repeated", ROOT / "benchmarks" / "repeated.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_ladder(folder, unique: float, repetition: float) -> str:
    """Writes the law.json of a ladder whose losses are 2 + 300 / N^0.5 + 60 / D'^0.3."""
    folder.mkdir()
    runs = []
    for size in SIZES:
        for tokens in (1e6, 2e6, 4e6, 8e6):
            epochs = tokens / unique
            worth = effective_tokens(tokens, max(epochs, 1.0), repetition)
            loss = 2 + 300 / size**0.5 + 60 / worth**0.3
            runs.append(Run(f"{size}/{tokens}", size, tokens, loss, epochs, str(size))._asdict())
    (folder / "law.json").write_text(json.dumps({"runs": runs[:9], "too_small": runs[9:]}))
    return str(folder)


def test_a_planted_worth_is_found(repeated, tmp_path):
    new, same = write_ladder(tmp_path / "new", 1e9, 5.0), write_ladder(tmp_path / "repeated", UNIQUE, 5.0)
    found = repeated.compare(new, same)
    by_epochs = {run["epochs"]: run["worth"] for run in found["runs"] if run["parameters"] == SIZES[0]}
    exact = {epochs: effective_tokens(epochs * UNIQUE, epochs, 5.0) for epochs in (2.0, 4.0, 8.0, 16.0)}
    assert by_epochs.pop(2.0) is None and exact.pop(2.0) < 1e6  # This is less than the smallest amount of new text.
    # Between two amounts of new text, which differ by a factor of 2, losses are not straight lines.
    assert by_epochs == pytest.approx(exact, rel=0.02)
    for fit in found["fits"]:
        assert (fit["share"], fit["repetition"]) == pytest.approx((1.0, 5.0), rel=0.1)
        assert fit["low"] == pytest.approx(fit["high"])  # All trunks have the same fit.
    assert repeated.table(found).splitlines()[-1].split()[:3] == ["16", "8", "M"]


def test_text_of_less_worth_has_a_share(repeated):
    runs = [Run("", 1, epochs * UNIQUE, 1.0, epochs) for epochs in (4.0, 8.0, 16.0)]
    pairs = [(run, 0.8 * effective_tokens(run.tokens, run.epochs, 7.0)) for run in runs]
    assert repeated.fitted_law(pairs, free_share=True) == pytest.approx((0.8, 7.0), rel=1e-3)


def test_a_part_has_one_of_n_records(repeated, tmp_path):
    for i, count in enumerate((3, 4)):
        with gzip.open(tmp_path / f"train-{i}.jsonl.gz", "wt") as f:
            f.writelines(json.dumps({"text": f"{i} {j}"}) + "\n" for j in range(count))
    repeated.write_part(str(tmp_path), 3)
    with gzip.open(tmp_path / "part.jsonl.gz", "rt") as f:
        assert [json.loads(line)["text"] for line in f] == ["0 0", "1 0", "1 3"]
