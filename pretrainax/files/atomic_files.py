"""Writes files and folders atomically: they get their final name only when they are complete."""

import contextlib
import errno
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from typing import BinaryIO

from pretrainax.files.errors import UserError

_UNFINISHED = re.compile(r".+\.tmp-(.+)-(\d{1,10})", re.DOTALL)  # names from `_temporary_path`: host name and PID
_DAY = 86_400.0  # seconds
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, no quota, or a file larger than its limit


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Yields a temporary binary file; renames the file to `path` on exit, or removes it after an exception.

    The temporary name contains the host name and the PID, so several processes can write the same `path` at once.

    Raises:
      UserError: `path` is a folder.
      OSError: the file cannot be written. The error of a full disk contains `path` and the number of written bytes.
    """
    temporary = _temporary_path(path)
    try:
        with open(temporary, "wb") as f:
            yield f
        os.replace(temporary, path)
    except BaseException as e:
        size = os.path.getsize(temporary) if os.path.exists(temporary) else 0
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        if isinstance(e, IsADirectoryError):
            raise UserError(f"{path} is a folder where a file must be written: delete or move it") from e
        if isinstance(e, OSError) and e.errno in FULL_DISK:
            raise OSError(e.errno, f"{e.strerror} after {size:,} bytes", path) from e
        raise


@contextlib.contextmanager
def replacing_folder(path: str) -> Iterator[str]:
    """Yields a temporary folder; renames the folder to `path` on exit, or removes it after an exception.

    If another process has created the folder `path` in the meantime, keeps that folder and removes the temporary
    folder.
    """
    temporary = _temporary_path(path)
    shutil.rmtree(temporary, ignore_errors=True)  # from a killed process with the same PID
    try:
        os.makedirs(temporary)
        yield temporary
        try:
            os.rename(temporary, path)
        except OSError:
            if not os.path.isdir(path):
                raise
            shutil.rmtree(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _temporary_path(path: str) -> str:
    return f"{path}.tmp-{socket.gethostname()}-{os.getpid()}"


def remove_leftovers(folder: str) -> None:
    """Deletes the temporary files and folders that killed processes left in a folder.

    Keeps temporary files whose process is still running on this machine; the PID is part of the file name. Deletes
    temporary files from other machines if they have not changed for a day.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if (match := _UNFINISHED.fullmatch(entry.name)) is None:
                continue
            with contextlib.suppress(OSError):  # deleted already, or this user may not delete it
                is_local, pid = match[1] == socket.gethostname(), int(match[2])
                if pid == os.getpid() or not _is_alive(pid) if is_local else time.time() - entry.stat().st_mtime > _DAY:
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.remove(entry.path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def write_atomically(path: str, content: str | bytes) -> None:
    """Writes bytes, or a string as UTF-8, to a file; readers see either all of the old or all of the new content."""
    with replacing(path) as f:
        f.write(content.encode() if isinstance(content, str) else content)
