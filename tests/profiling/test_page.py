"""Tests that docs/how-to/profile.md has the real names of files and flags, and the real marks and limits."""

import os
import pathlib
import re

import pytest

from pretrainax.config.validation import MAX_PROFILED_STEPS
from pretrainax.profile import __doc__ as COMMAND
from pretrainax.runtime.recorder import FOLDER, ON_REQUEST, STEP, files_of
from tests.support.docs_pages import how_to

ROOT = pathlib.Path(__file__).parents[2]
PAGE = how_to("profile")


def test_the_files_of_a_profile_are_named_as_they_are_written():
    written = {os.path.basename(path) for path in files_of("", 0)}
    assert set(re.findall(r"^\| `(process_0\.[\w.]+)`", PAGE, re.MULTILINE)) == written
    assert f"{os.path.relpath(FOLDER, 'profiles')}/step_10" in PAGE


def test_marks_and_limits_are_those_of_the_code():
    assert f"`{STEP}`" in PAGE
    assert f"the maximum is {MAX_PROFILED_STEPS} steps" in " ".join(PAGE.split())
    assert ON_REQUEST == 3 and "profiles the next three steps" in PAGE


@pytest.mark.slow
def test_the_flags_of_the_command_are_those_that_it_has():
    source = (ROOT / "pretrainax" / "profile.py").read_text()
    flags = set(re.findall(r"--(step|process|topology|picture)\b", PAGE))
    assert flags == set(re.findall(r'(?:DEFINE_\w+|define_path)\(\s*"(\w+)"', source))
    assert "--workdir" in COMMAND
