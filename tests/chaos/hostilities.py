"""The hostilities of stores, disks and second writers, before a role of a trial or during it."""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import random
import re
import threading
import time
from collections.abc import Iterable

from pretrainax.storage import run_objects
from tests.chaos.watched import FaultyDisk
from tests.support import faulty_proxy, moto_s3

_EVIL = [
    "../../../../up.txt",
    "a/../../../up.txt",
    "/abs.txt",
    "a//b.txt",
    "./a",
    "x" * 300,
    "../../.bashrc",
    "y" * 1024,
]
_ODD = [
    "a\\..\\b",
    "%2e%2e/up",
    "\x1b[31mred",
    "lock",
    "record.json",
    "complete",
    ".tmp-1-1",
    "CONFIG.JSON",
]
DISK_ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EMFILE, errno.EDQUOT)


class Place:
    """A folder of a bucket, accessed without its proxy; `count` is its name."""

    def __init__(self, scheme: str, proxy: faulty_proxy.FaultyProxy):
        self.scheme, self.proxy, self.count = scheme, proxy, 0

    @property
    def url(self) -> str:
        return f"{self.scheme}://bucket/{self.count}/run"

    def begin(self) -> None:
        """Selects a new, empty folder; creates the bucket if it is missing, and removes the proxy's faults."""
        self.count += 1
        self.proxy.mend()
        if self.scheme == "gs":
            self.proxy.gcs.buckets.add("bucket")
        elif not self._client().list_buckets()["Buckets"]:
            self._client().create_bucket(Bucket="bucket")

    def objects(self) -> dict[str, bytes]:
        """Returns all objects of the folder except leases."""
        if self.scheme == "gs":
            with self.proxy.gcs.lock:
                items = {key.partition("/")[2]: content for key, (content, _) in self.proxy.gcs.objects.items()}
            found = {key: content for key, content in items.items() if key.startswith(f"{self.count}/")}
        else:
            client, found = self._client(), {}
            with contextlib.suppress(client.exceptions.NoSuchBucket):
                for page in client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=f"{self.count}/"):
                    for item in page.get("Contents", ()):
                        with contextlib.suppress(client.exceptions.NoSuchKey):  # deleted in the meantime
                            answer = client.get_object(Bucket="bucket", Key=item["Key"])
                            found[item["Key"]] = answer["Body"].read()
        return {key: content for key, content in found.items() if run_objects.LEASES not in key}

    def put(self, name: str, content: bytes) -> None:
        """Writes an object into the run, under any name, even if it is not a valid file name."""
        key = f"{self.count}/run/{name}"
        if self.scheme == "gs":
            self.proxy.gcs.put(f"bucket/{key}", content, None)
        else:
            self._client().put_object(Bucket="bucket", Key=key, Body=content)

    def drop(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            if self.scheme == "gs":
                with self.proxy.gcs.lock:
                    self.proxy.gcs.objects.pop(f"bucket/{key}", None)
            else:
                self._client().delete_object(Bucket="bucket", Key=key)

    def delete_bucket(self) -> None:
        """Deletes the bucket and its contents."""
        if self.scheme == "gs":
            with self.proxy.gcs.lock:
                self.proxy.gcs.objects.clear()
                self.proxy.gcs.buckets.clear()
            return
        client = self._client()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket="bucket"):
            for item in page.get("Contents", ()):
                client.delete_object(Bucket="bucket", Key=item["Key"])
        client.delete_bucket(Bucket="bucket")

    def _client(self):
        return moto_s3.client(f"http://{self.proxy.upstream}")


def saved(step: int) -> dict[str, bytes]:
    """Returns the files of a checkpoint, with a valid manifest."""
    files = {
        "params/d/a": b"array %d" % step,
        "optimizer/d/b": b"moments %d" % step,
        "run.json": b'{"step": %d}' % step,
    }
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items())]
    return {f"checkpoints/{step}/{n}": c for n, c in (files | {"manifest.sha256": "".join(lines).encode()}).items()}


