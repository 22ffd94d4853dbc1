"""Tests the values of `DIR`: a run, one of its checkpoints, their mean, a Hugging Face directory, and invalid names."""

import json
import os
import re
import shutil

import pytest

from pretrainax.checkpoints import manifest
from pretrainax.checkpoints.run_json import RUN_JSON
from pretrainax.config import UserError
from pretrainax.interop.origin import find_origin
from tests.support.huggingface_weights import write_directory


def damage(run, step):
    file = max((run / "checkpoints" / str(step) / "params").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def steps(name):
    return [os.path.basename(step) for step in find_origin(str(name)).steps]


@pytest.mark.parametrize(
    "which, expected, said",
    [
        ("", ["30"], ", step 30"),
        ("/", ["30"], "/, step 30"),
        ("@trained", ["30"], ", step 30"),
        ("@trained10", ["10"], ", step 10"),
        ("@10", ["10"], ", step 10"),
        ("@20/", ["20"], ", step 20"),
        ("@best", ["20"], ", step 20, the best by validation loss: 2.5000"),
        ("@average", ["10", "20", "30"], ", mean of steps 10, 20, 30"),
        ("@average2", ["20", "30"], ", mean of steps 20, 30"),
        ("@average1", ["30"], ", mean of the one step 30"),
    ],
)
def test_a_name_stands_for_checkpoints_of_a_run(made_run, which, expected, said):
    origin = find_origin(f"{made_run}{which}")
    assert [os.path.basename(step) for step in origin.steps] == expected
    assert origin.description == f"{made_run}{said}"


@pytest.mark.parametrize("name", ["a@b", "run@20", "@best", "x@average"])
def test_a_folder_whose_own_name_has_an_at_is_that_folder(run, tmp_path, name, monkeypatch):
    shutil.copytree(run, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert steps(name) == ["30"] and steps(f"{name}@10") == ["10"] and find_origin(f"{name}@10").directory == name


def test_the_home_is_a_tilde(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert steps("~/run@10") == ["10"]


def test_a_hugging_face_directory_has_no_checkpoints(tmp_path):
    directory = write_directory(tmp_path / "gpt2")
    assert find_origin(str(directory)).steps == ()
    with pytest.raises(UserError, match="is a Hugging Face directory, which has no checkpoints: leave out @best"):
        find_origin(f"{directory}@best")


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "runs/mine",
            "runs/mine is no directory here; a model of the Hugging Face Hub is named hf:runs/mine",
        ),
        ("openai-community/gpt2", "is named hf:openai-community/gpt2"),
        ("hdfs://bucket/run", "hdfs:// is not a supported store"),
        ("./no/such@best", "./no/such@best is no directory here"),
        ("{run}@25", r"checkpoint 25 of {run} cannot be used: it does not exist; the nearest valid one is {run}@20"),
        ("{run}@average4", "@average4 needs 4 checkpoints, but only 3 of the last ones verify: give at most"),
        ("{run}@average0", "@average0 needs 0 checkpoints, but only 3 of the last ones verify"),
        ("{run}@ema", "{run}@ema: the run keeps no moving average of its parameters, for which config.train.ema_decay"),
        ("{run}@ema10", "{run}@ema: the run keeps no moving average of its parameters"),
        ("{run}@ema11", "checkpoint 11 of {run} cannot be used: it does not exist"),
        ("{run}@best5", "after @ comes a step, best, average"),
        ("{run}@9000", r"it does not exist; the nearest valid one is {run}@30 (for an export: --step=30)"),
        (
            "{run}@newest",
            "(of all, or average5: of 5), ema or trained, for example {run}@best; got 'newest'",
        ),
        (
            "{run}@-1",
            "(of all, or average5: of 5), ema or trained, for example {run}@best; got '-1'",
        ),
        (
            "{run}@",
            "(of all, or average5: of 5), ema or trained, for example {run}@best; got ''",
        ),
        ("{run}/checkpoints/20", "is a checkpoint of a run: give {run}@20"),
        ("{run}/tokenizer", "is neither a run, which has config.json and checkpoints/, nor a Hugging Face directory"),
        ("{run}/config.json", "{run}/config.json is no directory here"),
    ],
)
def test_what_is_not_there_is_one_line(made_run, name, message):
    with pytest.raises(UserError, match=re.escape(message.format(run=made_run))) as error:
        find_origin(name.format(run=made_run))
    assert "\n" not in str(error.value)


