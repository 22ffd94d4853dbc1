import pytest

from tests.support.made_run import made_run, run  # noqa: F401


@pytest.fixture
def one_thread():
    """Keeps torch to one thread: for matrices this small, several on a busy machine wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
