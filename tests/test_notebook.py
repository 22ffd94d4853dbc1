"""The notebook runs from its first cell to its last, and is kept with what a whole run of it has shown."""

import os
import pathlib
import sys

import nbclient
import nbformat
import pytest

from tests.support.runs import ENV, ROOT

NOTEBOOK = ROOT / "notebooks" / "evaluate_checkpoint.ipynb"
STEPS = "STEPS = 1000"


def shown(notebook: nbformat.NotebookNode) -> str:
    """All that the cells have printed or returned as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "\n".join(str(o.get("text") or o.get("data", {}).get("text/plain", "")) for o in outputs)


def pictures(notebook: nbformat.NotebookNode) -> int:
    return sum("image/png" in o.get("data", {}) for cell in notebook.cells for o in cell.get("outputs", ()))


def check(notebook: nbformat.NotebookNode) -> None:
    text = shown(notebook)
    for part in ("JAX", "decoder with", "temperature 0.0", "nats a token", "bits_per_byte", "model.safetensors"):
        assert part in text, part
    assert pictures(notebook) == 2  # curves and sentences


@pytest.mark.slow
def test_it_runs_where_a_user_has_nothing_but_the_package(tmp_path, monkeypatch):
    notebook = nbformat.read(NOTEBOOK, 4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    assert STEPS in parameters.source
    parameters.source = parameters.source.replace(STEPS, "STEPS = 10")
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    check(notebook)


def test_it_is_kept_with_what_it_has_shown():
    kept = nbformat.read(NOTEBOOK, 4)
    check(kept)
    assert all(cell.execution_count for cell in kept.cells if cell.cell_type == "code")
    assert str(ROOT) not in NOTEBOOK.read_text() and "/tmp/" not in NOTEBOOK.read_text()
