"""The cache that tokenizers and corpora are kept in, opened for work; what goes wrong there is one line."""

import contextlib
import errno
import os
from collections.abc import Iterator

from pretrainax.config import DataConfig, UserError
from pretrainax.data.preparation.workers import Workers
from pretrainax.storage.places import cached

FORMAT = 2  # of the files in the cache; another number, another cache


@contextlib.contextmanager
def open_cache(data: DataConfig) -> Iterator[tuple[str, Workers]]:
    """Gives the directory of the cache, and processes for the work on it that end with the context."""
    with cached(data.cache_dir) as folder:
        cache = os.path.abspath(os.path.expanduser(folder))
        with _explained_errors(cache), Workers(data.prepare_workers) as workers:
            yield cache, workers


@contextlib.contextmanager
def _explained_errors(cache: str) -> Iterator[None]:
    """Turns a full disk, a cache that cannot be written and a file that cannot be read into one line."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space left in {cache}; what is done is kept: make room and run again, "
                "or set config.data.cache_dir to another disk"
            ) from e
        if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST):
            if str(e.filename).startswith(cache) or cache.startswith(str(e.filename)):
                raise UserError(
                    f"cannot write to {cache} ({e.strerror}); set config.data.cache_dir to a folder that can be written"
                ) from e
            raise UserError(f"cannot read {e.filename} ({e.strerror}); see config.data.source") from e
        raise
