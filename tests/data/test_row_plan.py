"""Tests that the plan of packed rows is stored completely or not at all, in a folder that only its user can access."""

import collections
import os
import socket
import tempfile

import numpy as np
import pytest
from absl import logging

from pretrainax.config import UserError
from pretrainax.data.corpus import Corpus
from pretrainax.data.objectives import CausalLM
from pretrainax.data.packing import BestFit
from pretrainax.data.preparation import shards
from pretrainax.data.row_plan import make_row_plan
from tests.data.test_corpus import SIZE, TOKENIZER


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Corpus:
    """Writes fifty documents to a folder, next to an empty folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name in ("tmp", "train"):
        (tmp_path / name).mkdir()
    with shards.ShardWriter(str(tmp_path / "train"), 0, TOKENIZER) as writer:
        list(writer.write(["some words " * (i % 7 + 1) for i in range(50)], collections.Counter()))
    shards.write_index(str(tmp_path / "train"), 1, SIZE, "fingerprint")
    return Corpus(str(tmp_path / "train"))


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    said = []
    monkeypatch.setattr(logging, "warning", lambda line, *values: said.append(line % values))
    return said


def plan_of(corpus):
    return make_row_plan(corpus, CausalLM(), BestFit(), 32, 4, shuffle=True)


def rows(plan):
    return [plan.row(i, None, 0) for i in range(plan.rows_per_epoch)]


@pytest.mark.parametrize("name", ["starts.npy", "lengths.npy", "ends.npy", "buckets.npy", "figures.json"])
@pytest.mark.parametrize("damage", ["a bit", "cut", "missing"])
def test_damaged_plan_is_made_anew_and_said(corpus, warnings, name, damage):
    good = plan_of(corpus)
    wanted, path = rows(good), os.path.join(good.directory, name)
    with open(path, "rb") as f:
        content = bytearray(f.read())
    content[-20] ^= 1
    os.remove(path)
    if damage != "missing":
        with open(path, "wb") as f:
            f.write(content if damage == "a bit" else content[:-3])
    assert rows(plan_of(corpus)) == wanted
    assert warnings == [f"{good.directory} is damaged and will be rebuilt"]
    assert rows(plan_of(corpus)) == wanted and len(warnings) == 1


def test_plan_is_not_made_of_damaged_tables(corpus):
    path = os.path.join(corpus.directory, "documents.bin")
    ends = np.fromfile(path, np.int64)
    ends[10] -= 1
    ends.tofile(path)
    with pytest.raises(UserError, match=r"documents\.bin is damaged: delete .* and prepare again"):
        plan_of(corpus)
    assert not [name for name in os.listdir(corpus.directory) if name.startswith("rows-")]


def test_plan_is_written_under_a_name_of_this_machine_first(corpus, monkeypatch):
    written, save = [], np.save
    monkeypatch.setattr(np, "save", lambda path, *args, **kwargs: written.append(path) or save(path, *args, **kwargs))
    plan = plan_of(corpus)
    temporary = f"{plan.directory}.tmp-{socket.gethostname()}-{os.getpid()}"
    assert {os.path.dirname(path) for path in written} == {temporary} and not os.path.exists(temporary)


def unwritable(monkeypatch, corpus):
    """Makes the corpus read-only with an `os.rename` that fails, because root may write to any folder."""
    rename = os.rename

    def refuse(source, target):
        if str(target).startswith(corpus.directory):
            raise OSError(30, "Read-only file system")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)


def private(name=""):
    return os.path.join(tempfile.gettempdir(), f"pretrainax-{os.getuid()}", name).rstrip("/")


def test_plan_of_a_corpus_that_may_only_be_read_is_in_a_folder_of_this_user(corpus, monkeypatch):
    unwritable(monkeypatch, corpus)
    plan = plan_of(corpus)
    assert plan.directory == private(os.path.basename(plan.directory))
    assert os.stat(private()).st_mode & 0o777 == 0o700
    assert rows(plan_of(corpus)) == rows(plan)


@pytest.mark.parametrize("planted", ["a folder that all can write to", "a link", "a file"])
def test_what_somebody_else_put_among_the_temporary_files_is_not_used(corpus, monkeypatch, tmp_path, planted):
    unwritable(monkeypatch, corpus)
    plan = plan_of(corpus)  # a complete plan, which a trusted folder would provide
    if planted == "a link":
        os.rename(private(), tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", private(), target_is_directory=True)
    elif planted == "a file":
        os.rename(private(), tmp_path / "elsewhere")
        open(private(), "w").close()
    else:
        os.chmod(private(), 0o777)
    with pytest.raises(UserError, match="the folder belongs to another user, or others can access it: set TMPDIR"):
        plan_of(corpus)
    assert rows(plan)  # The open plan stays readable.


def test_folder_of_another_user_is_not_used(corpus, monkeypatch):
    unwritable(monkeypatch, corpus)
    plan = plan_of(corpus)
    own = os.getuid()
    os.rename(private(), os.path.join(tempfile.gettempdir(), f"pretrainax-{own + 1}"))
    monkeypatch.setattr(os, "getuid", lambda: own + 1)  # another user owns the folder of that name
    with pytest.raises(UserError, match="the folder belongs to another user"):
        plan_of(corpus)
    assert rows(plan)
