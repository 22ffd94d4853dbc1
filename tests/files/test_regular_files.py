"""Tests that readers accept only regular files, and links to them."""

import json
import os

import pytest

from pretrainax import config
from pretrainax.config import UserError
from pretrainax.files.json_files import read_object
from pretrainax.files.regular_files import read_bytes
from tests.support import tiny


def test_a_link_to_a_file_is_read_as_the_file(tmp_path):
    (tmp_path / "blob").write_bytes(b'{"a": 1}')
    (tmp_path / "config.json").symlink_to("blob")
    assert read_object(str(tmp_path / "config.json")) == {"a": 1}


@pytest.mark.parametrize("target, said", [("/dev/zero", "is a device"), (".", "is a folder")])
def test_a_link_to_something_else_is_named(target, said, tmp_path):
    (tmp_path / "config.json").symlink_to(target)
    with pytest.raises(UserError, match=f"config.json {said}, it must be a regular file"):
        config.load(str(tmp_path / "config.json"))


def test_a_fifo_that_nobody_writes_to_does_not_hold_the_reader(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match="config.json is a FIFO"):
        config.load(str(tmp_path / "config.json"))


def test_no_more_of_a_file_is_read_than_it_may_have(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(str(tmp_path / "a"), most=5) == b"12345"
    with pytest.raises(UserError, match="a has more than 4 bytes"):
        read_bytes(str(tmp_path / "a"), most=4)


@pytest.mark.parametrize(
    "part, field, value, said",
    [
        ("train", "steps", 10**40, "config.train.steps is 1000.*, it must be at most"),
        ("train", "steps", 2**31, "config.train.steps is 2147483648, it must be at most"),
        ("train", "seed", 2**32, "config.train.seed is 4294967296, it must be at most"),
        ("model", "d_model", 2**63, "config.model.d_model is 9223372036854775808"),
        ("model", "norm_epsilon", float("nan"), "config.model.norm_epsilon is nan, it must be a finite number"),
        ("data", "cache_dir", "hdfs://a/b", "hdfs:// is not a supported store"),
        ("data", "cache_dir", "\ud800", "not UTF-8"),
    ],
)
def test_a_config_json_with_a_value_that_no_run_can_have_is_one_line(part, field, value, said, tmp_path):
    described = config.to_json(tiny.get_config("gpt"))
    described[part][field] = value
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=said):
        config.load(str(tmp_path / "config.json"))


def test_a_config_json_that_is_a_choice_and_no_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"type": "TextFiles", "path": "x"}')
    with pytest.raises(UserError, match="config.json is not a run config: it contains a TextFiles"):
        config.load(str(tmp_path / "config.json"))
