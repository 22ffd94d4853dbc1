"""The process before the first array: where it listens for the others of its run."""

import pytest

from pretrainax.runtime.host import _bind_address


@pytest.mark.parametrize("address", ["127.0.0.1:1234", "127.0.1.1:1", "localhost:1234", "[::1]:1234"])
def test_processes_of_one_machine_listen_to_nothing_else(address):
    assert _bind_address(address) == address


@pytest.mark.parametrize("address", ["host17:1234", "10.0.0.1:1234", "[2001:db8::1]:1234", ""])
def test_processes_of_several_machines_listen_as_jax_has_it(address):
    assert _bind_address(address) is None
