"""Lets one run at a time write below a URL: a lease, which its holder renews, and which others take when it is silent.

`run.lease/` has an object a lease, numbered. To take the next number is to make an object that is not there, which a
store lets one of all that try do. The holder writes its own anew every BEAT seconds, and ends itself once it sees a
higher number; it frees the lease by saying so in it, so that numbers only rise. Who finds a lease held watches it by
his own clock: one that stands still for SILENCE seconds is free.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Mapping

from pretrainax.files.errors import RunFailed, UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.storage.run_objects import LEASES
from pretrainax.storage.store import Store, say

BEAT = 15.0  # seconds between two signs of life
SILENCE = 90.0  # seconds


class Lease:
    """Holds the right to write below a URL; a context manager. A holder that has lost it ends its process: exit code 1.

    Raises:
      RunFailed: another run holds it; says which.
    """

    def __init__(self, store: Store, place: str):
        """place: what no other holder that is alive shares, as a folder of this machine under a lock of it."""
        self.store = store
        self.number = self.previous = 0
        self._own = {"host": socket.gethostname(), "process": os.getpid(), "place": place, "boot": _boot()}
        self._own["since"] = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._over, self._writing = threading.Event(), threading.Lock()
        self._beat = 0

    def __enter__(self) -> "Lease":
        while not self._take():
            pass
        self._thread = threading.Thread(target=self._live, name="lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        with self._writing:
            try:
                self.store.write(self._name(self.number), self._record(free=True))
            except UserError as e:
                say(f"{e}; its lease is free {SILENCE:.0f} s from now")

    def check(self) -> None:
        """Ends this process where another one has taken the lease, because nothing was heard of this one."""
        newest = max(self._numbers(), default=0)
        if newest > self.number and not self._over.is_set():
            say(f"{self.store.url} was taken over by {_who(self._read(newest))}: this run ends here")
            os._exit(1)

    def _take(self) -> bool:
        """Returns True if the lease is ours; raises RunFailed where another run is alive."""
        newest = max(self._numbers(), default=0)
        if newest and not self._is_free(self._read(newest)):
            self._watch(newest)
        if not self.store.create(self._name(newest + 1), self._record()):
            return False  # another one was faster: he is alive
        self.previous, self.number = newest, newest + 1
        self.store.delete(self._name(number) for number in self._numbers() if number < newest)
        return True

    def _is_free(self, found: JsonObject) -> bool:
        """Returns True if a holder is gone: it says so, or it was here, where there is no other under our lock."""
        return bool(found.get("free")) or all(found.get(name) == self._own[name] for name in ("host", "boot", "place"))

    def _watch(self, number: int) -> None:
        """Returns when the holder of a lease has freed it, or has been silent for long enough."""
        first = self._read(number)
        say(f"{self.store.url} is held by {_who(first)}: waiting {SILENCE:.0f} s for a sign of life")
        until = time.monotonic() + SILENCE
        while time.monotonic() < until:
            time.sleep(min(2.0, BEAT))
            found = self._read(number)
            if found.get("free"):
                return
            if found != first or max(self._numbers(), default=0) > number:
                raise RunFailed(
                    f"{self.store.url} is in use by {_who(found)}: wait for its end, stop it, or take another --workdir"
                )
        say(f"no sign of life: it is gone, and this run goes on in {self.store.url}")

    def _live(self) -> None:
        while not self._over.wait(BEAT):
            try:
                self.check()
                with self._writing:
                    if not self._over.is_set():
                        self.store.write(self._name(self.number), self._record())
            except Exception:  # the sender's thread tells what is wrong
                continue  # others see this lease stand still as we see the store

    def _record(self, free: bool = False) -> bytes:
        self._beat += 1
        return json.dumps(self._own | {"beat": self._beat, "free": free}).encode()

    def _numbers(self) -> list[int]:
        names = (os.path.basename(name) for name in self.store.objects(LEASES))
        return [int(name) for name in names if name.isdecimal()]

    def _read(self, number: int) -> JsonObject:
        try:
            found = json.loads(self.store.read(self._name(number)))
        except (FileNotFoundError, ValueError):  # deleted by who took the next one
            return {}
        return found if isinstance(found, dict) else {}

    @staticmethod
    def _name(number: int) -> str:
        return f"{LEASES}/{number:08d}"


def _who(found: Mapping[str, object]) -> str:
    if not found:
        return "another run"
    return f"process {found.get('process')} on {found.get('host')}, since {found.get('since')}"


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f.read().strip()
    except OSError:  # not Linux
        return ""
