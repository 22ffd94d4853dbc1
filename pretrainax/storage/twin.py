"""A folder in a store and its twin, a copy on this machine: what is there is fetched, what is new here is sent.

All that reads and writes a run's files does so in the twin, as if there were no store. Its record (`copies.py`) holds,
for each object, what it was when it was last fetched or sent, and whether its file is here. Files that vouch for others
are sent last, and deleted first: the manifest of a checkpoint, the index of a corpus, config.json of an export. Whoever
finds one of these in the store finds the others.

Neither side deletes the last copy of a file because the other side has lost its own (an emptied bucket, a removed
cache). A file that is gone on one side is deleted on the other only where something has replaced it: a newer whole
checkpoint, another save of the same step, fewer parts of metrics.jsonl. Otherwise it is sent or fetched again, or moved
to a folder that a message names.
"""

import concurrent.futures
import contextlib
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Optional

from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.errors import RunFailed
from pretrainax.files.object_names import path_below
from pretrainax.storage.copies import Copy
from pretrainax.storage.fates import Fates
from pretrainax.storage.record import Here, Known, read_record, record_text
from pretrainax.storage.run_objects import (
    ARRAYS,
    GROWS,
    LEASES,
    MANIFEST,
    PART,
    PART_NAME,
    STEP,
    counted,
    file_of,
    is_replaced,
    is_unfinished,
    newest_whole,
    rank_of,
    step_of,
)
from pretrainax.storage.store import Stamp, Store, local_errors, say

LOST = Stamp(-1, "")  # of an object that a manifest still names
SENDING = ".sending"  # what the names of folders of links begin with
_THREADS = 8
_LISTINGS = 20  # of a store that changes while it is read: a run deletes a checkpoint no more often than it saves one


class Gone(RunFailed):
    """An object was deleted after it had been listed."""


