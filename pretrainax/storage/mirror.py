"""Twins: local copies of folders in an object store, kept equal to the store by downloads and uploads.

All code that reads and writes a run's files uses the twin, as if there were no store. For each object, the record of
the twin (`copies.py`) has its state at the last download or upload, and whether its file is local. Some files list
others: the manifest of a checkpoint, the index of a corpus, config.json of an export. They are uploaded last and
deleted first, so a reader that finds one in the store finds all of its files.

A loss on one side, such as an emptied bucket or a removed cache, never deletes the last copy of a file on the other
side. A missing file is deleted on the other side only if something has replaced it: a newer whole checkpoint, another
save of the same step, or fewer parts of metrics.jsonl. Otherwise it is uploaded or downloaded again, or moved to a
folder that a message names.
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
from pretrainax.storage.object_status import ObjectStatus
from pretrainax.storage.record import LocalState, ObjectState, read_record, record_text
from pretrainax.storage.run_objects import (
    ARRAYS,
    GROWING_FILE,
    LEASES,
    MANIFEST,
    PART,
    PART_NAME,
    STEP,
    count_text,
    file_of,
    is_replaced,
    is_unfinished,
    newest_complete,
    rank_of,
    step_of,
)
from pretrainax.storage.store import Stamp, Store, local_errors, print_message

LOST = Stamp(-1, "")  # stamp of a lost object that a manifest still lists
SENDING = ".sending"  # name prefix of the folders with links to files under upload
_THREADS = 8
_LISTINGS = 20  # attempts for a store that changes meanwhile; a run deletes at most one checkpoint per save


class Gone(RunFailed):
    """Raised if an object was deleted after it was listed."""


class Mirror:
    """A local folder that mirrors a folder in a store. Its methods are thread-safe."""

    def __init__(self, url: str, copy: Copy, is_at_work: bool = False):
        self.store, self.root, self._copy, self.is_at_work = Store(url), copy.root, copy, is_at_work
        self._lock = threading.RLock()
        # lease: number of the last lease under which this machine trained here
        self._known, self.lease = read_record(copy.record, self.store.url)
        self._recorded = ""

    def pull(self, lazy: bool = True) -> bool:
        """Updates the twin from the store; returns True if the store has any objects. Arrays are downloaded on demand.

        lazy: downloads nothing; all files are downloaded on demand.

        Raises:
          UserError: an object has a name that no file can have.
          RunFailed: a local file cannot be written; objects are deleted faster than they are read.
        """
        with self._lock:
            for retries in reversed(range(_LISTINGS)):
                remote = self._listed()
                try:
                    self._follow(remote, lazy)
                    break
                except Gone:
                    if not retries:
                        raise
            self._write_record()
            return bool(remote)

    def _listed(self) -> dict[str, Stamp]:
        return {name: stamp for name, stamp in self.store.objects().items() if not name.startswith(f"{LEASES}/")}

    def _follow(self, remote: dict[str, Stamp], lazy: bool) -> None:
        """Removes files that the store has replaced, moves lost ones aside, downloads new ones."""
        local, fates = self._scan(), ObjectStatus(remote, self._read, self.root)
        lost: list[str] = []
        damaged: list[str] = []
        for name, known in list(self._known.items()):
            if remote.get(name, LOST) == known.there and known.here in (None, local.get(name)):
                continue
            del self._known[name]
            fate = fates.of(name)
            if fate == "lost" and name in local:
                lost.append(name)
            elif fate == "replaced":
                self._remove(name)
            elif fate == "vouched" and (name in remote or not self.is_at_work):  # a run uploads lost files again
                stamp = remote.get(name, LOST)
                damaged += [name] if stamp.size != local[name].size else []  # same size: the content may be equal
                self._known[name] = ObjectState(stamp, local[name])
        if damaged:
            print_message(
                f"{self.store.url} has lost or damaged {count_text(damaged)}, which its manifest lists: the local "
                f"copies stay in {self.root}"
            )
        self._move_aside(lost)
        for name, stamp in remote.items():
            self._known.setdefault(name, ObjectState(stamp, None))
        if not lazy:
            self._download([name for name in remote if not ARRAYS.fullmatch(name)])

    def reconcile(self) -> None:
        """Repairs losses on both sides, if no other machine has trained since this one.

        Objects that the store has lost or changed are uploaded by the next `push`. Local files that are missing without
        a newer replacement are downloaded.
        """
        with self._lock:
            remote, local = self._listed(), self._scan()
            newest, lost, gone = newest_complete(local), [], []
            for name, known in list(self._known.items()):
                if name in local and known.here == local[name] and remote.get(name) != known.there:
                    lost.append(name)
                    del self._known[name]
                elif known.here is not None and name not in local and not is_replaced(name, local, newest):
                    gone.append(name)
                    self._known[name] = ObjectState(remote.get(name, known.there), None)
                if self._known.get(name, known).here is None and name not in remote:
                    self._known.pop(name, None)
            if lost:
                print_message(
                    f"{self.store.url} has lost or changed {count_text(lost)} that this machine has sent: sending from "
                    f"{self.root} again. To start a new run instead, delete that folder, or set another --workdir"
                )
            if gone := [name for name in gone if name in self._known]:
                print_message(f"{self.root} has lost {count_text(gone)} that {self.store.url} has: fetching again")
                self._download([name for name in gone if not ARRAYS.fullmatch(name)])
            self._write_record()

    def is_ahead(self) -> bool:
        """Returns True if the store is empty, or the newest whole checkpoint of this machine is newer."""
        remote = self._listed()
        local_step, remote_step = (max(newest_complete(names).values(), default=-1) for names in (self._scan(), remote))
        return local_step > remote_step or not remote

    def start_over(self) -> str:
        """Moves the whole folder aside and clears the record; returns the new path of the folder."""
        with self._lock:
            os.makedirs(aside := self._copy.new_aside(), mode=0o700)
            os.rename(self.root, moved := os.path.join(aside, self._copy.name))
            self._known, self.lease = {}, 0
            self._write_record()
            return moved

    def last_sent(self) -> Optional[int]:
        """Returns the step of the newest whole checkpoint in the store; None if there is none."""
        return max(newest_complete(dict(self._known)).values(), default=None)  # a copy: the sender may be changing it

    def complete(self, folder: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Downloads the missing files below a folder of the twin.

        wanted: predicate for file names relative to the folder; other files are skipped.
        """
        start = self._start(folder)
        with self._lock:
            self._download([n for n in self._known if n.startswith(start) and wanted(n[len(start) :])])
            self._write_record()

    def follow(self) -> None:
        """Updates the twin from the store and deletes local files that were never uploaded.

        Uploaded files that the store has lost stay if a manifest there still lists them; the next `push` uploads them.
        """
        with self._lock:
            unsent = self._scan().keys() - self._known.keys()
            self.pull(lazy=False)
            for name in unsent - self._known.keys():
                self._remove(name)

    def read_sent(self, folder: str, names: Collection[str]) -> Optional[dict[str, bytes]]:
        """Returns the content of files of a folder that other processes upload, by name; None until all exist."""
        start = self._start(folder)
        if {start + name for name in names} <= self.store.objects(os.path.dirname(start + min(names))).keys():
            return {name: self.store.read(start + name) for name in names}
        return None

    def finish_folder(self, folder: str, staging: str, names: Iterable[str]) -> None:
        """Renames a complete staging folder to its final path; other processes have uploaded the named files.

        Some of these files may also be local. Other objects in the store's folder are from an earlier attempt and are
        deleted.
        """
        start = self._start(folder)
        expected = {start + name for name in names}
        with self._lock:
            remote = self.store.objects(start.rstrip("/"))
            if lost := sorted(expected - remote.keys()):
                raise RunFailed(f"{self.store.url}/{lost[0]}, which another process has sent, is gone")
            self._known |= {name: ObjectState(stamp, None) for name, stamp in remote.items()}
            self._retract(remote.keys() - expected)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(staging, folder)
            self._known |= {name: ObjectState(remote[name], self._scan_one(name)) for name in expected}
            self._write_record()

    def discard_unfinished(self) -> None:
        """Deletes incomplete checkpoints in the store, so that no reader finds a part of one."""
        with self._lock:
            listed = self.store.objects("checkpoints")
            folders = {name: f"{match[1]}/{match[2]}" for name in listed if (match := STEP.fullmatch(name))}
            whole = {os.path.dirname(n) for n in (*folders, *self._scan()) if os.path.basename(n) == MANIFEST}
            # A listing may be incomplete: ask for each manifest itself before its folder is deleted.
            whole |= {folder for folder in {*folders.values()} - whole if self.store.has(f"{folder}/{MANIFEST}")}
            stale = {name: folder for name, folder in folders.items() if folder not in whole}
            for folder in set(stale.values()):
                shutil.rmtree(path_below(self.root, folder), ignore_errors=True)
            self._known |= {name: ObjectState(listed[name], None) for name in stale}
            self._retract(stale)
            self._write_record()

    def _start(self, folder: str) -> str:
        """Returns the common prefix of the names of all objects below a folder of the twin."""
        inside = os.path.relpath(folder, self.root)
        return "" if inside == os.curdir else f"{inside}/"

    def fetch(self, names: Collection[str]) -> None:
        """Downloads the current versions of these objects."""
        with self._lock:
            for name in names:
                stamp = self._stamp(name)
                known = self._known.get(name)
                if known is None or known.there != stamp or known.here != self._scan_one(name):
                    self._known[name] = ObjectState(stamp, None)
            self._download(names)
            self._write_record()

    def move_aside(self, paths: Collection[str]) -> None:
        """Moves files that the store no longer has out of the twin, and prints their new folder."""
        with self._lock:
            self._move_aside(names := [os.path.relpath(path, self.root) for path in paths])
            for name in names:
                self._known.pop(name, None)
            self._write_record()

    def push(self, deletes: bool = True) -> None:
        """Uploads new and changed files; then, if `deletes`, deletes objects whose files were deleted here.

        Hard links protect files during their upload: a run may delete checkpoints faster than a slow store takes them,
        and the store would never have a whole one.
        """
        with self._lock, tempfile.TemporaryDirectory(prefix=SENDING, dir=self._copy.folder) as links:
            local = self._mended(self._scan())
            changed = self._hold(self._changed(local), links)
            self._retract(name for name in changed if rank_of(name))
            for rank in sorted({rank_of(name) for name in changed}):
                self._send({name: local[name] for name in changed if rank_of(name) == rank}, links)
            if deletes:
                self._retract(self._gone(local))
            self._write_record()

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Returns the bytes of each (path, start, stop) from the store; the files need not be local."""
        named = [(os.path.relpath(path, self.root), start, stop) for path, start, stop in ranges]
        try:
            return self.store.read_ranges(named)
        except FileNotFoundError as e:
            raise Gone(f"one of {named[0][0]} to {named[-1][0]} is no longer in {self.store.url}") from e

    def evict(self, path: str) -> None:
        """Deletes a local file if the store has the same content."""
        name = os.path.relpath(path, self.root)
        with self._lock:
            if (known := self._known.get(name)) is not None and known.here == self._scan_one(name):
                self._remove(name)
                self._known[name] = ObjectState(known.there, None)
                self._write_record()

    def has_pending_uploads(self) -> bool:
        """Returns True if a local file is missing or different in the store."""
        return bool(self._changed(self._scan()))

    def _mended(self, local: dict[str, LocalState]) -> dict[str, LocalState]:
        """Downloads damaged local files of whole checkpoints again; returns the finished files.

        A save rewrites all files of a step. If the store has the manifest and some files are unchanged since their
        upload, something other than a save changed the others.
        """
        steps = {name: step_of(name) for name in local}
        same = {steps[name] for name, known in self._known.items() if name in local and known.here == local[name]}
        whole = {step_of(name) for name in self._known if os.path.basename(name) == MANIFEST}
        changed = [name for name in self._changed(local) if name in self._known]
        if not (damaged := [name for name in changed if steps[name] in same & whole - {""}]):
            return local
        print_message(f"{count_text(damaged)} in {self.root} changed after the save: fetching from {self.store.url}")
        for name in damaged:
            self._known[name] = ObjectState(self._known[name].there, None)
        self._download(damaged)
        return self._scan()

    def _changed(self, local: dict[str, LocalState]) -> list[str]:
        return [name for name, here in local.items() if name not in self._known or self._known[name].here != here]

    # --- objects and files -------------------------------------------------------------------------------------------

    def _scan(self) -> dict[str, LocalState]:
        """Returns the finished files of the twin."""
        marks: dict[str, LocalState] = {}
        for folder, folders, files in os.walk(self.root):
            folders[:] = sorted(name for name in folders if not is_unfinished(name))
            for file in sorted(files):
                if not is_unfinished(file):
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                        marks |= self._marks(os.path.relpath(os.path.join(folder, file), self.root))
        return marks

    def _scan_one(self, name: str) -> Optional[LocalState]:
        with contextlib.suppress(FileNotFoundError):
            return self._marks(file_of(name)).get(name)
        return None

    def _marks(self, file: str) -> dict[str, LocalState]:
        """Returns the objects that represent a file in the store, with size and mark of each."""
        path = path_below(self.root, file)
        if os.path.basename(file) != GROWING_FILE:
            stat = os.stat(path)
            return {file: LocalState(stat.st_size, stat.st_mtime_ns)}
        with open(path, "rb") as f:
            parts = enumerate(iter(lambda: f.read(PART), b""))
            return {f"{file}.{i:05d}": LocalState(len(part), zlib.crc32(part)) for i, part in parts}

    def _download(self, names: Collection[str]) -> None:
        """Downloads the objects that are not local; raises Gone if one is deleted meanwhile."""
        wanted = [name for name in names if self._known[name].here is None]
        self._check_room(sum(self._known[name].there.size for name in wanted))
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._download_one, (name for name in wanted if file_of(name) == name)))
        for file in sorted({file_of(name) for name in wanted if file_of(name) != name}):
            self._download_parts(file)

    def _check_room(self, needed: int) -> None:
        if needed > (free := shutil.disk_usage(self._copy.folder).free):
            raise RunFailed(
                f"{self.store.url}: {needed:,} bytes are to be fetched, but {self._copy.folder} has only {free:,} "
                "free: make room there, or set XDG_CACHE_HOME (runs: config.checkpoint.local_dir) to a larger disk"
            )

    def _download_one(self, name: str) -> None:
        """Downloads an object; again if another process rewrites it meanwhile, as runs do with curves."""
        path, stamp = path_below(self.root, name), self._known[name].there
        while True:
            with self._present(name):
                self.store.get(name, path)
            if (size := os.path.getsize(path)) == stamp.size:
                break
            before, stamp = stamp, self._stamp(name)
            if stamp == before:
                os.remove(path)
                raise RunFailed(
                    f"{self.store.url}/{name} has {stamp.size:,} bytes, and {size:,} came: run the same command again"
                )
        self._known[name] = ObjectState(stamp, self._marks(name)[name])

    def _download_parts(self, file: str) -> None:
        """Writes a growing file from its parts, up to the first missing or short part."""
        parts = sorted(name for name in self._known if file_of(name) == file)
        count = 0
        while count < len(parts) and parts[count] == f"{file}.{count:05d}":
            count += 1
            if self._known[parts[count - 1]].there.size != PART:
                break
        if after := parts[count:]:
            message = (
                f"{self.store.url} has {after[0]}, but not all of {file} before it: lines are lost. To continue with "
                f"the lines before the gap, delete {after[0]} and the parts after it there"
            )
            if self.is_at_work:
                raise RunFailed(message)
            print_message(f"{message}; this command leaves them out")
        path = path_below(self.root, file)
        with local_errors(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_atomically(path, b"".join(map(self._read, parts[:count])))
        for name, here in self._marks(file).items():
            self._known[name] = ObjectState(self._known[name].there, here)

    def _stamp(self, name: str) -> Stamp:
        with self._present(name):
            return self.store.stamp(name)

    def _read(self, name: str) -> bytes:
        with self._present(name):
            return self.store.read(name)

    @contextlib.contextmanager
    def _present(self, name: str) -> Iterator[None]:
        """Turns FileNotFoundError of an object into Gone."""
        try:
            yield
        except FileNotFoundError as e:
            raise Gone(f"{self.store.url}/{name} was deleted while it was fetched: run the same command again") from e

    def _hold(self, names: list[str], links: str) -> list[str]:
        """Links files into a folder; returns their objects, without those of folders from which a file is gone."""
        gone: set[str] = set()
        for file in dict.fromkeys(map(file_of, names)):
            link = os.path.join(links, file)
            os.makedirs(os.path.dirname(link), exist_ok=True)
            try:
                os.link(os.path.join(self.root, file), link)
            except FileNotFoundError:
                gone.add(file)
        vouched = [os.path.dirname(name) for name in names if rank_of(name) and "/" in name]
        without = tuple(f"{folder}/" for folder in vouched if any(file.startswith(f"{folder}/") for file in gone))
        return [name for name in names if file_of(name) not in gone and not (without and name.startswith(without))]

    def _send(self, files: dict[str, LocalState], links: str) -> None:
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda name: self._send_one(name, files[name], links), files))

    def _send_one(self, name: str, here: LocalState, links: str) -> None:
        path = os.path.join(links, file_of(name))
        if match := PART_NAME.fullmatch(name):
            with open(path, "rb") as f:
                f.seek(int(match[2]) * PART)
                self.store.write(name, f.read(PART))
        else:
            self.store.put(path, name)
        self._known[name] = ObjectState(self.store.stamp(name), here)  # now: uploads of other files may fail

    def _gone(self, local: dict[str, LocalState]) -> list[str]:
        """Returns the objects whose files were replaced here, and the objects that a replaced manifest lists."""
        newest = newest_complete(local)
        deleted = (name for name, known in self._known.items() if known.here and name not in local)
        gone = [name for name in deleted if is_replaced(name, local, newest)]
        folders = tuple(f"{os.path.dirname(name)}/" for name in gone if rank_of(name) and "/" in name)
        return gone + [
            n for n, known in self._known.items() if known.here is None and folders and n.startswith(folders)
        ]

    def _retract(self, names: Iterable[str]) -> None:
        """Deletes objects in the store, manifests and other lists of files first."""
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
        for other, known in self._known.items():  # parts of the same file are downloaded again
            if file != name and file_of(other) == file:
                self._known[other] = ObjectState(known.there, None)

    def _prune(self, file: str) -> None:
        """Removes the parent folders of a file that are empty now."""
        with contextlib.suppress(OSError):  # a folder is not empty
            while file := os.path.dirname(file):
                os.rmdir(path_below(self.root, file))

    def _move_aside(self, names: Collection[str]) -> None:
        """Moves the last copies of lost objects out of the twin, and prints their new folder."""
        if not names:
            return
        aside, lost = self._copy.new_aside(), dict.fromkeys(map(file_of, names))
        steps = {*map(step_of, names)} - {""}
        others = [name for name in self._scan() if step_of(name) in steps and name not in lost]
        for file in (*lost, *others):
            target = path_below(os.path.join(aside, self._copy.name), file)
            with local_errors(target):
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                # Linked, not moved: the store has these files, but the checkpoint in `aside` also needs them.
                (os.rename if file in lost else os.link)(path_below(self.root, file), target)
            self._prune(file)
        print_message(f"{self.store.url} has lost {count_text(names)}: the local copies are now in {aside}")

    def _write_record(self) -> None:
        """Writes the record, if it has changed."""
        record = record_text(self.store.url, self.lease, self._known)
        has_content = bool(self._known or self.lease or self._recorded)
        if record != self._recorded and has_content:
            with local_errors(self._copy.record):
                write_atomically(self._copy.record, record)
            self._recorded = record
