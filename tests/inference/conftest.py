import pytest

from tests.support.made_run import made_run, run  # noqa: F401


@pytest.fixture
def one_thread():
    """Limits torch to one thread: with matrices this small, several threads on a busy machine wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
