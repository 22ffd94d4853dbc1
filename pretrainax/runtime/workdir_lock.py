"""Lets one run at a time into a workdir, by a lock that dies with its process, on one machine and between several.

The file `run.lock` is there while a run is at work. Within a machine flock(2) decides, which the system takes back the
moment a process dies. Not every file system that machines share passes it on, so the file also says who holds it, and
changes every BEAT seconds. Who finds a holder on another machine watches it by his own clock, whatever theirs say: one
that stands still for SILENCE seconds is gone.
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

BEAT = 5.0  # seconds between two signs of life
SILENCE = 90.0  # seconds; NFS and mounted buckets show a change up to 60 s late
_BYTES = 1024  # of the file, always as many: nobody reads half of one record and half of another


class WorkdirLock:
    """Holds a workdir, which it makes; a context manager.

    A holder whose lock another machine has taken over, because nothing was heard of this one, ends itself: exit code 1.

    Raises:
      RunFailed: another process holds it; says which.
      UserError: the workdir cannot be made.
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
        self._made = not os.path.isdir(self.workdir)
        try:
            os.makedirs(self.workdir, exist_ok=True)
        except OSError as e:
            raise UserError(f"--workdir={self.workdir} cannot be made a folder: {e.strerror}; take another one") from e
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
        self._thread.join(BEAT)  # no longer: a disk may hang
        with contextlib.suppress(OSError):
            if self._is_own(_holder(self._read())):
                os.remove(self.path)
        os.close(self._descriptor)
        if self._made:
            with contextlib.suppress(OSError):  # something is in it
                os.rmdir(self.workdir)

    def _take(self) -> bool:
        """Returns True if the lock is ours; where its file has been removed meanwhile there is another to take."""
        try:
            free: Optional[bool] = True
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:  # a file system without locks: nobody knows
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
        """Returns when the holder has removed the file, or has been silent for long enough."""
        _say(
            f"--workdir={self.workdir} is held by {_name(_holder(record))}: waiting {SILENCE:.0f} s for a sign of life"
        )
        until = time.monotonic() + SILENCE
        while time.monotonic() < until:
            time.sleep(min(1.0, BEAT))
            found = self._read()
            if not found:
                return
            if found != record:
                self._refuse(_holder(found))
        _say(f"no sign of life: it is gone, and this run goes on in --workdir={self.workdir}")

    def _refuse(self, holder: JsonObject) -> NoReturn:
        raise RunFailed(
            f"--workdir={self.workdir} is in use by {_name(holder)}: "
            "wait for its end, stop it, or take another --workdir"
        )

    # --- the thread of the holder ------------------------------------------------------------------------------------

    def _live(self) -> None:
        while not self._over.wait(BEAT):
            with contextlib.suppress(OSError):  # a full disk, a share that is away: perhaps it is back next time
                holder = _holder(self._read())
                if holder and not self._is_own(holder):
                    _say(f"--workdir={self.workdir} was taken over by {_name(holder)}: this run ends here")
                    os._exit(1)
                self._write()

    def _write(self) -> None:
        record = json.dumps(self._own | {"beat": next(self._beats)}).encode()
        os.pwrite(self._descriptor, record.ljust(_BYTES), 0)
        os.fsync(self._descriptor)  # until then other machines may not see it

    def _is_own(self, holder: JsonObject) -> bool:
        return holder.items() >= self._own.items()

    def _read(self) -> bytes:
        """Returns what the file holds now; opened anew, or NFS would show what it remembers."""
        try:
            with open(self.path, "rb") as f:
                return f.read(_BYTES)
        except FileNotFoundError:
            return b""


def _holder(record: bytes) -> JsonObject:
    """Returns what a holder has written of itself; nothing where it was killed before it did."""
    try:
        found = json.loads(record)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _name(holder: JsonObject) -> str:
    if not holder:
        return "another process"
    process, user, host, since = (holder.get(name, "?") for name in ("process", "user", "host", "since"))
    return f"process {process} of {user} on {host}, since {since}"


def _machine() -> str:
    """Returns what tells machines apart, between two boots: containers of one have other hosts, and the same locks."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f.read().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # one that has no name
        return str(os.getuid())


def _say(line: str) -> None:
    print(f"pretrainax: {line}", file=sys.stderr, flush=True)
