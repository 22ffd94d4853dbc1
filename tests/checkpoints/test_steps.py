"""Tests which folders are valid steps, whatever other files exist, and paths that libraries may misread."""

import os
import shutil

import chex
import jax
import numpy as np
import pytest

from pretrainax.checkpoints import params as params_lib
from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.checkpoints.params import load_steps, read_params, write_params
from pretrainax.checkpoints.steps import find_checkpoint
from pretrainax.config import RunFailed, UserError
from tests.support.checkpoints import abstract, make_state, restore, save_all

# Names that some library reads as a pattern, an escape, a query, a flag, a bucket or a special folder.
NAMES = (
    *("run[lr=0.1]", "[a-z]", "a]b[c", "what?", "a*b", "**", "{a,b}", "x%25", "%2F", "%s"),
    *(
        "a?b=c&d",
        "a b",
        " ",
        "ünï 漢字 🤖",
        "new\nline",
        "tab\t",
        "~",
        "~root",
        "-x",
        "--workdir=y",
        "dollar$x$",
        "a:b",
    ),
    *("quo'te\"", "a,b;c", "a|b", "!x", "38", "0.saving", "1.deleted", "x.orbax-checkpoint-tmp", "file:", "é\u0301"),
)


# --- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.first(5)
@pytest.mark.parametrize("name", NAMES)
def test_a_workdir_of_any_name_is_read_back(name, tmp_path):
    workdir = tmp_path / name
    save_all(workdir / "checkpoints", [1])
    (step, state, _), warnings = restore(workdir / "checkpoints")
    assert step == 1 and warnings == []
    chex.assert_trees_all_equal(state, make_state(1))
    read = {path: block for path, _, block in read_params(find_checkpoint(str(workdir)))}
    np.testing.assert_array_equal(read["scale"], make_state(1).params["scale"])
    # No file was written elsewhere.
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_that_are_written_block_by_block_are_read_back_under_any_name(name, tmp_path):
    whole = {"scale": np.arange(3, dtype=np.float32)}
    write_params(str(tmp_path / name), jax.eval_shape(lambda: whole), lambda path, index: whole[path][index], {})
    ((path, _, block),) = read_params(find_checkpoint(str(tmp_path / name)))
    assert path == "scale" and block.tolist() == [0, 1, 2]
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    "path", ["back\\slash", "\\/run", "run.__lock", "/gs/bucket/run", "/s3/run", "/az/x/", "/hf/y"]
)
def test_a_path_that_a_library_takes_for_another_is_refused_at_once(path, tmp_path):
    with pytest.raises(UserError, match="no checkpoint can be saved in .*: use another path"):
        Checkpoints(os.path.join(tmp_path, path), keep=1)
    with pytest.raises(UserError, match="no checkpoint can be saved in"):
        write_params(os.path.join(tmp_path, path), {}, lambda path, index: None, {})
    assert os.listdir(tmp_path) == []


def test_a_save_that_cannot_be_read_back_gets_no_name(tmp_path, monkeypatch):
    """If a library writes files elsewhere or not at all, the save detects it before the step counts."""
    checkpoints = Checkpoints(str(tmp_path), keep=2)
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    monkeypatch.setattr(
        params_lib, "_store", lambda *_: {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}/lost/"}}
    )
    checkpoints.save(2, make_state(2), {})
    with pytest.raises(RunFailed, match="could not save step 2: .* cannot be read back .*earlier checkpoints are kept"):
        checkpoints.wait()
    checkpoints.close()
    assert os.listdir(tmp_path) == ["1"]


def test_an_array_that_reads_back_in_another_shape_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(params_lib, "signature_of", lambda shape, dtype: "float32[9]")
    checkpoints = Checkpoints(str(tmp_path), keep=2)
    checkpoints.save(1, make_state(1), {})
    with pytest.raises(RunFailed, match="was written as .* and reads as"):
        checkpoints.wait()


# --- folders ---------------------------------------------------------------------------------------------------------


def hide_a_folder(step):
    (step / "params" / ".snapshot").mkdir()
    (step / "params" / ".snapshot" / "old").touch()


