"""Locks a workdir so that only one run at a time uses it, whether on one machine or several.

The file `run.lock` exists while a run uses the workdir. On one machine, flock(2) prevents a second run; the system
releases this lock when the process dies. Some shared file systems do not pass flock on to other machines. Therefore the
file also names the holder (the process that has the lock), and the holder sends heartbeats: it changes the file every
BEAT seconds. A process that finds a holder on another machine watches the file, timing it with its own
clock. A holder whose file does not change for SILENCE seconds counts as dead.
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
    """A context manager that creates a workdir and locks it.

    If a process on another machine takes over the lock because it saw no heartbeat, this process exits with code 1.

    Raises:
      RunFailed: another process, which the message names, holds the lock.
      UserError: the workdir cannot be created.
    """

    def __init__(self, workdir: str):
        self.workdir, self.path = workdir, os.path.join(workdir, "run.lock")
        self._stop_event = threading.Event()
        self._heartbeats = itertools.count(1)
        self._own_record = {
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
                if self._take_lock():
                    self._write()
                    self._thread = threading.Thread(target=self._send_heartbeats, name="workdir lock", daemon=True)
                    self._thread.start()
                    undo.pop_all()
                    return self

    def __exit__(self, *_) -> None:
        self._stop_event.set()
        self._thread.join(BEAT)  # with a timeout: a disk may hang
        with contextlib.suppress(OSError):
            if self._is_own_record(_holder(self._read())):
                os.remove(self.path)
        os.close(self._descriptor)
        if self._created:
            with contextlib.suppress(OSError):  # the folder is not empty
                os.rmdir(self.workdir)

    def _take_lock(self) -> bool:
        """Takes the lock, waiting first if a holder on another machine may be dead; returns True if it was acquired.

        Returns False if `run.lock` was removed in the meantime, so that the caller must retry. Raises RunFailed if the
        holder is alive.
        """
        try:
            is_free: Optional[bool] = True
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        except OSError:  # the file system has no locks
            is_free = None
        record = os.pread(self._descriptor, _BYTES, 0)
        holder = _holder(record)
        is_same_machine = holder.get("machine") == self._own_record["machine"]
        if is_free is False and (is_same_machine or not holder):
            self._raise_in_use(holder)
        if holder and not (is_free and is_same_machine):
            self._watch(record)
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _watch(self, record: bytes) -> None:
        """Waits until the holder removes the file or is silent for SILENCE seconds; raises RunFailed if it is alive."""
        _print(
            f"--workdir={self.workdir} is held by {_describe(_holder(record))}: waiting {SILENCE:.0f} s for a heartbeat"
        )
        deadline = time.monotonic() + SILENCE
        while time.monotonic() < deadline:
            time.sleep(min(1.0, BEAT))
            current = self._read()
            if not current:
                return
            if current != record:
                self._raise_in_use(_holder(current))
        _print(f"no heartbeat: that run has ended; this run continues in --workdir={self.workdir}")

    def _raise_in_use(self, holder: JsonObject) -> NoReturn:
        raise RunFailed(
            f"--workdir={self.workdir} is in use by {_describe(holder)}: "
            "wait for its end, stop it, or set another --workdir"
        )

    # --- the thread of the holder ------------------------------------------------------------------------------------

    def _send_heartbeats(self) -> None:
        while not self._stop_event.wait(BEAT):
            with contextlib.suppress(OSError):  # a full disk or an unreachable share may recover
                holder = _holder(self._read())
                if holder and not self._is_own_record(holder):
                    _print(f"--workdir={self.workdir} was taken over by {_describe(holder)}: this run stops")
                    os._exit(1)
                self._write()

    def _write(self) -> None:
        record = json.dumps(self._own_record | {"beat": next(self._heartbeats)}).encode()
        os.pwrite(self._descriptor, record.ljust(_BYTES), 0)
        os.fsync(self._descriptor)  # other machines may see the record only after this

    def _is_own_record(self, holder: JsonObject) -> bool:
        return holder.items() >= self._own_record.items()

    def _read(self) -> bytes:
        """Reads the current content of `run.lock`; returns b"" if the file does not exist.

        Reopens the file, because NFS caches the content of an open file.
        """
        try:
            with open(self.path, "rb") as f:
                return f.read(_BYTES)
        except FileNotFoundError:
            return b""


def _holder(record: bytes) -> JsonObject:
    """Parses the content of `run.lock`, which describes the lock's holder; returns {} if it is not valid."""
    try:
        holder = json.loads(record)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _describe(holder: JsonObject) -> str:
    if not holder:
        return "another process"
    process, user, host, since = (holder.get(name, "?") for name in ("process", "user", "host", "since"))
    return f"process {process} of {user} on {host}, since {since}"


def _machine() -> str:
    """Returns an identifier of this machine that is valid until its next boot.

    The host name does not suffice, because containers on a machine have different host names but share its file locks.
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


def _print(line: str) -> None:
    print(f"pretrainax: {line}", file=sys.stderr, flush=True)
