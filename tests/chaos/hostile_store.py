"""Tests hostile object stores, which rename, lose, truncate and change objects, and failing disks: no data may be lost.

    python -m tests.chaos.hostile_store --trials=200 [--stores=gs,s3] [--only=WORD] [--seed=0]

A trial has a role and a hostility (`hostilities.py`). The role is a run that continues, here or on another machine, a
reader, a file pattern, the writer of an export, or a command in a separate process. The hostility comes before the role
or during it. In half of the trials on another machine, the first machine is lost. Each trial checks that:

- nothing was written outside the folders of the role on this machine (`watched.py`);
- the store or this machine still has the run's config, its newest checkpoint (complete by its manifest) and all of its
  metrics lines; roles that only read changed nothing in the store;
- a failure is one line with an error status, within SECONDS.
"""

import argparse
import collections
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator

from pretrainax.config import RunFailed, UserError
from pretrainax.storage import copies, lease, mirror, places, store
from tests.chaos.hostilities import DISK_ERRORS, Hostilities, Place, saved
from tests.chaos.store import serving
from tests.chaos.watched import ENVIRONMENT, FaultyDisk, Watch, hurried
from tests.support import runs

SECONDS = 60.0  # time limit of a trial
CONFIG = b'{"train": 1}'


class TakenOver(BaseException):
    """Raised instead of ending the process of a run that lost its lease."""


