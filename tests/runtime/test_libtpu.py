"""Tests that libtpu's flags are set before it is loaded, and that a user's flags are kept."""

import importlib.util
import mmap
import os
import pathlib

import pytest

from pretrainax.runtime.libtpu import _FLAGS, overlap_gathers


@pytest.fixture
def told(monkeypatch):
    """Returns a function from the user's value of the variable (None: not set) to the flags that libtpu gets."""

    def of(value):
        monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
        if value is not None:
            monkeypatch.setenv("LIBTPU_INIT_ARGS", value)
        overlap_gathers()
        return os.environ["LIBTPU_INIT_ARGS"]

    return of


def test_libtpu_is_told_to_gather_while_it_multiplies(told):
    flags = told(None).split()
    assert "--xla_enable_async_all_gather=true" in flags
    assert all(flag.startswith("--xla") and flag.endswith("=true") for flag in flags)


@pytest.mark.parametrize("own", ["", "--xla_tpu_scoped_vmem_limit_kib=98304"])
def test_what_a_user_tells_libtpu_is_kept(told, own):
    assert told(own) == own


@pytest.mark.slow
def test_the_libtpu_that_is_installed_knows_the_flags():
    """Tests the flags, because a libtpu that does not know one of them would end every run at its first array."""
    found = importlib.util.find_spec("libtpu")
    if found is None:
        pytest.skip("libtpu is not installed (extra tpu)")
    with open(pathlib.Path(found.origin).with_name("libtpu.so"), "rb") as file:
        library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        names = [flag.removeprefix("--").partition("=")[0] for flag in _FLAGS]
        assert [name for name in names if library.find(b"\0" + name.encode() + b"\0") < 0] == []
        assert library.find(b"\0xla_tpu_no_such_flag\0") < 0