class Twin:
    """Keeps a folder of this machine beside one in a store. Its methods may be called by several threads."""

    def __init__(self, url: str, copy: Copy, is_at_work: bool = False):
        self.store, self.root, self._copy, self.is_at_work = Store(url), copy.root, copy, is_at_work
        self._lock = threading.RLock()
        # lease: number of the last one under which this folder was at work
        self._known, self.lease = read_record(copy.record, self.store.url)
        self._recorded = ""

    def pull(self, lazy: bool = True) -> bool:
        """Makes the twin what the store has, and returns whether that is anything; arrays come when they are asked for.

        lazy: nothing comes until it is asked for.

        Raises:
          UserError: no file can have the name of an object.
          RunFailed: this machine cannot write a file; objects are deleted faster than they are read.
        """
        with self._lock:
            for left in reversed(range(_LISTINGS)):
                found = self._listed()
                try:
                    self._follow(found, lazy)
                    break
                except Gone:
                    if not left:
                        raise
            self._keep()
            return bool(found)

    def _listed(self) -> dict[str, Stamp]:
        return {name: stamp for name, stamp in self.store.objects().items() if not name.startswith(f"{LEASES}/")}

    def _follow(self, found: dict[str, Stamp], lazy: bool) -> None:
        """Removes what the store has replaced, moves aside what it has lost, fetches what is new."""
        local, fates = self._scan(), Fates(found, self._read, self.root)
        lost: list[str] = []
        damaged: list[str] = []
        for name, known in list(self._known.items()):
            if found.get(name, LOST) == known.there and known.here in (None, local.get(name)):
                continue
            del self._known[name]
            fate = fates.of(name)
            if fate == "lost" and name in local:
                lost.append(name)
            elif fate == "replaced":
                self._remove(name)
            elif fate == "vouched" and (name in found or not self.is_at_work):  # a run sends what is lost again
                there = found.get(name, LOST)
                damaged += [name] if there.size != local[name].size else []  # else it may be the same content
                self._known[name] = Known(there, local[name])
        if damaged:
            say(
                f"{self.store.url} has lost or damaged {counted(damaged)}, which the manifest there names: the copies "
                f"of this machine are kept in {self.root}"
            )
        self._move_aside(lost)
        for name, stamp in found.items():
            self._known.setdefault(name, Known(stamp, None))
        if not lazy:
            self._bring([name for name in found if not ARRAYS.fullmatch(name)])

    def reconcile(self) -> None:
        """Makes good for what one side has lost, where no other machine has trained since this one.

        What the store has lost, or has otherwise than it was sent, is sent with the next `push`. What is gone here, and
        was not replaced by something newer, is fetched.
        """
        with self._lock:
            found, local = self._listed(), self._scan()
            newest, lost, gone = newest_whole(local), [], []
            for name, known in list(self._known.items()):
                if name in local and known.here == local[name] and found.get(name) != known.there:
                    lost.append(name)
                    del self._known[name]
                elif known.here is not None and name not in local and not is_replaced(name, local, newest):
                    gone.append(name)
                    self._known[name] = Known(found.get(name, known.there), None)
                if self._known.get(name, known).here is None and name not in found:
                    self._known.pop(name, None)
            if lost:
                say(
                    f"{self.store.url} has lost or changed {counted(lost)} that this machine has sent: sending from "
                    f"{self.root} again. To begin a new run instead, delete that folder, or take another --workdir"
                )
            if gone := [name for name in gone if name in self._known]:
                say(f"{self.root} has lost {counted(gone)} that {self.store.url} has: fetching again")
                self._bring([name for name in gone if not ARRAYS.fullmatch(name)])
            self._keep()

    def is_ahead(self) -> bool:
        """Returns True if the store has nothing, or this machine has a newer whole checkpoint than the store."""
        found = self._listed()
        here, there = (max(newest_whole(names).values(), default=-1) for names in (self._scan(), found))
        return here > there or not found

    def start_over(self) -> str:
        """Moves the whole folder aside, and forgets what is known of it; returns where it is now."""
        with self._lock:
            os.makedirs(aside := self._copy.new_aside(), mode=0o700)
            os.rename(self.root, moved := os.path.join(aside, self._copy.name))
            self._known, self.lease = {}, 0
            self._keep()
            return moved

    def last_sent(self) -> Optional[int]:
        """Returns the newest step whose whole checkpoint the store has; None where there is none."""
        return max(newest_whole(dict(self._known)).values(), default=None)  # a copy: the sender may be changing it

    def complete(self, folder: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Brings what the store has below a folder of the twin and is not here yet.

        wanted: tells of a name below the folder whether it is asked for.
        """
        start = self._start(folder)
        with self._lock:
            self._bring([n for n in self._known if n.startswith(start) and wanted(n[len(start) :])])
            self._keep()

    def follow(self) -> None:
        """Makes the twin what the store has, without what was written here and never sent.

        What was sent, and is lost there though its manifest is not, stays here and is sent again.
        """
        with self._lock:
            unsent = self._scan().keys() - self._known.keys()
            self.pull(lazy=False)
            for name in unsent - self._known.keys():
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
            listed = self.store.objects("checkpoints")
            found = {name: f"{match[1]}/{match[2]}" for name in listed if (match := STEP.fullmatch(name))}
            whole = {os.path.dirname(n) for n in (*found, *self._scan()) if os.path.basename(n) == MANIFEST}
            # a listing may be incomplete: what is deleted is asked for first
            whole |= {folder for folder in {*found.values()} - whole if self.store.has(f"{folder}/{MANIFEST}")}
            left = {name: folder for name, folder in found.items() if folder not in whole}
            for folder in set(left.values()):
                shutil.rmtree(path_below(self.root, folder), ignore_errors=True)
            self._known |= {name: Known(listed[name], None) for name in left}
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
                stamp = self._stamp(name)
                known = self._known.get(name)
                if known is None or known.there != stamp or known.here != self._scan_one(name):
                    self._known[name] = Known(stamp, None)
            self._bring(names)
            self._keep()

    def move_aside(self, paths: Collection[str]) -> None:
        """Moves files that the store no longer has out of the twin, and says where they are."""
        with self._lock:
            self._move_aside(names := [os.path.relpath(path, self.root) for path in paths])
            for name in names:
                self._known.pop(name, None)
            self._keep()

    def push(self, deletes: bool = True) -> None:
        """Sends what is new or changed here, and then, if `deletes`, deletes in the store what is gone here.

        What is sent stays until it is sent, by links to it: a run deletes checkpoints faster than a slow store takes
        them, which would never have a whole one.
        """
        with self._lock, tempfile.TemporaryDirectory(prefix=SENDING, dir=self._copy.folder) as held:
            local = self._mended(self._scan())
            changed = self._hold(self._changed(local), held)
            self._retract(name for name in changed if rank_of(name))
            for rank in sorted({rank_of(name) for name in changed}):
                self._send({name: local[name] for name in changed if rank_of(name) == rank}, held)
            if deletes:
                self._retract(self._gone(local))
            self._keep()

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Returns the bytes of each (path, start, stop), of objects whose files are here or not."""
        named = [(os.path.relpath(path, self.root), start, stop) for path, start, stop in ranges]
        try:
            return self.store.read_ranges(named)
        except FileNotFoundError as e:
            raise Gone(f"one of {named[0][0]} to {named[-1][0]} is no longer in {self.store.url}") from e

    def forget(self, path: str) -> None:
        """Deletes a file here that the store has as it is; any other one stays."""
        name = os.path.relpath(path, self.root)
        with self._lock:
            if (known := self._known.get(name)) is not None and known.here == self._scan_one(name):
                self._remove(name)
                self._known[name] = Known(known.there, None)
                self._keep()

    def has_unsent(self) -> bool:
        """Returns True if something here is not in the store, or not so."""
        return bool(self._changed(self._scan()))

    def _mended(self, local: dict[str, Here]) -> dict[str, Here]:
        """Returns the finished files once those of whole checkpoints that were damaged here have been fetched again.

        A save writes all files of a step anew: where the store has the manifest, and some files are as they were sent,
        the others were changed by something else.
        """
        steps = {name: step_of(name) for name in local}
        same = {steps[name] for name, known in self._known.items() if name in local and known.here == local[name]}
        whole = {step_of(name) for name in self._known if os.path.basename(name) == MANIFEST}
        changed = [name for name in self._changed(local) if name in self._known]
        if not (damaged := [name for name in changed if steps[name] in same & whole - {""}]):
            return local
        say(f"{self.root} has other contents of {counted(damaged)} than were saved: fetching from {self.store.url}")
        for name in damaged:
            self._known[name] = Known(self._known[name].there, None)
        self._bring(damaged)
        return self._scan()

    def _changed(self, local: dict[str, Here]) -> list[str]:
        return [name for name, here in local.items() if name not in self._known or self._known[name].here != here]

    # --- objects and files -------------------------------------------------------------------------------------------

    def _scan(self) -> dict[str, Here]:
        """Returns the finished files of the twin."""
        found: dict[str, Here] = {}
        for folder, folders, files in os.walk(self.root):
            folders[:] = sorted(name for name in folders if not is_unfinished(name))
            for file in sorted(files):
                if not is_unfinished(file):
                    with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                        found |= self._marks(os.path.relpath(os.path.join(folder, file), self.root))
        return found

    def _scan_one(self, name: str) -> Optional[Here]:
        with contextlib.suppress(FileNotFoundError):
            return self._marks(file_of(name)).get(name)
        return None

    def _marks(self, file: str) -> dict[str, Here]:
        """Returns the objects that a file is in the store, with what tells their contents."""
        path = path_below(self.root, file)
        if os.path.basename(file) != GROWS:
            stat = os.stat(path)
            return {file: Here(stat.st_size, stat.st_mtime_ns)}
        with open(path, "rb") as f:
            parts = enumerate(iter(lambda: f.read(PART), b""))
            return {f"{file}.{i:05d}": Here(len(part), zlib.crc32(part)) for i, part in parts}

    def _bring(self, names: Collection[str]) -> None:
        """Brings those of the objects that are not here; raises Gone where one is deleted meanwhile."""
        wanted = [name for name in names if self._known[name].here is None]
        self._check_room(sum(self._known[name].there.size for name in wanted))
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._bring_one, (name for name in wanted if file_of(name) == name)))
        for file in sorted({file_of(name) for name in wanted if file_of(name) != name}):
            self._bring_parts(file)

    def _check_room(self, needed: int) -> None:
        if needed > (free := shutil.disk_usage(self._copy.folder).free):
            raise RunFailed(
                f"{self.store.url}: {needed:,} bytes are to be fetched, and {self._copy.folder} has {free:,} free: "
                "make room there, or set XDG_CACHE_HOME, of a run config.checkpoint.local_dir, to a larger disk"
            )

    def _bring_one(self, name: str) -> None:
        """Brings an object; one that another process has written anew meanwhile, as curves are, once more."""
        path, there = path_below(self.root, name), self._known[name].there
        while True:
            with self._present(name):
                self.store.get(name, path)
            if (size := os.path.getsize(path)) == there.size:
                break
            before, there = there, self._stamp(name)
            if there == before:
                os.remove(path)
                raise RunFailed(
                    f"{self.store.url}/{name} has {there.size:,} bytes, and {size:,} came: run the same again"
                )
        self._known[name] = Known(there, self._marks(name)[name])

    def _bring_parts(self, file: str) -> None:
        """Writes a file that grows from its parts, up to the first one that is missing or too short."""
        parts = sorted(name for name in self._known if file_of(name) == file)
        count = 0
        while count < len(parts) and parts[count] == f"{file}.{count:05d}":
            count += 1
            if self._known[parts[count - 1]].there.size != PART:
                break
        if after := parts[count:]:
            told = (
                f"{self.store.url} has {after[0]} and not all of {file} before it: those lines are lost. To train on "
                f"with the lines before them, delete {after[0]} and the parts after it there"
            )
            if self.is_at_work:
                raise RunFailed(told)
            say(f"{told}; here they are left out")
        path = path_below(self.root, file)
        with local_errors(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_atomically(path, b"".join(map(self._read, parts[:count])))
        for name, here in self._marks(file).items():
            self._known[name] = Known(self._known[name].there, here)

    def _stamp(self, name: str) -> Stamp:
        with self._present(name):
            return self.store.stamp(name)

    def _read(self, name: str) -> bytes:
        with self._present(name):
            return self.store.read(name)

    @contextlib.contextmanager
    def _present(self, name: str) -> Iterator[None]:
        """Raises Gone where the store does not have an object any more."""
        try:
            yield
        except FileNotFoundError as e:
            raise Gone(f"{self.store.url}/{name} was deleted while it was fetched: run the same again") from e

    def _hold(self, names: list[str], held: str) -> list[str]:
        """Links files into a folder; returns their objects, without those of a folder of which one is gone by now."""
        gone: set[str] = set()
        for file in dict.fromkeys(map(file_of, names)):
            link = os.path.join(held, file)
            os.makedirs(os.path.dirname(link), exist_ok=True)
            try:
                os.link(os.path.join(self.root, file), link)
            except FileNotFoundError:
                gone.add(file)
        vouched = [os.path.dirname(name) for name in names if rank_of(name) and "/" in name]
        without = tuple(f"{folder}/" for folder in vouched if any(file.startswith(f"{folder}/") for file in gone))
        return [name for name in names if file_of(name) not in gone and not (without and name.startswith(without))]

    def _send(self, files: dict[str, Here], held: str) -> None:
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda name: self._send_one(name, files[name], held), files))

    def _send_one(self, name: str, here: Here, held: str) -> None:
        path = os.path.join(held, file_of(name))
        if match := PART_NAME.fullmatch(name):
            with open(path, "rb") as f:
                f.seek(int(match[2]) * PART)
                self.store.write(name, f.read(PART))
        else:
            self.store.put(path, name)
        self._known[name] = Known(self.store.stamp(name), here)  # also where sending the others fails

    def _gone(self, local: dict[str, Here]) -> list[str]:
        """Returns the objects whose files were replaced here, and those that went with what vouched for them."""
        newest = newest_whole(local)
        deleted = (name for name, known in self._known.items() if known.here and name not in local)
        gone = [name for name in deleted if is_replaced(name, local, newest)]
        folders = tuple(f"{os.path.dirname(name)}/" for name in gone if rank_of(name) and "/" in name)
        return gone + [
            n for n, known in self._known.items() if known.here is None and folders and n.startswith(folders)
        ]

    def _retract(self, names: Iterable[str]) -> None:
        """Deletes objects that are in the store, first what vouches for others."""
        gone = sorted({name for name in names if name in self._known}, key=rank_of, reverse=True)
        for name in gone:
            self.store.delete([name])
            del self._known[name]

    def _remove(self, name: str) -> None:
        file = file_of(name)
        path = path_below(self.root, file)
        with local_errors(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.remove(path)
        self._prune(file)
        for other, known in self._known.items():  # parts of the same file, which are to be fetched again
            if file != name and file_of(other) == file:
                self._known[other] = Known(known.there, None)

    def _prune(self, file: str) -> None:
        """Removes the folders that a file was in and that are empty now."""
        with contextlib.suppress(OSError):  # something else is in that folder
            while file := os.path.dirname(file):
                os.rmdir(path_below(self.root, file))

    def _move_aside(self, names: Collection[str]) -> None:
        """Moves the last copies of objects that the store has lost out of the twin, and says where they are."""
        if not names:
            return
        aside, lost = self._copy.new_aside(), dict.fromkeys(map(file_of, names))
        steps = {*map(step_of, names)} - {""}
        beside = [name for name in self._scan() if step_of(name) in steps and name not in lost]
        for file in (*lost, *beside):
            target = path_below(os.path.join(aside, self._copy.name), file)
            with local_errors(target):
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                # what the store still has of such a checkpoint stays here too: there it would be no whole one
                (os.rename if file in lost else os.link)(path_below(self.root, file), target)
            self._prune(file)
        say(f"{self.store.url} has lost {counted(names)}: the copies of this machine are kept in {aside}")

    def _keep(self) -> None:
        """Writes the record, if it has changed."""
        record = record_text(self.store.url, self.lease, self._known)
        is_known = bool(self._known or self.lease or self._recorded)
        if record != self._recorded and is_known:
            with local_errors(self._copy.record):
                write_atomically(self._copy.record, record)
            self._recorded = record
