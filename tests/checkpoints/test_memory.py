"""Tests that saves leave no objects in memory, however many they are."""

import gc

import pytest

from pretrainax.checkpoints.checkpoints import Checkpoints
from tests.support.checkpoints import make_state


def lists() -> int:
    gc.collect()
    return sum(type(o) is list for o in gc.get_objects())


@pytest.mark.slow
def test_saves_leave_no_lists_behind(tmp_path):
    """Orbax would read TensorStore's metrics around each save, which leaks about 40 lists per save."""
    checkpoints, state, found = Checkpoints(str(tmp_path), keep=1), make_state(0), []
    for step in range(30):
        checkpoints.save(step, state, {})
        checkpoints.wait()
        if step in (9, 29):
            found.append(lists())
    checkpoints.close()
    assert found[1] - found[0] < 20  # one list per save would be 20
