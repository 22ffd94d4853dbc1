"""Object stores that name, lose, cut and change objects as they like, and disks that fail: nothing may be lost.

    python -m tests.chaos.hostile_store --trials=200 [--stores=gs,s3] [--only=WORD] [--seed=0]

A trial has a role (a run that goes on, here or elsewhere, a reader, a pattern of texts, the writer of an export, a
command) and a hostility, before the role begins or while it works. After each:

- nothing was written outside the folders of this machine that the role has: an audit hook hears of every file that is
  opened for writing, made, renamed, linked or removed, and a tree beside them is compared;
- whatever the store and this machine had of a run (config, steps, lines of metrics) one of them still has;
- a failure is one line, a UserError or a RunFailed, within SECONDS.
"""

import argparse
import contextlib
import errno
import hashlib
import os
import pathlib
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from pretrainax.config import RunFailed, UserError
from pretrainax.storage import copies, lease, places, run_objects, store, twin
from tests.chaos.store import serving
from tests.support import faulty_proxy, moto_s3, runs

# of a trial: a lease that was damaged is waited for 90 s, and gcsfs retries for 34 s within each call to a store that
# refuses
SECONDS = 180.0
EVIL = ["../../../../up.txt", "a/../../../up.txt", "/abs.txt", "a//b.txt", "./a", "x" * 300, "../../.bashrc"]
ODD = [
    "a\\..\\b",
    "%2e%2e/up",
    "line\nbreak",
    "\x1b[31mred",
    "lock",
    "record.json",
    "complete",
    ".tmp-1-1",
    "CONFIG.JSON",
]
# Events of Python that change a file, with the places of the paths among their arguments, and of open folders that
# these are relative to.
WRITING = {
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.link": (1,),
    "os.symlink": (1,),
}
FOLDERS = {("os.mkdir", 0): 2, ("os.rename", 0): 2, ("os.rename", 1): 3, ("os.remove", 0): 1, ("os.rmdir", 0): 1}
FOLDERS |= {("os.link", 1): 3, ("os.symlink", 1): 2}


class Watch:
    """Notes each path that this process writes to while `roots` is set, if it is below none of them."""

    def __init__(self):
        self.roots: tuple[str, ...] = ()
        self.outside: list[str] = []
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple) -> None:
        if not self.roots or event not in WRITING and event != "open":
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        for place in WRITING.get(event, (0,)):
            path, folder = args[place], FOLDERS.get((event, place))
            if not isinstance(path, str | bytes) or os.fsdecode(path) in (os.devnull, ""):
                continue
            path = os.fsdecode(path)
            if folder is not None and isinstance(args[folder], int) and args[folder] >= 0:
                path = os.path.join(os.readlink(f"/proc/self/fd/{args[folder]}"), path)
            real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            if not any(real == root or real.startswith(root + os.sep) for root in self.roots):
                self.outside.append(f"{event} {real}")


def saved(step: int) -> dict[str, bytes]:
    """Returns the files of a checkpoint, with a manifest that vouches for them."""
    files = {
        "params/d/a": b"array %d" % step,
        "optimizer/d/b": b"moments %d" % step,
        "run.json": b'{"step": %d}' % step,
    }
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items())]
    return {f"checkpoints/{step}/{n}": c for n, c in (files | {"manifest.sha256": "".join(lines).encode()}).items()}


