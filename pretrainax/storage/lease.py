"""Implements leases, which let only one run at a time write below a URL.

The folder `run.lease/` in the store has one object per lease; the names of the objects are increasing numbers. A run
acquires a lease by creating the object with the next number. If several runs try to create the same object, the store
lets only one of them succeed. The holder rewrites its object every HEARTBEAT seconds, and exits if an object with a
higher number exists. The holder releases the lease by setting a flag in the object. It does not delete the object,
so the numbers only increase. A run that finds an unreleased lease watches its object. If the object does not
change for LEASE_TIMEOUT seconds by the clock of the watching run, the lease is free.
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
    """Context manager that holds a URL's lease, i.e. the right to write below that URL.

    If another run acquires the lease, this process exits with code 1.

    Raises:
      RunFailed: another run holds the lease; the message contains the host, process id and start time of that run.
    """

    def __init__(self, store: Store, place: str):
        """Prepares the lease; `__enter__` acquires it.

        Args:
          store: the URL to write below.
          place: a string that identifies the holder among this machine's running processes, for example the path of a
            folder that this process has locked.
        """
        self.store = store
        self.number = self.previous = 0
        self._holder = {"host": socket.gethostname(), "process": os.getpid(), "place": place, "boot": _boot_id()}
        self._holder["since"] = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._stopped, self._write_lock = threading.Event(), threading.Lock()
        self._num_heartbeats = 0

    def __enter__(self) -> "Lease":
        while not self._try_acquire():
            pass
        self._thread = threading.Thread(target=self._send_heartbeats, name="lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stopped.set()
        with self._write_lock:
            try:
                self.store.write(self._object_name(self.number), self._new_record(free=True))
            except UserError as e:
                print_message(f"{e}; its lease becomes free in {LEASE_TIMEOUT:.0f} s")

    def check(self) -> None:
        """Exits with code 1 if another run, having seen no heartbeat, has acquired a newer lease."""
        newest = max(self._lease_numbers(), default=0)
        if newest > self.number and not self._stopped.is_set():
            print_message(f"{self.store.url} was taken over by {_holder_text(self._read(newest))}: this run stops")
            os._exit(1)

    def _try_acquire(self) -> bool:
        """Tries once to acquire the lease; returns False if another run created the next lease object first.

        Raises:
          RunFailed: another run holds the lease and is still running.
        """
        newest = max(self._lease_numbers(), default=0)
        if newest and not self._is_free(self._read(newest)):
            self._wait_until_free(newest)
        if not self.store.create(self._object_name(newest + 1), self._new_record()):
            return False  # another run created the object first
        self.previous, self.number = newest, newest + 1
        self.store.delete(self._object_name(number) for number in self._lease_numbers() if number < newest)
        return True

    def _is_free(self, record: JsonObject) -> bool:
        """Returns True if a lease is free, given its record (the JSON object that its holder wrote).

        A lease is free if its holder has released it. It is also free if its holder ran on this machine since the last
        boot with the same `place`: because this process has locked that folder, the holder is no longer running.
        """
        return bool(record.get("free")) or all(
            record.get(name) == self._holder[name] for name in ("host", "boot", "place")
        )

    def _wait_until_free(self, number: int) -> None:
        """Waits until lease `number` is free, i.e. released, or without a heartbeat for LEASE_TIMEOUT seconds.

        Raises:
          RunFailed: the holder sends a heartbeat, or another run acquires a newer lease.
        """
        first = self._read(number)
        print_message(
            f"{self.store.url} is held by {_holder_text(first)}: waiting {LEASE_TIMEOUT:.0f} s for a heartbeat"
        )
        deadline = time.monotonic() + LEASE_TIMEOUT
        while time.monotonic() < deadline:
            time.sleep(min(2.0, HEARTBEAT))
            record = self._read(number)
            if record.get("free"):
                return
            if record != first or max(self._lease_numbers(), default=0) > number:
                raise RunFailed(
                    f"{self.store.url} is in use by {_holder_text(record)}: wait for its end, stop it, or set another "
                    "--workdir"
                )
        print_message(f"no heartbeat: that run has ended; this run continues in {self.store.url}")

    def _send_heartbeats(self) -> None:
        while not self._stopped.wait(HEARTBEAT):
            try:
                self.check()
                with self._write_lock:
                    if not self._stopped.is_set():
                        self.store.write(self._object_name(self.number), self._new_record())
            except Exception:  # the upload thread reports the error
                continue  # while the store does not respond, other runs cannot read heartbeats either

    def _new_record(self, free: bool = False) -> bytes:
        self._num_heartbeats += 1
        return json.dumps(self._holder | {"beat": self._num_heartbeats, "free": free}).encode()

    def _lease_numbers(self) -> list[int]:
        names = (os.path.basename(name) for name in self.store.objects(LEASES))
        return [int(name) for name in names if name.isdecimal()]

    def _read(self, number: int) -> JsonObject:
        try:
            record = json.loads(self.store.read(self._object_name(number)))
        except (FileNotFoundError, ValueError):  # the next holder deleted the object
            return {}
        return record if isinstance(record, dict) else {}

    @staticmethod
    def _object_name(number: int) -> str:
        return f"{LEASES}/{number:08d}"


def _holder_text(record: Mapping[str, object]) -> str:
    if not record:
        return "another run"
    return f"process {record.get('process')} on {record.get('host')}, since {record.get('since')}"


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f.read().strip()
    except OSError:  # not Linux
        return ""
