"""The manifest of a folder applies only to files of this folder."""

import hashlib

import pytest

from pretrainax.checkpoints import manifest


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "{folder}/secret", "a//b", "./a", "a" * 300, "a\0b"])
def test_a_name_that_leads_elsewhere_is_a_fault_and_no_file_is_read(tmp_path, monkeypatch, name):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "step").mkdir()
    name, digest = name.format(folder=tmp_path), hashlib.sha256(b"secret").hexdigest()
    (tmp_path / "step" / manifest.MANIFEST).write_text(f"{digest}  {name}\n")
    monkeypatch.setattr(manifest, "_digest", lambda path: pytest.fail(f"{path} was read"))
    (fault,) = manifest.faults(str(tmp_path / "step"))
    assert fault.startswith("manifest.sha256 names '")
