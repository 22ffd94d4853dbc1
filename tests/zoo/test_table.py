"""Tests `python -m pretrainax.zoo`, and the page in docs/ that it writes."""

import os
import pathlib
import runpy
import subprocess
import sys

import pytest

from pretrainax import models, zoo
from pretrainax.config import UserError
from pretrainax.optim.decay import decay_mask
from pretrainax.sharding.rules import param_specs
from pretrainax.zoo import __main__ as table
from pretrainax.zoo.family import differences
from tests.support.parity import ALL

ROOT = pathlib.Path(__file__).parents[2]


def run(*flags):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.run(
        [sys.executable, "-m", "pretrainax.zoo", *flags], cwd=ROOT, env=env, capture_output=True, text=True
    )


@pytest.mark.slow
def test_the_page_in_docs_is_the_table_of_today():
    assert (ROOT / "docs" / "zoo.md").read_text() == table.markdown(list(table.rows()))


@pytest.mark.parametrize("only", ["gpt2", "bert_base", "t5_v1_1", "mixtral", "elmo"])
def test_these_rows_of_the_page_are_those_of_today(only):
    header, *lines = table.markdown(list(table.rows(only))).splitlines()
    assert len(lines) > 4 and set(lines) <= set((ROOT / "docs" / "zoo.md").read_text().splitlines()), header


@pytest.mark.slow
def test_the_command_prints_the_rows_asked_for():
    done = run("--only=gpt2_124m")
    assert done.returncode == 0, done.stderr
    header, row, *_ = done.stdout.splitlines()
    assert header.split() == table.COLUMNS
    assert "124,439,808" in row and "1,024" in row and "Radford et al. 2019" in row


@pytest.mark.slow
def test_no_such_row_is_one_line():
    done = run("--only=gtp")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["pretrainax: --only=gtp: no preset has a name with this prefix"]


def test_every_family_that_is_more_than_another_one_in_size_is_measured():
    assert {family.name for family in zoo.FAMILIES} - {case.family.name for case in ALL.values()} == {"GPT-3"}


@pytest.mark.first(15)
@pytest.mark.parametrize("family", zoo.FAMILIES, ids=lambda family: family.name)
def test_every_parameter_of_a_family_is_sharded_and_decays_by_the_tables(family):
    params = models.abstract_params(family.preset(next(iter(family.sizes))))
    param_specs(params)  # both functions raise for a path that no row covers
    decay_mask(params)


@pytest.mark.parametrize("name", zoo.PRESETS)
def test_a_row_names_a_config_that_builds_it_or_says_none(name):
    family, variant = zoo.PRESETS[name]
    assert family.configs.keys() <= family.sizes.keys()
    if variant not in family.configs:
        return
    file, _, of_config = family.configs[variant].partition(":")
    built, published = runpy.run_path(str(ROOT / file))["get_config"](of_config).model, family.preset(variant)
    built.multi_token = None  # a training field, which presets do not have
    # Configs start with shorter rows, with another base of the rotation or without scaling. Both affect no parameter.
    ours, theirs = (vars(model.position) for model in (built, published))
    stretched = any(ours[name] < theirs[name] for name in ("max_length", "theta") if ours.get(name))
    assert differences(built, published) == (["position"] if stretched else [])
    assert type(built.position) is type(published.position)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.py")), ids=lambda file: file.stem)
def test_a_config_of_published_sizes_is_named_by_their_rows(file):
    named = {config for family in zoo.FAMILIES for config in family.configs.values()}
    # These configs are for any model, or are not from a paper.
    if file.stem not in ("finetune", "quickstart", "shakespeare_char"):
        assert any(config.startswith(f"configs/{file.name}:") for config in named)


def test_the_row_says_so():
    cells = {row[1]: row[2] for row in table.rows("gpt")}
    assert cells["gpt2_355m"] == "configs/gpt2.py:355m" and cells["gpt_neo_1_3b"] == "none"


def test_names_and_rows_are_unique():
    assert len(zoo.PRESETS) == sum(len(family.sizes) for family in zoo.FAMILIES)
    assert len({family.name for family in zoo.FAMILIES}) == len(zoo.FAMILIES)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'bert_base'"):
        zoo.preset("bert_bse")


@pytest.mark.parametrize("name", zoo.PRESETS)
def test_a_preset_is_a_fresh_object(name):
    zoo.preset(name).position.max_length = 1
    assert zoo.preset(name).position.max_length != 1
