"""Processes that share out tasks need memory that they can share."""

import errno
import multiprocessing.synchronize
import os

import pytest

from pretrainax.config import UserError
from pretrainax.data.pipeline import iterate
from pretrainax.data.preparation.workers import Workers


@pytest.fixture(params=[errno.EROFS, errno.ENOENT, errno.ENOSYS])
def no_shared_memory(monkeypatch, request):
    def fail(*_, **__):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", fail)


def test_loader_workers_without_shared_memory_are_one_line(no_shared_memory):
    with pytest.raises(UserError, match="config.data.workers is 2, .*set config.data.workers=0, or mount /dev/shm"):
        next(iterate([{}, {}], 0, 2, workers=2))


def test_tokenizing_without_shared_memory_is_one_line(no_shared_memory):
    with Workers(2) as workers:
        with pytest.raises(UserError, match="config.data.prepare_workers is 2, .*set config.data.prepare_workers=1"):
            list(workers.run(int, [("1",), ("2",)]))
        with pytest.raises(UserError, match="set config.data.prepare_workers=1"):
            workers.apart(int, "1")
    with Workers(1) as workers:
        assert list(workers.run(int, [("1",), ("2",)])) == [1, 2]