class Trials:
    """The trials, with one method per role; the files of a machine are in `folder`/machine."""

    ROLES = ("resume", "resume_elsewhere", "read", "read_elsewhere", "match", "send", "command")
    READS = ("read", "read_elsewhere", "match", "command")

    def __init__(self, place: Place, folder: pathlib.Path, watch: Watch, whole: Callable[[], runs.Whole]):
        """whole: returns a finished run for the commands, and trains it at the first call."""
        self.place, self.folder, self.watch, self._make_whole = place, folder, watch, whole
        self.disk = FaultyDisk(str(folder / "machine"))
        self.hostilities = Hostilities(self.place, self.disk, folder)
        self.rng, self.machines, self.said = random.Random(), 0, []

    def begin(self, rng: random.Random) -> None:
        """Starts with an empty folder in the bucket, and a machine that has only files of another user."""
        self.rng = self.hostilities.rng = rng
        self.place.begin()
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "outside" / "sub").mkdir(parents=True)
        (self.folder / "outside" / "sub" / "file").write_text("of another user")
        self.said.clear()
        self._another_machine(is_lost=False)

    def _another_machine(self, is_lost: bool) -> None:
        """Switches to a machine without local copies; is_lost: the previous machine's files are deleted."""
        if is_lost:
            shutil.rmtree(self.folder / "machine", ignore_errors=True)
        self.machines += 1
        machine = self.folder / "machine" / str(self.machines)
        for name in ("cache", "tmp", "out", "home"):
            (machine / name).mkdir(parents=True)
        self.watch.roots = tuple(os.path.realpath(machine / name) for name in ("cache", "tmp", "out"))
        log, xla = str(self.folder / "outside.log"), os.environ["JAX_COMPILATION_CACHE_DIR"]
        environment = {"XDG_CACHE_HOME": str(machine / "cache"), "HOME": str(machine / "home")}
        watched = json.dumps({"roots": [*self.watch.roots, os.path.realpath(xla)], "log": log})
        os.environ.update(environment)
        environment |= {"TMPDIR": str(machine / "tmp"), "MPLCONFIGDIR": str(machine / "tmp"), ENVIRONMENT: watched}
        runs.ENV.update(environment)
        tempfile.tempdir = str(machine / "tmp")
        places._mirrors.clear()

    # --- state of the run

    def pieces(self) -> set[bytes]:
        """Returns the contents of all files, and all metrics lines, in the store and on the machines."""
        found: set[bytes] = set()
        here = [f.read_bytes() for f in (self.folder / "machine").rglob("*") if f.is_file() and not f.is_symlink()]
        for content in (*here, *self.place.objects().values()):
            found |= {content, *content.splitlines(keepends=True)}
        return found

    def newest_whole(self) -> int:
        """Returns the newest step whose manifest and files are all in the store, or all in one local folder."""
        trees = [{name.partition("/run/")[2]: content for name, content in self.place.objects().items()}]
        for folder in (self.folder / "machine").rglob("checkpoints"):
            files = (f for f in folder.rglob("*") if f.is_file() and not f.is_symlink())
            trees.append({str(f.relative_to(folder.parent)): f.read_bytes() for f in files})
        return max((step for tree in trees for step in _whole_steps(tree)), default=-1)

    # --- roles

    def train(self, steps: tuple[int, ...] = (10, 20)) -> None:
        """Imitates a training run: writes steps and appends metrics lines."""
        with places.working_copy(self.place.url) as folder:
            root = pathlib.Path(folder)
            self._check_metrics(root)
            for step in steps:
                with self.disk.healthy():
                    self._write(root, {"config.json": CONFIG})
                    with open(root / "metrics.jsonl", "a") as f:
                        f.write("".join(f'{{"step": {i}}}\n' for i in range(step - 9, step + 1)))
                    self._write(root, {n.replace(f"/{step}/", f"/{step}.saving/"): c for n, c in saved(step).items()})
                    shutil.rmtree(root / "checkpoints" / str(step), ignore_errors=True)
                    os.rename(root / "checkpoints" / f"{step}.saving", root / "checkpoints" / str(step))
                time.sleep(0.1)

    def _check_metrics(self, root: pathlib.Path) -> None:
        """Raises RunFailed, as a resuming run does, if metrics lines of the newest checkpoint are missing."""
        found = root / "checkpoints"
        newest = max((int(path.name) for path in found.iterdir()), default=0) if found.exists() else 0
        lines = (root / "metrics.jsonl").read_bytes().splitlines() if (root / "metrics.jsonl").exists() else []
        if len(lines) < newest:
            raise RunFailed(f"{root} has {len(lines)} lines of metrics, and a checkpoint of step {newest}")

    def _write(self, root: pathlib.Path, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)

    def resume(self) -> None:
        self.train((30, 40))

    def resume_elsewhere(self) -> None:
        self.train((30, 40))

    def read(self) -> None:
        folder = places.local_path(self.place.url)
        if os.path.isdir(os.path.join(folder, "checkpoints")):
            for step in os.listdir(os.path.join(folder, "checkpoints")):
                places.complete(os.path.join(folder, "checkpoints", step))

    def read_elsewhere(self) -> None:
        self.read()

    def match(self) -> None:
        for pattern in ("*", "*.json*", "checkpoints/*/run.json"):
            places.local_path(f"{self.place.url}/{pattern}")

    def send(self) -> None:
        with places.uploaded_output(f"{self.place.url}/export") as folder, self.disk.healthy():
            self._write(pathlib.Path(folder), {"config.json": b"{}", "model.safetensors": b"weights"})

    def command(self) -> None:
        """Runs a command on the run, or on the text in its folder, in a separate process."""
        whole, url, out = self._make_whole(), self.place.url, self.folder / "machine" / str(self.machines) / "out"
        config = [f"--config={whole.config}", f"--config.data.cache_dir={whole.cache}"]
        command = self.rng.choice(
            [
                ["report", url, f"--output={out}/report"],
                ["generate", f"--from={url}", "--length=4", "A"],
                [
                    "evaluate",
                    f"--from={url}",
                    f"--source=TextFiles(path='{whole.text}')",
                    "--config.evaluate.batches=1",
                ],
                ["predict", f"--from={url}", f"--input={whole.text}/0.txt", f"--output={out}/predicted.jsonl"],
                ["main", *config, f"--workdir={out}/run", f"--config.data.source.path={whole.text}"]
                + [f"--config.checkpoint.init_from={url}", "--config.train.steps=2"],
                ["prepare", config[0], f"--config.data.source.path={url}/text", f"--config.data.cache_dir={out}/cache"],
            ]
        )
        done = runs.run([sys.executable, "-m", "tests.chaos.watched", f"pretrainax.{command[0]}", *command[1:]])
        with contextlib.suppress(FileNotFoundError):
            self.watch.outside += (self.folder / "outside.log").read_text().splitlines()
        last = done.stderr.splitlines()[-1:] or [""]
        if "Traceback" in done.stderr or done.returncode and not last[0].startswith("pretrainax: "):
            raise AssertionError(f"{command[0]}, exit code {done.returncode}: {done.stderr[-2500:]}")
        if done.returncode:
            assert done.returncode in (1, 2), done.returncode
            raise UserError(last[0])

    # --- a trial

    def run(self, role: str, hostility: str) -> str:
        """Returns "survived" or "one line"; raises AssertionError for wrong behaviour."""
        if role == "command":
            self._put_whole()
        else:
            self.train()
        if self.rng.random() < 0.5:
            self.read()
        getattr(self.hostilities, hostility)()
        if role.endswith("elsewhere"):
            self._another_machine(is_lost=self.rng.random() < 0.5)
        before, newest, there, outside = self.pieces(), self.newest_whole(), self.place.objects(), self._outside()
        self.watch.outside.clear()
        began = time.monotonic()
        said = self._ends(role)
        seconds = time.monotonic() - began
        self.hostilities.end()
        assert seconds < SECONDS, f"took {seconds:.0f} s"
        assert not self.watch.outside, f"written outside: {self.watch.outside[:3]}"
        assert self._outside() == outside, "a file of another user has changed"
        assert not (wrong := [line for line in self.said if "\n" in line or "Traceback" in line]), wrong[0]
        if hostility != "race":  # a race changes the run and its newest checkpoint
            if role in Trials.READS:
                assert self.place.objects() == there, "a reader has changed the store"
            assert self.newest_whole() >= newest, f"step {newest} is lost"
            kept = before & {CONFIG, *(b'{"step": %d}\n' % i for i in range(1, 21))}
            assert not (lost := kept - self.pieces()), f"lost: {sorted(lost)[:3]}"
        elif role in Trials.READS:
            assert self.newest_whole() == 50
        return said

    def _put_whole(self) -> None:
        """Copies a trained run and its text into the store."""
        whole = self._make_whole()
        for file in whole.run.rglob("*"):
            name = str(file.relative_to(whole.run))
            if file.is_file() and file.name not in ("metrics.jsonl", "run.lock"):
                self.place.put(name, file.read_bytes())
        self.place.put("metrics.jsonl.00000", (whole.run / "metrics.jsonl").read_bytes())
        for file in whole.text.iterdir():
            self.place.put(f"text/{file.name}", file.read_bytes())

    def _ends(self, role: str) -> str:
        self.watch.listens = True
        try:
            getattr(self, role)()
            return "survived"
        except UserError as e:
            assert "\n" not in str(e), e
        except OSError as e:  # every command prints it as one line
            assert e.errno in DISK_ERRORS, traceback.format_exc()
        except TakenOver:
            assert any("was taken over by" in line for line in self.said)
        finally:
            self.watch.listens = False
        return "one line"

    def _outside(self) -> dict[str, bytes]:
        return {str(f): f.read_bytes() for f in (self.folder / "outside").rglob("*") if f.is_file()}


