"""All fields and flags for paths reject paths that no machine can have."""

import dataclasses
import os
import typing

import pytest
from absl import flags

from pretrainax.config import Choice, UserError, values
from pretrainax.config.overrides import set_field
from pretrainax.config.validation import validate
from pretrainax.files.paths import define_path, is_url, path_problem
from tests.support import tiny

# Text fields that name no local file. datasets and TFDS resolve their own names.
NO_PATHS = {
    "family",
    *("prefix", "on_error", "language", "special_pieces", "mode", "name", "select_by", "profile_steps", "budget"),
    *("labels", "numbered", "marks", "scores", "input", "template", "gap"),  # fields of tasks
    # Fields of studies, and tasks during training, whose files `load_tasks` finds.
    *("metric", "task", "tasks", "flags"),
    *("columns", "delimiter", "encoding"),  # fields of tables and JSON lines
    *("project", "entity", "group", "tags", "experiment", "tracking_uri"),  # fields of trackers
    *(
        "targets",
        "fully_trained",
        "prompts",
        "data_dir",
        "revision",
        "data_files",
        "valid_data_files",
        "train_split",
        "valid_split",
    ),
}


@pytest.mark.parametrize("path", ["hdfs://h/a", "https://h", "file:///a", "abfs+x://a", "GS://b"])
def test_a_scheme_that_is_no_store_is_refused(path):
    assert path_problem(path).startswith(f"{path.split(':')[0]}:// is not a supported store (gs://, s3://,")
    assert not is_url(path)


@pytest.mark.parametrize("path", ["gs://b/a", "s3://b", "az://container/a", "memory://b/a@best"])
def test_a_store_may_have_it(path):
    assert is_url(path) and path_problem(path) == ""


def test_a_store_without_a_bucket_is_refused():
    assert path_problem("gs:///") == "it names no bucket"


@pytest.mark.parametrize("path", ["", "/a/b", "a:b", "runs/a://b", "C:/x", "~/runs", "wiki/20231101.en", "é漢"])
def test_what_can_be_a_path_is_none_of_the_problems(path):
    assert path_problem(path) == ""


@pytest.mark.parametrize("path, said", [("a\0b", "zero byte"), (os.fsdecode(b"caf\xe9"), "not UTF-8")])
def test_bytes_that_no_path_has_are_named(path, said):
    assert said in path_problem(path)


def test_every_field_of_text_is_a_path_or_known_to_be_none():
    Choice.names()  # This call imports the choices.
    experiment = tiny.get_config("gpt")
    kinds = {type(getattr(experiment, f.name)) for f in dataclasses.fields(experiment)} | set(Choice.imported())
    unknown = {
        f"{kind.__name__}.{name}"
        for kind in kinds
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith("pretrainax.")
        for name in (field.name for field in dataclasses.fields(kind))
        if "str" in str(hint := typing.get_type_hints(kind)[name]) and "Literal" not in str(hint)
        if name not in NO_PATHS
        and name not in values.PATH_FIELDS
        and not name.endswith(("_field", "_fields"))  # fields of a record
    }
    assert unknown == set()


@pytest.mark.parametrize("field", ["data.cache_dir", "data.source.path", "checkpoint.init_from", "tokenizer.path"])
def test_a_field_that_is_a_path_is_refused_with_its_name(field):
    experiment = tiny.get_config("gpt")
    set_field(experiment, f"config.{field}", "hdfs://bucket/a")
    with pytest.raises(UserError, match=f"config.{field} is 'hdfs://bucket/a': hdfs:// is not a supported store"):
        validate(experiment, files=False)


def test_a_flag_that_is_a_path_knows_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    path = define_path("test_paths_folder", None, "")
    flags.FLAGS(["program", "--test_paths_folder=~/runs"], known_only=True)
    assert path.value == "/home/me/runs"
    with pytest.raises(flags.IllegalFlagValueError, match="ftp:// is not a supported store"):
        flags.FLAGS(["program", "--test_paths_folder=ftp://b"], known_only=True)
