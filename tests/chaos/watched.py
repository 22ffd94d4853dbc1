"""Records every file that a process changes, simulates disk failures, and shortens waits of minutes to seconds.

    python -m tests.chaos.watched MODULE ARGUMENTS…

runs a command of the package with these changes. The environment variable WATCHED has the allowed folders, and the log
file for writes outside them.
"""

import builtins
import contextlib
import json
import os
import runpy
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Optional

from pretrainax.storage import lease, places, store

ENVIRONMENT = "WATCHED"
# Python audit events that change a file, with the argument positions of paths. _FOLDERS has the argument positions of
# open folders to which these paths are relative.
_WRITING = {
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.utime": (0,),
}
_FOLDERS = {("os.mkdir", 0): 2, ("os.rename", 0): 2, ("os.rename", 1): 3, ("os.remove", 0): 1, ("os.rmdir", 0): 1}
_FOLDERS |= {("os.link", 1): 3, ("os.symlink", 1): 2, ("os.chmod", 0): 2, ("os.utime", 0): 3}


class Watch:
    """Records each path outside `roots` that this process writes to while `listens` is True."""

    def __init__(self, log: Optional[str] = None):
        """log: a file that receives the paths too, one per line."""
        self.roots: tuple[str, ...] = ()
        self.listens = False
        self.outside: list[str] = []
        self._log = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple) -> None:
        if not self.listens or event not in _WRITING and event != "open":
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        for place in _WRITING.get(event, (0,)):
            path, folder = args[place], _FOLDERS.get((event, place))
            if not isinstance(path, str | bytes) or os.fsdecode(path).startswith(("/dev/", "/proc/")) or not path:
                continue
            path = os.fsdecode(path)
            if folder is not None and isinstance(args[folder], int) and args[folder] >= 0:
                path = os.path.join(os.readlink(f"/proc/self/fd/{args[folder]}"), path)
            real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            if not any(real == root or real.startswith(root + os.sep) for root in self.roots):
                self.outside.append(f"{event} {real}")
                if self._log is not None:
                    os.write(self._log, f"{event} {real!r}\n".encode())


class FaultyDisk:
    """Calls `fault` with each path in `folder` before a change; `fault` raises the error of the disk."""

    def __init__(self, folder: str):
        self.folder = folder
        self.fault: Callable[[str], None] = lambda path: None
        self._own = threading.local()

    @contextlib.contextmanager
    def healthy(self) -> Iterator[None]:
        """Disables faults in this thread, for parts of a run that are not under test."""
        self._own.healthy = True
        try:
            yield
        finally:
            self._own.healthy = False

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """Patches all Python functions that change files by path."""
        names = [(os, name) for name in ("replace", "rename", "link", "makedirs", "remove")] + [(builtins, "open")]
        originals = [(module, name, getattr(module, name)) for module, name in names]
        for module, name, original in originals:
            setattr(module, name, self._asked(original))
        try:
            yield
        finally:
            for module, name, original in originals:
                setattr(module, name, original)

    def _asked(self, original: Callable) -> Callable:
        def call(*args, **kwargs):
            reads = original is _open and not set("wax+") & set(str(kwargs.get("mode", args[1] if args[1:] else "r")))
            path = str(args[-1] if original is not _open and len(args) == 2 else args[0])
            if path.startswith(self.folder) and not reads and not getattr(self._own, "healthy", False):
                self.fault(path)
            return original(*args, **kwargs)

        return call


_open = builtins.open


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Shortens the waits of stores, and of gcsfs, from minutes to seconds."""
    import asyncio

    import gcsfs.core
    import gcsfs.retry

    soon = types.SimpleNamespace(**vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 50)})
    short = {
        (lease, "HEARTBEAT"): 0.5,
        (lease, "LEASE_TIMEOUT"): 4.0,
        (store, "PATIENCE"): 3.0,
        (store, "_FIRST_PAUSE"): 0.05,
        (places, "UPLOAD_PERIOD"): 0.1,
        (places, "WARNING_PERIOD"): 1.0,
        (gcsfs.retry, "asyncio"): soon,
    }
    os.environ["AWS_MAX_ATTEMPTS"] = "1"  # botocore's attempts within each attempt of s3fs
    before = {(module, name): getattr(module, name) for module, name in short}
    for (module, name), value in short.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


if __name__ == "__main__":
    given = json.loads(os.environ[ENVIRONMENT])
    module, sys.argv = sys.argv[1], sys.argv[1:]
    watch = Watch(given["log"])
    with hurried():
        watch.roots, watch.listens = tuple(given["roots"]), True
        runpy.run_module(module, run_name="__main__", alter_sys=True)
