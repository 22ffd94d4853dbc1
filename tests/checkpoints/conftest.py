import shutil

import pytest

from tests.support.checkpoints import save_all


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Steps 10 and 20, made once; a test that damages them takes a `copy`."""
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    save_all(directory, [10, 20])
    return directory


@pytest.fixture
def copy(two_steps, tmp_path):
    return shutil.copytree(two_steps, tmp_path / "checkpoints")
