"""Locks a workdir, so that only one run at a time uses it, on one machine or on several machines.

The file `run.lock` exists while a run uses the workdir. On one machine, flock(2) prevents a second run; the system
releases this lock when the process dies. Some shared file systems do not pass flock on to other machines. Therefore the
file also names the holder (the process that has the lock), and the holder changes the file every BEAT seconds. A
process that finds a holder on another machine watches the file and measures the time with its own clock. A holder whose
file does not change for SILENCE seconds counts as dead.
"""

import contextlib
import fcntl
import getpass
import itertools
import json
import os
import socket
import sys
import threading
import time
from typing import NoReturn, Optional

from pretrainax.config import RunFailed, UserError
from pretrainax.files.json_files import JsonObject

BEAT = 5.0  # seconds between two heartbeats
SILENCE = 90.0  # seconds; NFS and mounted buckets may show a change 60 s late
_BYTES = 1024  # constant size of the file, so that no reader gets parts of two records


class WorkdirLock:
    """A context manager that creates and locks a workdir.

    If a process on another machine takes over the lock because it saw no heartbeat, this process ends itself with exit
    code 1.

    Raises:
      RunFailed: another process holds the lock. The message names this process.
      UserError: the workdir cannot be created.
    """

    def __init__(self, workdir: str):
        self.workdir, self.path = workdir, os.path.join(workdir, "run.lock")
        self._over = threading.Event()
        self._beats = itertools.count(1)
        self._own = {
            "machine": _machine(),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "user": _user(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }

    def __enter__(self) -> "WorkdirLock":
        self._created = not os.path.isdir(self.workdir)
        try:
            os.makedirs(self.workdir, exist_ok=True)
        except OSError as e:
            raise UserError(f"--workdir={self.workdir} cannot be created: {e.strerror}; set another folder") from e
        while True:
            with contextlib.ExitStack() as undo:
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
                undo.callback(os.close, self._descriptor)
                if self._take():
                    self._write()
                    self._thread = threading.Thread(target=self._live, name="workdir lock", daemon=True)
                    self._thread.start()
                    undo.pop_all()
                    return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join(BEAT)  # with a timeout: a disk may hang
        with contextlib.suppress(OSError):
            if self._is_own(_holder(self._read())):
                os.remove(self.path)
        os.close(self._descriptor)
        if self._created:
            with contextlib.suppress(OSError):  # the folder is not empty
                os.rmdir(self.workdir)

    def _take(self) -> bool:
        """Returns True if this process now has the lock.

        Returns False if `run.lock` was removed in the meantime, so that the caller must retry.
        """
        try:
            free: Optional[bool] = True
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:  # the file system has no locks
            free = None
        record = os.pread(self._descriptor, _BYTES, 0)
        holder = _holder(record)
        is_here = holder.get("machine") == self._own["machine"]
        if free is False and (is_here or not holder):
            self._refuse(holder)
        if holder and not (free and is_here):
            self._watch(record)
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _watch(self, record: bytes) -> None:
        """Waits until the holder removes the file or sends no heartbeat for SILENCE seconds."""
        _say(f"--workdir={self.workdir} is held by {_name(_holder(record))}: waiting {SILENCE:.0f} s for a heartbeat")
        until = time.monotonic() + SILENCE
        while time.monotonic() < until:
            time.sleep(min(1.0, BEAT))
            current = self._read()
            if not current:
                return
            if current != record:
                self._refuse(_holder(current))
        _say(f"no heartbeat: that run has ended; this run continues in --workdir={self.workdir}")

    def _refuse(self, holder: JsonObject) -> NoReturn:
        raise RunFailed(
            f"--workdir={self.workdir} is in use by {_name(holder)}: "
            "wait for its end, stop it, or set another --workdir"
        )

    # --- the thread of the holder ------------------------------------------------------------------------------------

    def _live(self) -> None:
        while not self._over.wait(BEAT):
            with contextlib.suppress(OSError):  # a full disk or an unreachable share may recover
                holder = _holder(self._read())
                if holder and not self._is_own(holder):
                    _say(f"--workdir={self.workdir} was taken over by {_name(holder)}: this run stops")
                    os._exit(1)
                self._write()

    def _write(self) -> None:
        record = json.dumps(self._own | {"beat": next(self._beats)}).encode()
        os.pwrite(self._descriptor, record.ljust(_BYTES), 0)
        os.fsync(self._descriptor)  # other machines may see the record only after this

    def _is_own(self, holder: JsonObject) -> bool:
        return holder.items() >= self._own.items()

    def _read(self) -> bytes:
        """Returns the current content of `run.lock`; b"" without the file.

        Opens the file again, because NFS caches the content of an open file.
        """
        try:
            with open(self.path, "rb") as f:
                return f.read(_BYTES)
        except FileNotFoundError:
            return b""


def _holder(record: bytes) -> JsonObject:
    """Returns the holder described by the content of `run.lock`, or {} if the content is not valid."""
    try:
        holder = json.loads(record)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _name(holder: JsonObject) -> str:
    if not holder:
        return "another process"
    process, user, host, since = (holder.get(name, "?") for name in ("process", "user", "host", "since"))
    return f"process {process} of {user} on {host}, since {since}"


def _machine() -> str:
    """Returns an identifier of this machine until its next boot.

    The host name does not suffice: the containers of a machine have different host names but share its file locks.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f.read().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user has no name
        return str(os.getuid())


def _say(line: str) -> None:
    print(f"pretrainax: {line}", file=sys.stderr, flush=True)
