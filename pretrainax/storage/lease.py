"""Implements leases, which allow only one run at a time to write below a URL.

The folder `run.lease/` in the store has one object per lease; the names of the objects are increasing numbers. A run
acquires a lease by creating the object with the next number. If several runs create this object, the store lets only
one of them succeed. The holder rewrites its object every HEARTBEAT seconds, and exits if there is an object with a
higher number. The holder releases the lease by setting a flag in the object. It does not delete the object, so the
numbers only increase. A run that finds a lease that is not released watches the object. If the object does not change
for LEASE_TIMEOUT seconds of the run's own clock, the lease is free.
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
from pretrainax.storage.store import Store, print_message

HEARTBEAT = 15.0  # seconds between two heartbeats
LEASE_TIMEOUT = 90.0  # seconds without a heartbeat after which a lease is free


class Lease:
    """Context manager that holds the lease of a URL: the right to write below the URL.

    If another run acquires the lease, this process exits with code 1.

    Raises:
      RunFailed: another run holds the lease; the message contains the host, process and time of that run.
    """

    def __init__(self, store: Store, place: str):
        """Prepares the lease; `__enter__` acquires it.

        Args:
          store: the URL to write below.
          place: a string that no other running holder on this machine uses, for example the path of a folder that this
            process has locked.
        """
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
                print_message(f"{e}; its lease becomes free in {LEASE_TIMEOUT:.0f} s")

    def check(self) -> None:
        """Exits this process with code 1 if another run has acquired the lease because it found no heartbeat."""
        newest = max(self._numbers(), default=0)
        if newest > self.number and not self._over.is_set():
            print_message(f"{self.store.url} was taken over by {_who(self._read(newest))}: this run stops")
            os._exit(1)

    def _take(self) -> bool:
        """Tries to acquire the lease; returns True on success, and False if another run created the next lease first.

        Raises:
          RunFailed: another run holds the lease and still runs.
        """
        newest = max(self._numbers(), default=0)
        if newest and not self._is_free(self._read(newest)):
            self._watch(newest)
        if not self.store.create(self._name(newest + 1), self._record()):
            return False  # another run created the object first
        self.previous, self.number = newest, newest + 1
        self.store.delete(self._name(number) for number in self._numbers() if number < newest)
        return True

    def _is_free(self, record: JsonObject) -> bool:
        """Returns True if a lease is free, given its record: the JSON object that its holder wrote.

        A lease is free if its holder has released it. It is also free if the holder ran on this machine, since the last
        boot, with the same `place`: this process has locked that folder, so the holder no longer runs.
        """
        return bool(record.get("free")) or all(
            record.get(name) == self._own[name] for name in ("host", "boot", "place")
        )

    def _watch(self, number: int) -> None:
        """Waits until a lease is free: released, or without a heartbeat for LEASE_TIMEOUT seconds.

        Raises:
          RunFailed: the holder writes a heartbeat, or another run acquires a newer lease.
        """
        first = self._read(number)
        print_message(f"{self.store.url} is held by {_who(first)}: waiting {LEASE_TIMEOUT:.0f} s for a heartbeat")
        until = time.monotonic() + LEASE_TIMEOUT
        while time.monotonic() < until:
            time.sleep(min(2.0, HEARTBEAT))
            record = self._read(number)
            if record.get("free"):
                return
            if record != first or max(self._numbers(), default=0) > number:
                raise RunFailed(
                    f"{self.store.url} is in use by {_who(record)}: wait for its end, stop it, or set another --workdir"
                )
        print_message(f"no heartbeat: that run has ended; this run continues in {self.store.url}")

    def _live(self) -> None:
        while not self._over.wait(HEARTBEAT):
            try:
                self.check()
                with self._writing:
                    if not self._over.is_set():
                        self.store.write(self._name(self.number), self._record())
            except Exception:  # the thread that uploads files reports the error
                continue  # if the store does not respond, other runs cannot read heartbeats, either

    def _record(self, free: bool = False) -> bytes:
        self._beat += 1
        return json.dumps(self._own | {"beat": self._beat, "free": free}).encode()

    def _numbers(self) -> list[int]:
        names = (os.path.basename(name) for name in self.store.objects(LEASES))
        return [int(name) for name in names if name.isdecimal()]

    def _read(self, number: int) -> JsonObject:
        try:
            record = json.loads(self.store.read(self._name(number)))
        except (FileNotFoundError, ValueError):  # deleted by the next holder
            return {}
        return record if isinstance(record, dict) else {}

    @staticmethod
    def _name(number: int) -> str:
        return f"{LEASES}/{number:08d}"


def _who(record: Mapping[str, object]) -> str:
    if not record:
        return "another run"
    return f"process {record.get('process')} on {record.get('host')}, since {record.get('since')}"


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f.read().strip()
    except OSError:  # not Linux
        return ""
