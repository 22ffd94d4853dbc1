"""Atomic writes: files and folders appear under their name only when they are complete."""

import contextlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from typing import BinaryIO

from pretrainax.files.errors import UserError

_UNFINISHED = re.compile(r".+\.tmp-(.+)-(\d{1,10})", re.DOTALL)  # names from `_temporary`
_DAY = 86_400.0  # seconds


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Yields a temporary file that is renamed to `path` at the end, or removed after an exception.

    The name of the file names the machine and the process: several may write the same `path` at once.
    """
    temporary = _temporary(path)
    try:
        with open(temporary, "wb") as f:
            yield f
        os.replace(temporary, path)
    except IsADirectoryError as e:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise UserError(f"{path} is a folder where a file must be written: delete or move it") from e
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


@contextlib.contextmanager
def replacing_folder(path: str) -> Iterator[str]:
    """Yields a temporary folder that is renamed to `path` at the end; an existing folder of a faster process stays."""
    temporary = _temporary(path)
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process with the same PID
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


def _temporary(path: str) -> str:
    return f"{path}.tmp-{socket.gethostname()}-{os.getpid()}"


def remove_leftovers(folder: str) -> None:
    """Deletes unfinished writes of killed processes in a folder, not those of running processes.

    A process of this machine is checked by its PID. Files of other machines count as unfinished after a day without
    a change.
    """
    with os.scandir(folder) as found:
        for entry in found:
            if (match := _UNFINISHED.fullmatch(entry.name)) is None:
                continue
            with contextlib.suppress(OSError):  # already gone, or not ours to delete
                is_here, pid = match[1] == socket.gethostname(), int(match[2])
                if pid == os.getpid() or not _is_alive(pid) if is_here else time.time() - entry.stat().st_mtime > _DAY:
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
    """Writes a file, text as UTF-8; readers see either the old or the new content."""
    with replacing(path) as f:
        f.write(content.encode() if isinstance(content, str) else content)
