"""Opens the cache of tokenizers and corpora, turning its file system errors into UserErrors."""

import contextlib
import errno
import os
from collections.abc import Iterator

from pretrainax.config import DataConfig, UserError
from pretrainax.data.preparation.workers import Workers
from pretrainax.storage.places import lazy_folder

FORMAT = 2  # version of the file formats in the cache; files of other versions are ignored


@contextlib.contextmanager
def open_cache(data: DataConfig) -> Iterator[tuple[str, Workers]]:
    """Opens the cache as a context: yields its absolute path, and a worker pool that ends when the context exits."""
    with lazy_folder(data.cache_dir) as folder:
        cache = os.path.abspath(os.path.expanduser(folder))
        with _user_errors(cache), Workers(data.prepare_workers) as workers:
            yield cache, workers


@contextlib.contextmanager
def _user_errors(cache: str) -> Iterator[None]:
    """Turns an OSError in the context (a full disk, a read-only cache, an unreadable file) into a UserError."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space left in {cache}; finished files are saved. Free some space and run again, "
                "or set config.data.cache_dir to another disk"
            ) from e
        if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST):
            if str(e.filename).startswith(cache) or cache.startswith(str(e.filename)):
                raise UserError(
                    f"cannot write to {cache} ({e.strerror}); set config.data.cache_dir to a writable folder"
                ) from e
            raise UserError(f"cannot read {e.filename} ({e.strerror}); see config.data.source") from e
        raise