def test_a_damaged_checkpoint_names_one_that_verifies_and_others_do_without_it(run):
    damage(run, 30)
    with pytest.raises(UserError, match=r"checkpoint 30 of .*changed; the nearest valid one is .*/run@20"):
        find_origin(f"{run}@30")
    assert steps(run) == ["20"] and steps(f"{run}@average") == ["10", "20"]
    damage(run, 20)
    with pytest.raises(UserError, match="checkpoint 20 of .* the nearest valid one is .*/run@10"):
        find_origin(f"{run}@best")
    assert find_origin(f"{run}@average").description == f"{run}, mean of the one step 10"
    damage(run, 10)
    for which, message in (
        ("@10", "no other checkpoint is valid"),
        ("", "every checkpoint in"),
        ("@average", "every checkpoint in"),
    ):
        with pytest.raises(UserError, match=message):
            find_origin(f"{run}{which}")


def test_the_best_is_by_the_figure_of_the_run_and_by_the_loss_where_checkpoints_know_no_other(run):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"evaluate": config["evaluate"] | {"select_by": "accuracy"}}))
    assert find_origin(f"{run}@best").description == f"{run}, step 20, the best by validation loss: 2.5000"
    for step, accuracy in ((10, 0.25), (30, 0.5)):
        file = run / "checkpoints" / str(step) / RUN_JSON
        known = json.loads(file.read_text())
        file.write_text(json.dumps(known | {"metrics": known["metrics"] | {"accuracy": accuracy}}))
        manifest.write_manifest(str(file.parent))
    assert find_origin(f"{run}@best").description == f"{run}, step 30, the best by validation accuracy: 0.5000"


@pytest.mark.parametrize(
    "saving, expected",
    [
        ({"every": 10, "keep": 2}, ["20", "30"]),  # retention kept the first checkpoint because it was the best
        ({"every": 10, "keep": 2, "keep_at": [20]}, ["20", "30"]),
        ({"every": 15, "keep": 2, "keep_at": [10, 20]}, ["30"]),
        ({"every": 15, "keep": 2, "keep_at": [20, 30]}, ["10", "30"]),  # a signal saved the checkpoint of step 10
    ],
)
def test_an_average_is_of_the_last_ones(run, saving, expected, caplog):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"checkpoint": config["checkpoint"] | saving}))
    assert steps(f"{run}@average") == expected == steps(f"{run}@average{len(expected)}")
    early = ", ".join(step for step in ("10", "20", "30") if step not in expected)
    assert f"the mean excludes earlier checkpoints: steps {early}" in caplog.text
    with pytest.raises(UserError, match=f"but only {len(expected)} of the last ones verify"):
        find_origin(f"{run}@average{len(expected) + 1}")


def test_a_run_without_validation_has_no_best(run):
    for step in (10, 20, 30):
        file = run / "checkpoints" / str(step) / RUN_JSON
        file.write_text(re.sub(r'"loss": [\d.]+', '"loss": null', file.read_text()))
    with pytest.raises(
        UserError, match="no checkpoint there has a validation loss, so none is the best: give .*/run for"
    ):
        find_origin(f"{run}@best")


@pytest.mark.parametrize("which", ["", "@best", "@average", "@3"])
def test_a_run_that_has_saved_nothing_is_one_line(run, which):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    with pytest.raises(
        UserError, match="has no checkpoint|no checkpoint there|it does not exist; no other checkpoint is valid"
    ):
        find_origin(f"{run}{which}")
