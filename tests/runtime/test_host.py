"""The process before the first array: where it listens for the others of its run, and how many files it may open."""

import resource

import pytest

from pretrainax.config import UserError
from pretrainax.runtime.host import _bind_address, allow_files


@pytest.fixture
def limits(monkeypatch):
    """Soft and hard limit on open files, as `limits(24, 1024)` sets them, and as they are left."""
    now = {}
    monkeypatch.setattr(resource, "getrlimit", lambda which: now["both"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: now.update(both=both))
    return lambda *both: now.update(both=both) or now


@pytest.mark.parametrize(
    "before, after",
    [
        ((24, 1024), (1024, 1024)),
        ((1024, resource.RLIM_INFINITY), (65536, resource.RLIM_INFINITY)),
        ((1 << 20, 1 << 20), (1 << 20, 1 << 20)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)),
    ],
)
def test_as_many_files_as_the_system_lets_one_may_be_open(before, after, limits):
    now = limits(*before)
    allow_files()
    assert now["both"] == after


def test_too_few_files_are_one_line(limits):
    limits(24, 24)
    with pytest.raises(UserError, match="24 files may be open at a time, and a run needs 128: raise `ulimit -n`"):
        allow_files()


@pytest.mark.parametrize("address", ["127.0.0.1:1234", "127.0.1.1:1", "localhost:1234", "[::1]:1234"])
def test_processes_of_one_machine_listen_to_nothing_else(address):
    assert _bind_address(address) == address


@pytest.mark.parametrize("address", ["host17:1234", "10.0.0.1:1234", "[2001:db8::1]:1234", ""])
def test_processes_of_several_machines_listen_as_jax_has_it(address):
    assert _bind_address(address) is None
