"""Tests that the processes of a run compare their values; test_watchdog.py and test_pods.py use real processes."""

import hashlib

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from pretrainax.config import UserError
from pretrainax.runtime.agreement import check_same


@pytest.fixture
def three(monkeypatch):
    """Makes this process the second of three; returns a function that sets the values of the other two."""

    def others(first, third):
        digest = lambda value: np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)  # noqa: E731
        gathered = lambda own: np.stack([digest(first), own, digest(third)])  # noqa: E731
        monkeypatch.setattr(multihost_utils, "process_allgather", gathered)

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    return others


def test_what_is_the_same_passes(three):
    three("hf:org/a@1", "hf:org/a@1")
    check_same("x", "hf:org/a@1", "y")


@pytest.mark.parametrize(
    ("first", "third", "named"),
    [("b", "b", "process 1 found"), ("a", "b", "process 2 found"), ("b", "c", "processes 1, 2 found")],
)
def test_all_processes_say_which_of_them_differ_from_the_first(three, first, third, named):
    three(first, third)
    with pytest.raises(UserError) as e:
        check_same("config.checkpoint.init_from", "a", "give its commit")
    assert str(e.value) == (
        f"config.checkpoint.init_from differs between hosts: {named} another value than process 0; process 1 has a: "
        "give its commit"
    )


def test_one_process_asks_nobody(monkeypatch):
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: pytest.fail("asked"))
    check_same("x", "a", "y")