class Trials:
    """Has a method for each role and each hostility; all of a machine is below `folder`/machine."""

    def __init__(self, scheme: str, proxy: faulty_proxy.FaultyProxy, folder: pathlib.Path, watch: Watch):
        self.scheme, self.proxy, self.folder, self.watch = scheme, proxy, folder, watch
        self.count, self.rng, self.url, self.machines = 0, random.Random(), "", 0
        self.fault: Callable[[str], None] = lambda path: None
        self.going_on = threading.Thread()

    def begin(self, rng: random.Random) -> None:
        """Begins with an empty place in the bucket, and a machine that has nothing beside a tree of others' files."""
        self.count, self.rng = self.count + 1, rng
        self.url, self.fault = f"{self.scheme}://bucket/{self.count}/run", lambda path: None
        self.proxy.fault, self.proxy.delay = (lambda method: None), 0.0
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "outside" / "sub").mkdir(parents=True)
        (self.folder / "outside" / "sub" / "file").write_text("of somebody else")
        self.another_machine()

    def another_machine(self) -> None:
        self.machines += 1
        machine = self.folder / "machine" / str(self.machines)
        (machine / "tmp").mkdir(parents=True)
        os.environ["XDG_CACHE_HOME"] = runs.ENV["XDG_CACHE_HOME"] = str(machine)
        tempfile.tempdir = str(machine / "tmp")
        places._twins.clear()

    # --- what there is of the run

    def pieces(self) -> set[bytes]:
        """Returns the content of each file, and each line of metrics, that the store or a machine has of the run."""
        found: set[bytes] = set()
        contents = [f.read_bytes() for f in (self.folder / "machine").rglob("*") if f.is_file() and not f.is_symlink()]
        for name, content in self.objects().items():
            contents += [] if run_objects.LEASES in name else [content]
        for content in contents:
            found |= {content, *content.splitlines(keepends=True)}
        return found

    def objects(self) -> dict[str, bytes]:
        """Returns all objects below the place of the trial, under whatever names."""
        prefix = f"{self.count}/"
        if self.scheme == "gs":
            with self.proxy.gcs.lock:
                items = list(self.proxy.gcs.objects.items())
            return {key.partition("/")[2]: content for key, (content, _) in items if key.startswith(f"bucket/{prefix}")}
        client, found = self.client(), {}
        for page in client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix):
            for item in page.get("Contents", ()):
                with contextlib.suppress(client.exceptions.NoSuchKey):  # deleted meanwhile
                    found[item["Key"]] = client.get_object(Bucket="bucket", Key=item["Key"])["Body"].read()
        return found

    def client(self):
        return moto_s3.client(f"http://{self.proxy.upstream}")

    def put(self, name: str, content: bytes) -> None:
        """Writes an object below the run under any name, also one that no file can have."""
        key = f"{self.count}/run/{name}"
        if self.scheme == "gs":
            self.proxy.gcs.put(f"bucket/{key}", content, None)
        else:
            self.client().put_object(Bucket="bucket", Key=key, Body=content)

    def drop(self, keys: Iterator[str]) -> None:
        for key in list(keys):
            if self.scheme == "gs":
                with self.proxy.gcs.lock:
                    self.proxy.gcs.objects.pop(f"bucket/{key}", None)
            else:
                self.client().delete_object(Bucket="bucket", Key=key)

    # --- roles

    def train(self, steps: tuple[int, ...] = (10, 20)) -> None:
        """Trains as a run does: writes steps, deletes old ones, adds lines."""
        with places.at_work(self.url) as folder:
            root = pathlib.Path(folder)
            self._write(root, {"config.json": b'{"train": 1}'})
            for step in steps:
                with open(root / "metrics.jsonl", "a") as f:
                    f.write("".join(f'{{"step": {i}}}\n' for i in range(step - 9, step + 1)))
                self._write(root, {n.replace(f"/{step}/", f"/{step}.saving/"): c for n, c in saved(step).items()})
                shutil.rmtree(root / "checkpoints" / str(step), ignore_errors=True)
                os.rename(root / "checkpoints" / f"{step}.saving", root / "checkpoints" / str(step))
                time.sleep(0.1)

    def _write(self, root: pathlib.Path, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)

    def resume(self) -> None:
        self.train((30, 40))

    def resume_elsewhere(self) -> None:
        self.another_machine()
        self.train((30, 40))

    def read(self) -> None:
        folder = places.here(self.url)
        for step in os.listdir(os.path.join(folder, "checkpoints")):
            places.complete(os.path.join(folder, "checkpoints", step))

    def read_elsewhere(self) -> None:
        self.another_machine()
        self.read()

    def match(self) -> None:
        for pattern in ("*", "*.json*", "checkpoints/*/run.json"):
            places.here(f"{self.url}/{pattern}")

    def send(self) -> None:
        with places.sent(f"{self.url}/export") as folder:
            self._write(pathlib.Path(folder), {"config.json": b"{}", "model.safetensors": b"weights"})

    def command(self) -> None:
        """Runs a command on the run, in a process of its own; it has no model, so it always ends with a line."""
        for name in ("report", "generate"):
            args = [f"--from={self.url}", "A"] if name == "generate" else [self.url, f"--output={tempfile.tempdir}/r"]
            done = runs.run([sys.executable, "-m", f"pretrainax.{name}", *args])
            if done.returncode and (
                "Traceback" in done.stderr or not done.stderr.splitlines()[-1].startswith("pretrainax: ")
            ):
                raise AssertionError(f"{name}: {done.stderr[-2000:]}")

    ROLES = ("resume", "resume_elsewhere", "read", "read_elsewhere", "match", "send", "command")

    # --- hostilities; each returns what goes on while the role works

    def evil_name(self) -> None:
        self.put(self.rng.choice(EVIL), b"evil")

    def odd_name(self) -> None:
        self.put(self.rng.choice(ODD), b"odd")

    def marker(self) -> None:
        for name in self.rng.sample(["", "checkpoints/", "checkpoints/10/", "export/", "run.lease/", "empty/"], 3):
            self.put(name, b"")

    def object_and_folder(self) -> None:
        self.put(self.rng.choice(["checkpoints", "checkpoints/20", "checkpoints/20/params"]), b"both")

    def emptied(self) -> None:
        share, whole = self.rng.choice([1.0, 0.5, 0.2]), self.objects()
        self.drop(key for key in whole if run_objects.LEASES not in key and self.rng.random() < share)

    def absence(self) -> None:
        self.drop(iter([self.rng.choice([key for key in self.objects() if run_objects.LEASES not in key])]))

    def truncated(self) -> None:
        key, content = self.rng.choice(list(self.objects().items()))
        self.put(key.partition("/run/")[2], content[: len(content) // 2])

    def longer(self) -> None:
        key, content = self.rng.choice(list(self.objects().items()))
        self.put(key.partition("/run/")[2], content + b"more" * self.rng.choice([1, 100_000]))

    def busy(self) -> None:
        rng, answers = random.Random(self.rng.random()), [503, 429, 504, faulty_proxy.DROPPED]
        self.proxy.fault = lambda method: rng.choice(answers) if rng.random() < 0.1 else None

    def refusing(self) -> None:
        after, status = [self.rng.randint(0, 30)], self.rng.choice([403, 507, 503])

        def fault(method: str):
            after[0] -= 1
            return status if after[0] < 0 else None

        self.proxy.fault = fault

    def race(self) -> None:
        """Goes on as a live run: saves step 50, and deletes the others."""

        def go_on() -> None:
            time.sleep(self.rng.uniform(0, 0.3))
            with contextlib.suppress(Exception):
                for name, content in saved(50).items():
                    self.put(name, content)
                self.drop(key for key in self.objects() if "/checkpoints/" in key and "/checkpoints/50/" not in key)

        self.going_on = threading.Thread(target=go_on, daemon=True)
        self.going_on.start()

    def disk(self) -> None:
        """Fails some writes of this machine, for a while or for good."""
        code = self.rng.choice([errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EMFILE, errno.EDQUOT])
        first, until = self.rng.randint(0, 20), self.rng.choice([3, 10**9])
        calls = [0]

        def fault(path: str) -> None:
            calls[0] += 1
            if first <= calls[0] < first + until:
                raise OSError(code, os.strerror(code), path)

        self.fault = fault

    def damaged_copy(self) -> None:
        """Removes files of the copy on this machine, or puts a folder or a link to others' files in their place."""
        files = [f for f in (self.folder / "machine").rglob("*") if f.is_file() and "files" in f.parts]
        for file in self.rng.sample(files, min(len(files), 3)):
            file.unlink()
            if (how := self.rng.randint(0, 2)) == 1:
                file.mkdir()
            elif how == 2:
                file.symlink_to(self.folder / "outside" / "sub" / "file")

    HOSTILITIES = (
        *("evil_name", "odd_name", "marker", "object_and_folder", "emptied", "absence", "truncated", "longer"),
        *("busy", "refusing", "race", "disk", "damaged_copy"),
    )

    # --- a trial

    def run(self, role: str, hostility: str) -> str:
        """Returns "survived" or "one line: …"; AssertionError where something is wrong."""
        self.train()
        if self.rng.random() < 0.5:
            self.read()
        getattr(self, hostility)()
        before, outside = self.pieces(), self._outside()
        kept = {p for p in before if hostility not in ("race", "longer", "truncated") or b"step" in p or b"train" in p}
        kept &= {b'{"train": 1}', *saved(20).values(), *(b'{"step": %d}\n' % i for i in range(1, 21))}
        began, said = time.monotonic(), "survived"
        self.watch.outside.clear()
        self.watch.roots = tuple(os.path.realpath(self.folder / name) for name in ("machine",))
        try:
            getattr(self, role)()
        except (UserError, RunFailed) as e:
            assert "\n" not in str(e), e
            said = "one line"
        finally:
            self.watch.roots = ()
        self.fault, self.proxy.fault = (lambda path: None), (lambda method: None)
        if self.going_on.ident:
            self.going_on.join()
            self.going_on = threading.Thread()
        assert time.monotonic() - began < SECONDS, f"took {time.monotonic() - began:.0f} s"
        assert not self.watch.outside, f"written outside: {self.watch.outside[:3]}"
        assert self._outside() == outside, "a file of somebody else has changed"
        if hostility != "race":  # which deletes as a live run does
            replaced = saved(20).values() if role.startswith("resume") and said == "survived" else ()
            lost = kept - self.pieces() - set(replaced)
            assert not lost, f"lost: {sorted(lost)[:3]}"
        return said

    def _outside(self) -> dict[str, bytes]:
        return {str(f): f.read_bytes() for f in (self.folder / "outside").rglob("*") if f.is_file()}


@contextlib.contextmanager
def faulty_disk(trials: Trials) -> Iterator[None]:
    """Has what sender and fetcher do with files of this machine ask `trials.fault` first."""
    originals = {name: getattr(os, name) for name in ("replace", "link", "makedirs")}

    def asked(name: str) -> Callable:
        def call(*args, **kwargs):
            if str(args[-1]).startswith(str(trials.folder / "machine")):
                trials.fault(str(args[-1]))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(os, name, asked(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Makes a store wait seconds where it waits minutes."""
    short = {
        (lease, "BEAT"): 0.5,
        (store, "PATIENCE"): 3.0,
        (store, "_FIRST"): 0.05,
        (places, "EVERY"): 0.1,
        (places, "REPEATED"): 1.0,
    }
    before = {(module, name): getattr(module, name) for module, name in short}
    for (module, name), value in short.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def run_trials(count: int, schemes: list[str], seed: int, only: str = "", left_out: tuple[str, ...] = ()) -> dict:
    """Runs trials of roles and hostilities in turns; returns the tracebacks of failures by "store role hostility"."""
    watch, failures, counts = Watch(), {}, {"survived": 0, "one line": 0}
    pairs = [(role, hostility) for hostility in Trials.HOSTILITIES for role in Trials.ROLES]
    pairs = [pair for pair in pairs if only in " ".join(pair) and not {*pair} & {*left_out}]
    random.Random(seed).shuffle(pairs)
    quiet = store.say, places.say, twin.say
    store.say = places.say = twin.say = copies.say = lambda line: None
    try:
        for part, scheme in enumerate(schemes):
            with tempfile.TemporaryDirectory() as folder, serving(scheme) as proxy, hurried():
                trials = Trials(scheme, proxy, pathlib.Path(folder).resolve(), watch)
                with faulty_disk(trials):
                    for number in range(part, count, len(schemes)):
                        role, hostility = pairs[number // len(schemes) % len(pairs)]
                        trials.begin(random.Random(seed * 100_003 + number))
                        try:
                            counts[trials.run(role, hostility)] += 1
                        except Exception:
                            failures.setdefault(f"{scheme} {role} {hostility}", []).append(traceback.format_exc())
                        finally:
                            tempfile.tempdir = None
    finally:
        store.say, places.say, twin.say = quiet
        copies.say = quiet[0]
    failed = sum(map(len, failures.values()))
    print(f"{count} trials: {counts['survived']} survived, {counts['one line']} ended in one line, {failed} failed")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--stores", default="gs,s3")
    parser.add_argument("--only", default="", help="a part of a role or a hostility")
    parser.add_argument("--left_out", default="", help="roles and hostilities")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    failures = run_trials(
        given.trials, given.stores.split(","), given.seed, given.only, tuple(given.left_out.split(","))
    )
    for name, texts in failures.items():
        print(f"FAIL {name}, {len(texts)} times:\n{texts[0][-1500:]}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
