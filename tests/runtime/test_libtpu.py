"""Flags of libtpu are there before it is loaded, and a user's own are kept."""

import os

import pytest

from pretrainax.runtime.libtpu import overlap_gathers


@pytest.fixture
def told(monkeypatch):
    """What libtpu would be told, of a variable that is set or not."""

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
