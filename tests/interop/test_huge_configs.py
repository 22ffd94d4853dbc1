"""A config.json of another project, with any numbers, gives either a model or an error of one line."""

import json
import time

import pytest

from pretrainax.config import UserError, dump
from pretrainax.interop.origin import Origin
from pretrainax.interop.start import experiment_of
from tests.support import tiny


def numbers(config, path=()):
    """Yields the paths of all numbers in a part of a config."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from numbers(value, (*path, name))
        elif type(value) is int:
            yield (*path, name)


@pytest.mark.first(4)
@pytest.mark.parametrize("value", [10**9, 10**18, 10**30, -1, 0])
@pytest.mark.parametrize("family", ["gpt", "bert", "t5"])
def test_a_number_of_a_run_that_is_huge_ends_within_seconds(family, value, tmp_path):
    whole = dump(tiny.get_config(family))
    for path in numbers(json.loads(whole)["model"]):
        changed = json.loads(whole)
        part = changed["model"]
        for name in path[:-1]:
            part = part[name]
        part[path[-1]] = value
        (tmp_path / "config.json").write_text(json.dumps(changed))
        began = time.monotonic()
        try:
            experiment_of(Origin(str(tmp_path), (), "a run"))
        except UserError as e:
            assert "\n" not in str(e) and "config.json" in str(e), path
        else:
            assert path[-1] != "num_layers" or value < 1
        assert time.monotonic() - began < 20, path


@pytest.mark.slow
def test_a_billion_layers_are_one_line_that_names_the_limit(tmp_path):
    made = tiny.get_config("gpt")
    made.model.num_layers = 10**9
    (tmp_path / "config.json").write_text(dump(made))
    with pytest.raises(UserError, match=r"config\.model\.num_layers is 1000000000, it must be at most 10000"):
        experiment_of(Origin(str(tmp_path), (), "a run"))
