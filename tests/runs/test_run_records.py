"""Tests reading the records of a workdir about its metrics, and messages about missing records."""

import json

import pytest

from pretrainax import config as config_lib
from pretrainax.data.objectives.masked import RateChange
from pretrainax.data.sources import TextFiles
from pretrainax.runs.run_records import read_record
from tests.support import tiny
from tests.support.made_run import made_run, run  # noqa: F401  fixtures


def write(run, experiment):  # noqa: F811
    (run / "config.json").write_text(config_lib.dump(experiment))
    return read_record(str(run))


def test_a_run_records_objective_tokenizer_and_text(run):  # noqa: F811
    record = read_record(str(run))
    assert record.missing == "" and record.parts["objective"].text == "CausalLM()"
    checkpoint = json.loads((run / "checkpoints" / "30" / "run.json").read_text())
    assert record.parts["tokenizer"].key == checkpoint["extra"]["tokenizer"]


def test_the_fingerprint_of_the_validation_corpora_is_in_the_newest_checkpoint(run):  # noqa: F811
    path = run / "checkpoints" / "30" / "run.json"
    content = json.loads(path.read_text())
    content["extra"]["corpora"] = ["k-train", "k-valid"]
    path.write_text(json.dumps(content))
    assert read_record(str(run)).corpora == ("k-valid",)
    path.write_text("{")  # the run is writing the file
    assert read_record(str(run)).corpora is None


@pytest.mark.parametrize(
    "file, said",
    [("config.json", "no config.json"), ("tokenizer/vocabulary.json", "vocabulary.json")],
)
def test_a_missing_file_is_the_reason(run, file, said):  # noqa: F811
    (run / file).unlink()
    record = read_record(str(run))
    assert record.parts == {} and said in record.missing


def test_a_damaged_config_is_the_reason(run):  # noqa: F811
    (run / "config.json").write_text("{")
    assert "config.json" in read_record(str(run)).missing


def test_the_training_text_is_no_property_if_other_text_validates(run):  # noqa: F811
    experiment = tiny.get_config("gpt")
    keys = []
    for path, valid in (("a", "v"), ("b", "v"), ("b", None)):
        experiment.data.source = TextFiles(path, valid_path=valid)
        record = write(run, experiment)
        keys.append((record.parts["validation text"].key, record.corpora))
    assert keys[0] == keys[1] != keys[2]


def test_a_mask_rate_that_changes_validates_with_its_last_value(run):  # noqa: F811
    keys = []
    for rate, change in ((0.15, None), (0.3, RateChange(to=0.15)), (0.3, None)):
        experiment = tiny.get_config("bert")
        experiment.objective.rate, experiment.objective.rate_change = rate, change
        keys.append(write(run, experiment).parts["objective"].key)
    assert keys[0] == keys[1] != keys[2]
