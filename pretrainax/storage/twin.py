"""A folder in a store and its twin, a folder of this machine: what is there is brought here, what is new is sent.

All that reads and writes a run's files does so in the twin, as if there were no store. `NAME.store.json` beside it
says of each object what it was when it was last brought or sent, and of its file whether it is here. What vouches for
others goes last, and goes first where they are changed or deleted: the manifest of a checkpoint, the index of a corpus,
config.json of an export. Who finds that in the store finds the others.

metrics.jsonl, which grows, is objects of PART bytes: `metrics.jsonl.00000` and so on. All but the last stay as they
are.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Optional

from pretrainax.config.atomic_files import write_atomically
from pretrainax.config.errors import RunFailed, UserError
from pretrainax.config.json_files import read_object
from pretrainax.storage.store import Stamp, Store

KEPT = ".store.json"  # after the name of the folder
PART = 1 << 20  # bytes of an object of a file that grows
LEASES = "run.lease"  # folder of what `Lease` writes
_GROWS = "metrics.jsonl"
_PART_NAME = re.compile(rf"((?:.*/)?{re.escape(_GROWS)})\.(\d{{5}})")
_MANIFEST = "manifest.sha256"
_LAST = {"index.json": 1, _MANIFEST: 1, "config.json": 2}  # what vouches for the files beside it and below
_ARRAYS = re.compile(r"(.*/)?checkpoints/\d+/[^/]+/.*")  # brought when a checkpoint is read
_STEP = re.compile(r"checkpoints/\d+(?=/)")
_REPORT = re.compile(r"(.*/)?checkpoints/\d+/hosts/[^/]+")  # of one process of several, which vouches for its own files
_ON_THE_WAY = re.compile(r".*\.(saving|replaced|deleted)\b.*|.*\.tmp-.*|run\.lock|\..*")  # no name of what is finished
_THREADS = 8


class Here(NamedTuple):
    """Tells one content of a file from another."""

    size: int  # bytes
    mark: int  # when it was written, in nanoseconds; of a part of a file that grows, its CRC-32


class Known(NamedTuple):
    """Says of an object what was last brought or sent; `here` is None where its file was not brought."""

    there: Stamp
    here: Optional[Here]


class Twin:
    """Keeps a folder of this machine beside one in a store. Its methods may be called by several threads."""

    def __init__(self, url: str, root: str):
        self.store, self.root = Store(url), root
        self._lock = threading.RLock()
        self.lease = 0  # number of the last lease under which this folder was at work
        self._known: dict[str, Known] = {}
        self._kept = ""  # what is written of it
        with contextlib.suppress(UserError, KeyError, TypeError, ValueError):  # none, or damaged: all is brought anew
            kept = read_object(root + KEPT)
            if kept["url"] == self.store.url:
                self._known = {name: _known(*of) for name, of in kept["objects"].items()}
                self.lease = int(kept["lease"])

    def pull(self, lazy: bool = True) -> bool:
        """Makes the twin what the store has, and returns whether that is anything; arrays come when they are asked for.

        lazy: nothing comes until it is asked for.
        """
        with self._lock:
            found = {name: stamp for name, stamp in self.store.objects().items() if not name.startswith(f"{LEASES}/")}
            local = self._scan()
            for name, known in list(self._known.items()):
                if found.get(name) != known.there or known.here not in (None, local.get(name)):
                    self._known.pop(name)
                    self._remove(name)
            for name, stamp in found.items():
                self._known.setdefault(name, Known(stamp, None))
            if not lazy:
                self._bring(name for name in found if not _ARRAYS.fullmatch(name))
            self._keep()
            return bool(found)

    def complete(self, folder: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Brings what the store has below a folder of the twin and is not here yet.

        wanted: tells of a name below the folder whether it is asked for.
        """
        start = self._start(folder)
        with self._lock:
            self._bring([n for n in self._known if n.startswith(start) and wanted(n[len(start) :])])
            self._keep()

    def follow(self) -> None:
        """Makes the twin what the store has, without what was written here and never sent."""
        with self._lock:
            self.pull(lazy=False)
            for name in self._scan().keys() - self._known.keys():
                self._remove(name)

    def read_sent(self, folder: str, names: Collection[str]) -> Optional[dict[str, bytes]]:
        """Returns what others have sent to a folder, by name; None while one of these is not there."""
        start = self._start(folder)
        if {start + name for name in names} <= self.store.objects(os.path.dirname(start + min(names))).keys():
            return {name: self.store.read(start + name) for name in names}
        return None

    def adopt(self, folder: str, staging: str, names: Iterable[str]) -> None:
        """Gives a folder that is whole its name, of which others have sent these names, some of which are here too.

        What else the store has there is of an earlier attempt, and is deleted.
        """
        start = self._start(folder)
        expected = {start + name for name in names}
        with self._lock:
            found = self.store.objects(start.rstrip("/"))
            if lost := sorted(expected - found.keys()):
                raise RunFailed(f"{self.store.url}/{lost[0]} is gone, which another process has sent")
            self._known |= {name: Known(stamp, None) for name, stamp in found.items()}
            self._retract(found.keys() - expected)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(staging, folder)
            self._known |= {name: Known(found[name], self._scan_one(name)) for name in expected}
            self._keep()

    def discard_unfinished(self) -> None:
        """Deletes what the store has of checkpoints that never were whole, of which nobody is to find a part."""
        with self._lock:
            found = {name: match[0] for name in self.store.objects("checkpoints") if (match := _STEP.match(name))}
            whole = {os.path.dirname(n) for n in (*found, *self._scan()) if os.path.basename(n) == _MANIFEST}
            left = {name: folder for name, folder in found.items() if folder not in whole}
            for folder in set(left.values()):
                shutil.rmtree(os.path.join(self.root, folder), ignore_errors=True)
            self._known |= {name: Known(self.store.stamp(name), None) for name in left}
            self._retract(left)
            self._keep()

    def _start(self, folder: str) -> str:
        """Returns what the names of the objects below a folder of the twin begin with."""
        inside = os.path.relpath(folder, self.root)
        return "" if inside == os.curdir else f"{inside}/"

    def bring(self, names: Collection[str]) -> None:
        """Brings objects of these names as they are now."""
        with self._lock:
            for name in names:
                stamp = self.store.stamp(name)
                if (
                    (known := self._known.get(name)) is None
                    or known.there != stamp
                    or known.here != self._scan_one(name)
                ):
                    self._known[name] = Known(stamp, None)
            self._bring(names)
            self._keep()

    def push(self, deletes: bool = True) -> None:
        """Sends what is new or changed here, and then, if `deletes`, deletes in the store what is gone here.

        What is sent stays until it is sent, by links to it: a run deletes checkpoints faster than a slow store takes
        them, which would never have a whole one.
        """
        with self._lock, tempfile.TemporaryDirectory(prefix=".sending", dir=self._beside()) as held:
            local = self._scan()
            changed = self._hold(self._changed(local), held)
            self._retract(name for name in changed if _rank(name))
            for rank in sorted({_rank(name) for name in changed}):
                self._send({name: local[name] for name in changed if _rank(name) == rank}, held)
            if deletes:
                self._retract(self._gone(local))
            self._keep()

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Returns the bytes of each (path, start, stop), of objects whose files are here or not."""
        return self.store.read_ranges([(os.path.relpath(path, self.root), start, stop) for path, start, stop in ranges])

    def forget(self, path: str) -> None:
        """Deletes a file here that the store has as it is; any other one stays."""
        name = os.path.relpath(path, self.root)
        with self._lock:
            if (known := self._known.get(name)) is not None and known.here == self._scan_one(name):
                self._remove(name)
                self._known[name] = Known(known.there, None)
                self._keep()

    def has_unsent(self) -> bool:
        """Tells whether something here is not in the store, or not so."""
        return bool(self._changed(self._scan()))

    def _changed(self, local: dict[str, Here]) -> list[str]:
        return [name for name, here in local.items() if name not in self._known or self._known[name].here != here]

    # --- objects and files -------------------------------------------------------------------------------------------

    def _scan(self) -> dict[str, Here]:
        """Returns the finished files of the twin."""
        found: dict[str, Here] = {}
        for folder, folders, files in os.walk(self.root):
            folders[:] = sorted(name for name in folders if not _ON_THE_WAY.fullmatch(name))
            for file in sorted(files):
                if not _ON_THE_WAY.fullmatch(file):
                    with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                        found |= self._marks(os.path.relpath(os.path.join(folder, file), self.root))
        return found

    def _scan_one(self, name: str) -> Optional[Here]:
        with contextlib.suppress(FileNotFoundError):
            return self._marks(_file_of(name)).get(name)
        return None

    def _marks(self, file: str) -> dict[str, Here]:
        """Returns the objects that a file is in the store, with what tells their contents."""
        path = os.path.join(self.root, file)
        if os.path.basename(file) != _GROWS:
            stat = os.stat(path)
            return {file: Here(stat.st_size, stat.st_mtime_ns)}
        with open(path, "rb") as f:
            parts = enumerate(iter(lambda: f.read(PART), b""))
            return {f"{file}.{i:05d}": Here(len(part), zlib.crc32(part)) for i, part in parts}

    def _bring(self, names: Iterable[str]) -> None:
        """Brings those of the objects that are not here."""
        wanted = [name for name in names if self._known[name].here is None]
        whole = {
            file: sorted(n for n in self._known if _file_of(n) == file) for n in wanted if (file := _file_of(n)) != n
        }
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._bring_one, (name for name in wanted if _file_of(name) == name)))
        for file, parts in whole.items():
            os.makedirs(os.path.dirname(os.path.join(self.root, file)), exist_ok=True)
            write_atomically(os.path.join(self.root, file), b"".join(map(self.store.read, parts)))
            for name, here in self._marks(file).items():
                self._known[name] = Known(self._known[name].there, here)

    def _bring_one(self, name: str) -> None:
        """Brings an object; one that another process has written anew meanwhile, as curves are, once more."""
        path, there = os.path.join(self.root, name), self._known[name].there
        while True:
            self.store.get(name, path)
            if (size := os.path.getsize(path)) == there.size:
                break
            before, there = there, self.store.stamp(name)
            if there == before:
                os.remove(path)
                raise RunFailed(
                    f"{self.store.url}/{name} has {there.size:,} bytes, and {size:,} came: run the same again"
                )
        self._known[name] = Known(there, self._marks(name)[name])

    def _hold(self, names: list[str], held: str) -> list[str]:
        """Links files into a folder; returns their objects, without those of a folder of which one is gone by now."""
        gone: set[str] = set()
        for file in dict.fromkeys(map(_file_of, names)):
            link = os.path.join(held, file)
            os.makedirs(os.path.dirname(link), exist_ok=True)
            try:
                os.link(os.path.join(self.root, file), link)
            except FileNotFoundError:
                gone.add(file)
        vouched = [os.path.dirname(name) for name in names if _rank(name) and "/" in name]
        without = tuple(f"{folder}/" for folder in vouched if any(file.startswith(f"{folder}/") for file in gone))
        return [name for name in names if _file_of(name) not in gone and not (without and name.startswith(without))]

    def _beside(self) -> str:
        """Returns the folder that the twin is in; links are possible there, and nothing in it is sent."""
        folder = os.path.dirname(self.root)
        os.makedirs(folder, exist_ok=True)
        return folder

    def _send(self, files: dict[str, Here], held: str) -> None:
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda name: self._send_one(name, files[name], held), files))

    def _send_one(self, name: str, here: Here, held: str) -> None:
        path = os.path.join(held, _file_of(name))
        if match := _PART_NAME.fullmatch(name):
            with open(path, "rb") as f:
                f.seek(int(match[2]) * PART)
                self.store.write(name, f.read(PART))
        else:
            self.store.put(path, name)
        self._known[name] = Known(self.store.stamp(name), here)  # also where sending the others fails

    def _gone(self, local: dict[str, Here]) -> list[str]:
        """Returns the objects whose files were here and are no more, and those that went with what vouched for them."""
        gone = [name for name, known in self._known.items() if known.here and name not in local]
        folders = tuple(f"{os.path.dirname(name)}/" for name in gone if _rank(name) and "/" in name)
        return gone + [
            n for n, known in self._known.items() if known.here is None and folders and n.startswith(folders)
        ]

    def _retract(self, names: Iterable[str]) -> None:
        """Deletes objects that are in the store, first what vouches for others."""
        gone = sorted({name for name in names if name in self._known}, key=_rank, reverse=True)
        for name in gone:
            self.store.delete([name])
            del self._known[name]

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.remove(os.path.join(self.root, file := _file_of(name)))
            with contextlib.suppress(OSError):  # something else is in that folder
                while file := os.path.dirname(file):
                    os.rmdir(os.path.join(self.root, file))

    def _keep(self) -> None:
        """Writes down what is known, where that has changed."""
        kept = json.dumps({"url": self.store.url, "lease": self.lease, "objects": self._known})
        is_known = bool(self._known or self.lease or self._kept)  # a file beside a single one would be among a user's
        if kept != self._kept and is_known:
            self._beside()
            write_atomically(self.root + KEPT, kept)
            self._kept = kept


def _known(there: list, here: Optional[list]) -> Known:
    return Known(Stamp(*there), here and Here(*here))


def _rank(name: str) -> int:
    return 1 if _REPORT.fullmatch(name) else _LAST.get(os.path.basename(name), 0)


def _file_of(name: str) -> str:
    """Returns the file of the twin that an object is, or is a part of."""
    match = _PART_NAME.fullmatch(name)
    return match[1] if match else name