class Hostilities:
    """One method per hostility; `going_on` is the thread of a hostility that runs during a role."""

    def __init__(self, place: Place, disk: FaultyDisk, folder: pathlib.Path):
        """folder: contains the machine's files in machine/, and a file of another user, outside/sub/file."""
        self.place, self.disk, self.folder = place, disk, folder
        self.rng, self.going_on = random.Random(), threading.Thread()

    def end(self) -> None:
        """Ends the hostility and repairs proxy and disk."""
        self.disk.fault = lambda path: None
        self.place.proxy.mend()
        if self.going_on.ident:
            self.going_on.join()
        self.going_on = threading.Thread()

    # --- objects

    def evil_name(self) -> None:
        names = [*_EVIL, "a\0b", "line\nbreak"] if self.place.scheme == "gs" else _EVIL  # moto accepts neither
        self.place.put(self.rng.choice(names), b"evil")

    def odd_name(self) -> None:
        self.place.put(self.rng.choice(_ODD), b"odd")

    def marker(self) -> None:
        for name in self.rng.sample(["", "checkpoints/", "checkpoints/10/", "export/", "run.lease/", "empty/"], 3):
            self.place.put(name, b"")

    def object_and_folder(self) -> None:
        self.place.put(self.rng.choice(["checkpoints", "checkpoints/20", "checkpoints/20/params"]), b"both")

    def emptied(self) -> None:
        share = self.rng.choice([1.0, 0.5, 0.2])
        self.place.drop(key for key in self.place.objects() if self.rng.random() < share)

    def absence(self) -> None:
        self.place.drop([self.rng.choice(list(self.place.objects()))])

    def truncated(self) -> None:
        key, content = self.rng.choice(list(self.place.objects().items()))
        self.place.put(key.partition("/run/")[2], content[: len(content) // 2])

    def longer(self) -> None:
        key, content = self.rng.choice(list(self.place.objects().items()))
        self.place.put(key.partition("/run/")[2], content + b"more" * self.rng.choice([1, 100_000]))

    def bucket_deleted(self) -> None:
        self.place.delete_bucket()

    def lease(self) -> None:
        """Writes a damaged lease, or the lease of a dead machine."""
        content = self.rng.choice([b"", b"{", b"[]", b'{"beat": 1}', b"\xff" * 9, b'{"free": true}', b"1" * 400])
        self.place.put(f"{run_objects.LEASES}/{self.rng.choice(['00000007', '99999999', 'x', '-1', '²'])}", content)

    # --- during a role

    def race(self) -> None:
        """Imitates a live run: saves step 50 and deletes all other steps."""

        def go_on() -> None:
            for name, content in saved(50).items():
                self.place.put(name, content)
            checkpoints = [key for key in self.place.objects() if "/checkpoints/" in key]
            self.place.drop(key for key in checkpoints if "/checkpoints/50/" not in key)

        self._later(go_on)

    def taken_over(self) -> None:
        """Takes the lease, like a machine that has received no heartbeat for a long time."""
        record = json.dumps({"host": "other", "process": 1, "place": "/x", "boot": "b", "since": "now", "beat": 1})
        self._later(lambda: self.place.put(f"{run_objects.LEASES}/00000009", record.encode()))

    def _later(self, call) -> None:
        wait = self.rng.uniform(0, 0.4)

        def live() -> None:
            time.sleep(wait)
            call()

        self.going_on = threading.Thread(target=live, daemon=True)
        self.going_on.start()

    # --- responses

    def busy(self) -> None:
        self._answers([503, 429, 504, faulty_proxy.DROPPED], 0.1)

    def wrong(self) -> None:
        """Sometimes responds with 404 (missing), 412 (condition failed) or 500 (error)."""
        self._answers([404, 412, 500], self.rng.choice([0.1, 0.5]))

    def _answers(self, answers: list[int], share: float) -> None:
        rng = random.Random(self.rng.random())
        self.place.proxy.fault = lambda method: rng.choice(answers) if rng.random() < share else None

    def refusing(self) -> None:
        after, status = [self.rng.randint(0, 30)], self.rng.choice([403, 507, 503])

        def fault(method: str):
            after[0] -= 1
            return status if after[0] < 0 else None

        self.place.proxy.fault = fault

    def cut(self) -> None:
        """Truncates some responses, or announces a wrong length."""
        rng, how = random.Random(self.rng.random()), self.rng.choice([-1, 1])
        self.place.proxy.longer = lambda size: how * rng.randint(1, size) if size and rng.random() < 0.2 else 0

    def incomplete(self) -> None:
        """Omits some objects from listings."""
        rng = random.Random(self.rng.random())

        def without(body: bytes) -> bytes:
            if body.startswith(b'{"kind": "storage#objects"'):
                listing = json.loads(body)
                return json.dumps(listing | {"items": [i for i in listing["items"] if rng.random() < 0.7]}).encode()
            return re.sub(rb"(?s)<Contents>.*?</Contents>", lambda m: m[0] if rng.random() < 0.7 else b"", body)

        self.place.proxy.changed = without

    # --- this machine

    def disk_fails(self) -> None:
        """Fails some writes of this machine, temporarily or permanently."""
        code = self.rng.choice(DISK_ERRORS)
        first, until, calls = self.rng.randint(0, 20), self.rng.choice([3, 10**9]), [0]

        def fault(path: str) -> None:
            calls[0] += 1
            if first <= calls[0] < first + until:
                raise OSError(code, os.strerror(code), path)

        self.disk.fault = fault

    def damaged_copy(self) -> None:
        """Deletes files of the local copy, or replaces them by a folder or by a link to another user's file."""
        files = [f for f in (self.folder / "machine").rglob("*") if f.is_file() and "files" in f.parts]
        for file in self.rng.sample(files, min(len(files), 3)):
            file.unlink()
            if (how := self.rng.randint(0, 2)) == 1:
                file.mkdir()
            elif how == 2:
                file.symlink_to(self.folder / "outside" / "sub" / "file")

    NAMES = (
        *("evil_name", "odd_name", "marker", "object_and_folder", "emptied", "absence", "truncated", "longer"),
        *("bucket_deleted", "lease", "race", "taken_over", "busy", "wrong", "refusing", "cut", "incomplete"),
        *("disk_fails", "damaged_copy"),
    )