def _whole_steps(tree: dict[str, bytes]) -> list[int]:
    """Returns the steps whose manifest and all files in it are in `tree`; tree: contents by file name."""
    found = []
    for name, content in tree.items():
        if match := re.fullmatch(r"checkpoints/(\d+)/manifest\.sha256", name):
            lines = [line.partition("  ") for line in content.decode(errors="replace").splitlines()]
            files = {digest: tree.get(f"checkpoints/{match[1]}/{file}") for digest, _, file in lines}
            if all(c is not None and hashlib.sha256(c).hexdigest() == digest for digest, c in files.items()):
                found.append(int(match[1]))
    return found


@contextlib.contextmanager
def _heard(said: list[str]) -> Iterator[None]:
    """Collects the storage's messages in `said`; a run that lost its lease raises TakenOver."""
    modules = (store, places, mirror, copies, lease)
    before, hook = [module.print_message for module in modules], threading.excepthook
    for module in modules:
        module.print_message = said.append

    def taken_over(code: int) -> None:
        raise TakenOver(code)

    lease.os = types.SimpleNamespace(**vars(os) | {"_exit": taken_over})
    threading.excepthook = lambda args: None if args.exc_type is TakenOver else hook(args)
    try:
        yield
    finally:
        lease.os, threading.excepthook = os, hook
        for module, say in zip(modules, before, strict=True):
            module.print_message = say


def run_trials(count: int, schemes: list[str], seed: int, only: str = "", left_out: tuple[str, ...] = ()) -> dict:
    """Runs trials of all roles and hostilities; returns tracebacks of failures by "store role hostility"."""
    watch, failures, counts = Watch(), collections.defaultdict(list), collections.Counter()
    pairs = [(role, hostility) for hostility in Hostilities.NAMES for role in Trials.ROLES]
    pairs = [pair for pair in pairs if only in " ".join(pair) and not {*pair} & {*left_out}]
    random.Random(seed).shuffle(pairs)
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as folder:
        whole = functools.cache(lambda: runs.Whole(f"{runs.TINY}:gpt", pathlib.Path(made).resolve()))
        for part, scheme in enumerate(schemes):
            with serving(scheme) as proxy, hurried():
                trials = Trials(Place(scheme, proxy), pathlib.Path(folder).resolve(), watch, whole)
                with trials.disk.mounted(), _heard(trials.said):
                    for number in range(part, count, len(schemes)):
                        role, hostility = pairs[number // len(schemes) % len(pairs)]
                        trials.begin(random.Random(seed * 100_003 + number))
                        try:
                            counts[trials.run(role, hostility)] += 1
                        except Exception:
                            failures[f"{scheme} {role} {hostility}"].append(traceback.format_exc())
                        finally:
                            trials.hostilities.end()
                            tempfile.tempdir = None
    failed = sum(map(len, failures.values()))
    print(f"{count} trials: {counts['survived']} survived, {counts['one line']} ended in one line, {failed} failed")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--stores", default="gs,s3")
    parser.add_argument("--only", default="", help="substring of a role or a hostility")
    parser.add_argument("--left_out", default="", help="roles and hostilities to exclude")
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
