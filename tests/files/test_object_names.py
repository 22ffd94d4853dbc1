"""Tests which listed names become paths; no name may lead out of its folder."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import UserError
from pretrainax.files.object_names import name_problem, path_below


@pytest.mark.parametrize("name", ["a", "a/b", "…", "a..b/..c", ".hidden", "x" * 255, "a b/c\td", "a\\..\\b"])
def test_honest_names_are_below_the_folder(name):
    assert path_below("/base/of", name) == f"/base/of/{name}"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty part"),
        ("/etc/passwd", "starts with a slash"),
        ("../x", "'..'"),
        ("a/../../x", "'..'"),
        ("a/..", "'..'"),
        ("./x", "'.'"),
        ("a//b", "empty part"),
        ("a/", "empty part"),
        ("a\0b", "zero byte"),
        ("\udcff", "not UTF-8"),
        ("x" * 256, "256 bytes"),
        ("é" * 128, "256 bytes"),
        ("/".join(["x" * 200] * 21), "at most 4,095"),
    ],
)
def test_other_names_are_refused_in_a_line(name, why):
    with pytest.raises(UserError, match=why) as caught:
        path_below("/root", name)
    assert "\n" not in str(caught.value) and "\0" not in str(caught.value)


@given(st.lists(st.sampled_from(["..", ".", "", "a", "b c", "\0", "..."]), max_size=6).map("/".join))
def test_a_path_is_refused_or_below_the_folder(name):
    if not name_problem(name):
        path = path_below("/base/of", name)
        assert os.path.normpath(path) == path and path.startswith("/base/of/")