def link_a_file_and_a_folder_elsewhere(step):
    for name in ("run.json", "params"):
        os.rename(step / name, step.parent.parent / name)
        os.symlink(step.parent.parent / name, step / name)


STRANGERS = {
    "a hidden folder": hide_a_folder,
    "Thumbs.db": lambda step: (step / "Thumbs.db").touch(),
    "desktop.ini": lambda step: (step / "params" / "desktop.ini").touch(),
    "a link to a file": lambda step: os.symlink("/etc/hostname", step / "host"),
    "a link to nothing": lambda step: os.symlink("nothing", step / "params" / "dangling"),
    "a link back": lambda step: os.symlink("..", step / "params" / "back"),
    "an empty folder": lambda step: (step / "notes").mkdir(),
    "links in place of a file and a folder": link_a_file_and_a_folder_elsewhere,
    "a hidden folder beside it": lambda step: (step.parent / ".20").mkdir(),
    "a link beside it": lambda step: os.symlink("10", step.parent / "latest"),
    "a file beside it": lambda step: (step.parent / "README").touch(),
    "digits of another script": lambda step: (step.parent / "٣").mkdir(),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_good_checkpoint_is_used_whatever_lies_beside_it(what, copy):
    STRANGERS[what](copy / "20")
    (step, state, _), warnings = restore(copy)
    assert step == 20 and warnings == []
    chex.assert_trees_all_equal(state, make_state(20))


def test_a_step_that_is_a_link_is_used_and_unlinked_when_its_time_has_come(copy, tmp_path):
    os.rename(copy / "20", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", copy / "20")
    assert restore(copy)[0][0] == 20
    checkpoints = Checkpoints(str(copy), keep=1)
    checkpoints.save(30, make_state(30), {})
    checkpoints.close()
    assert os.listdir(copy) == ["30"] and (tmp_path / "elsewhere" / "run.json").exists()


@pytest.mark.parametrize("name", ["0038", "20 (copy)", "step_20", "20.bak"])
def test_a_copy_under_a_name_that_is_no_step_is_said_and_left_alone(name, copy):
    shutil.copytree(copy / "20", copy / name)
    (step, _, _), warnings = restore(copy)
    assert step == 20
    assert warnings == [f"checkpoint {name!r} is not used: a folder's name must be its step and nothing else"]
    checkpoints = Checkpoints(str(copy), keep=2)
    checkpoints.restore_newest(abstract(make_state(0)))
    checkpoints.drop_after(10)
    checkpoints.close()
    assert sorted(os.listdir(copy)) == sorted(["10", name])


def test_a_run_whose_only_checkpoint_has_another_name_does_not_begin_anew(copy):
    shutil.rmtree(copy / "10")
    os.rename(copy / "20", copy / "0020")
    with pytest.raises(UserError, match="no checkpoint .* is named by its step and nothing else: rename '0020'"):
        restore(copy)


def test_a_checkpoint_renamed_to_another_step_is_not_believed(copy):
    os.rename(copy / "20", copy / "30")
    (step, _, _), warnings = restore(copy)
    assert step == 10
    assert warnings == ["checkpoint 30 is not used: it was saved as step 20: rename its folder to 20"]
    chex.assert_trees_all_equal(
        load_steps((find_checkpoint(str(copy.parent)),), abstract(make_state(0).params)), make_state(10).params
    )
    with pytest.raises(UserError, match="checkpoint 30 of .* cannot be used: it was saved as step 20"):
        find_checkpoint(str(copy.parent), 30)


def test_parameters_of_zeros_are_written_as_others_are(tmp_path):
    zeros = {"decoder": {"blocks": {"bias": np.zeros((2, 3), np.float32)}, "scale": np.zeros(3, np.float32)}}
    write_params(
        str(tmp_path),
        zeros,
        lambda path, index: (
            zeros["decoder"][path.split("/")[1]]["bias"][index] if "bias" in path else zeros["decoder"]["scale"][index]
        ),
        {},
    )
    chex.assert_trees_all_equal(
        load_steps((find_checkpoint(str(tmp_path)),), abstract(jax.tree.map(jax.numpy.asarray, zeros))), zeros
    )
