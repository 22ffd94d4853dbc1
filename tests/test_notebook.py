"""The notebooks run from the first to the last cell, and the stored files have the output of a complete run."""

import os
import pathlib
import re
import sys

import nbclient
import nbformat
import pytest

from tests.support.runs import ENV, ROOT, TINY
from tests.support.tiers import few

NOTEBOOKS = ROOT / "notebooks"
# Notebook -> (strings in its output, number of plots).
EXPECTED = {
    "train_small_model": (("JAX", "unigram baseline", "validation loss", "token accuracy", "mask 1:"), 1),
    "evaluate_checkpoint": (
        ("JAX", "decoder with", "temperature 0.0", "nats a token", "bits_per_byte", "model.safetensors"),
        2,  # curves and sentences
    ),
    "compare_two_runs": (("JAX", "rotary", "validation loss", "model.position", "95 %", "Raised when"), 1),
}
# Notebook -> replacements in its parameters that make it short.
SHORT = {
    "train_small_model": {
        'TEXT = ""': "TEXT = {text!r}",
        'CONFIG = "quickstart"': f'CONFIG = "{ROOT / TINY}:t5"',
        "STEPS = 600": "STEPS = 10",
    },
    "evaluate_checkpoint": {"STEPS = 600": "STEPS = 10"},
    "compare_two_runs": {"STEPS = 200": "STEPS = 12"},
}


def printed(notebook: nbformat.NotebookNode) -> str:
    """Joins the text that the cells printed or returned."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "\n".join(str(o.get("text") or o.get("data", {}).get("text/plain", "")) for o in outputs)


def pictures(notebook: nbformat.NotebookNode) -> int:
    return sum("image/png" in o.get("data", {}) for cell in notebook.cells for o in cell.get("outputs", ()))


def check(name: str, notebook: nbformat.NotebookNode) -> None:
    (parts, number_of_pictures), text = EXPECTED[name], printed(notebook)
    for part in parts:
        assert part in text, part
    assert pictures(notebook) == number_of_pictures


@pytest.mark.parametrize("name", few(SHORT, ["train_small_model"]))
def test_it_runs_where_a_user_has_nothing_but_the_package(name, tmp_path, text, monkeypatch):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    for stored, short in SHORT[name].items():
        assert stored in parameters.source
        parameters.source = parameters.source.replace(stored, short.format(text=str(text)))
    for variable, value in ENV.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    check(name, notebook)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_is_stored_with_its_output(path):
    stored = nbformat.read(path, 4)
    check(path.stem, stored)
    assert all(cell.execution_count for cell in stored.cells if cell.cell_type == "code")
    assert str(ROOT) not in path.read_text() and not re.search("/(tmp|root|home)/", path.read_text())
