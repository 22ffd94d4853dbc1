"""Outputs that cannot be written are errors before the work starts."""

import pytest

from pretrainax.files import outputs
from pretrainax.files.errors import UserError


def test_an_output_file_is_not_a_folder_and_its_folder_is_created(tmp_path):
    assert outputs.output_file("output", str(tmp_path / "new" / "results.json")) == f"{tmp_path}/new/results.json"
    with pytest.raises(UserError, match=f"^--output={tmp_path}/new is a folder, it must be a file$"):
        outputs.output_file("output", str(tmp_path / "new"))
    assert outputs.output_file("output", "gs://none/results.json") == "gs://none/results.json"


def test_a_folder_without_write_permission_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(outputs.os, "access", lambda path, mode: False)  # root may write to any folder
    with pytest.raises(UserError, match=f"^--output={tmp_path}/results.json cannot be written: Permission denied$"):
        outputs.output_file("output", str(tmp_path / "results.json"))
    with pytest.raises(UserError, match=f"^--to={tmp_path} cannot be written: Permission denied$"):
        outputs.output_folder("to", str(tmp_path))
