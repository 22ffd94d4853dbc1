"""Files and folders that appear under their name when they are complete, or never, whenever the process is killed."""

import contextlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from typing import BinaryIO

from pretrainax.files.errors import UserError

_UNFINISHED = re.compile(r".+\.tmp-(.+)-(\d{1,10})", re.DOTALL)  # as `_temporary` names it
_DAY = 86_400.0  # seconds


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Yields a file beside `path` that takes its name at the end; of one that fails nothing is left.

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
        raise UserError(f"{path} is a folder, and a file is to be written there: delete it or move it away") from e
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


@contextlib.contextmanager
def replacing_folder(path: str) -> Iterator[str]:
    """Yields a folder beside `path` that takes its name at the end; that of a process that was faster stays."""
    temporary = _temporary(path)
    shutil.rmtree(temporary, ignore_errors=True)  # of a process of this number that was killed
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
    """Deletes what killed processes had begun to write in a folder; what a living one is writing stays.

    Of this machine those are the processes that are no more; of another one, files that nobody has touched for a day.
    """
    with os.scandir(folder) as found:
        for entry in found:
            if (match := _UNFINISHED.fullmatch(entry.name)) is None:
                continue
            with contextlib.suppress(OSError):  # gone meanwhile, or not ours to delete
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
    """Writes a file, text as UTF-8; whoever reads it finds the old content or the new one."""
    with replacing(path) as f:
        f.write(content.encode() if isinstance(content, str) else content)
