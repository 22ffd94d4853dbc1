import shutil

import pytest

from tests.support.checkpoints import save_all


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Saves steps 10 and 20 once; tests that damage them use a `copy`."""
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    save_all(directory, [10, 20])
    return directory


@pytest.fixture
def copy(two_steps, tmp_path):
    return shutil.copytree(two_steps, tmp_path / "checkpoints")
