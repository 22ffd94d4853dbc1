"""Keeps a local copy of a folder in an object store equal to that folder, by downloads and uploads.

All code that reads and writes a run's files uses the local copy (a `Mirror`), as if there were no store. For each
object, the record file of the copy (`record.py`) contains the state of the object at its last download or upload, and
whether its file is local. Some files list other files: the manifest of a checkpoint, the index of a corpus, config.json
of an export. Such a list is uploaded after the listed files and deleted before them. A reader that finds a list in the
store therefore finds all listed files.

A loss on one side, such as an emptied bucket or a removed cache, never deletes the last copy of a file on the other
side. A missing file is deleted on the other side only if something has replaced the file: a newer complete checkpoint,
another save of the same step, or fewer parts of metrics.jsonl. Otherwise the file is uploaded or downloaded again, or
moved to a different folder; a message contains the path of this folder.
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

LOST = Stamp(-1, "")  # stamp of an object that is missing in the store although a manifest in the store lists it
SENDING = ".sending"  # name prefix of the folders with links to files under upload
_THREADS = 8
_LISTINGS = 20  # attempts to download from a changing store; a run deletes at most one checkpoint per save


class ObjectDeleted(RunFailed):
    """Raised if an object was deleted after it was listed."""


class Mirror:
    """A local folder that mirrors a folder in a store. Its methods are thread-safe."""

    def __init__(self, url: str, copy: Copy, is_at_work: bool = False):
        self.store, self.root, self._copy, self.is_at_work = Store(url), copy.root, copy, is_at_work
        self._lock = threading.RLock()
        # lease: number of the last lease (`lease.py`) that a run on this machine held for this folder; 0: none
        self._known, self.lease = read_record(copy.record, self.store.url)
        self._recorded = ""

    def pull(self, lazy: bool = True) -> bool:
        """Updates the local copy from the store; returns True if the store has any objects.

        lazy: if False, downloads all files except arrays of checkpoints; if True, nothing (`complete` downloads them).

        Raises:
          UserError: an object has a name that no file can have.
          RunFailed: a local file cannot be written, or objects are deleted faster than they are downloaded.
        """
        with self._lock:
            for retries in reversed(range(_LISTINGS)):
                remote = self._listed()
                try:
                    self._follow(remote, lazy)
                    break
                except ObjectDeleted:
                    if not retries:
                        raise
            self._write_record()
            return bool(remote)

    def _listed(self) -> dict[str, Stamp]:
        return {name: stamp for name, stamp in self.store.objects().items() if not name.startswith(f"{LEASES}/")}

    def _follow(self, remote: dict[str, Stamp], lazy: bool) -> None:
        """Removes local files that the store has replaced, moves files that the store has lost, downloads new files."""
        local, fates = self._scan(), ObjectStatus(remote, self._read, self.root)
        lost: list[str] = []
        damaged: list[str] = []
        for name, known in list(self._known.items()):
            if remote.get(name, LOST) == known.remote and known.local in (None, local.get(name)):
                continue
            del self._known[name]
            fate = fates.status(name)
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
        """Repairs losses in the store and in the local copy; no other machine may have trained since this machine.

        Files whose objects the store has lost or changed are uploaded by the next `push`. Local files that are missing
        and have no newer replacement are downloaded.
        """
        with self._lock:
            remote, local = self._listed(), self._scan()
            newest, lost, gone = newest_complete(local), [], []
            for name, known in list(self._known.items()):
                if name in local and known.local == local[name] and remote.get(name) != known.remote:
                    lost.append(name)
                    del self._known[name]
                elif known.local is not None and name not in local and not is_replaced(name, local, newest):
                    gone.append(name)
                    self._known[name] = ObjectState(remote.get(name, known.remote), None)
                if self._known.get(name, known).local is None and name not in remote:
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
        """Returns True if the store is empty, or if its newest complete checkpoint is older than the local one."""
        remote = self._listed()
        local_step, remote_step = (max(newest_complete(names).values(), default=-1) for names in (self._scan(), remote))
        return local_step > remote_step or not remote

    def start_over(self) -> str:
        """Moves the local copy to a new folder next to it and clears its record; returns its new path."""
        with self._lock:
            os.makedirs(aside := self._copy.new_aside(), mode=0o700)
            os.rename(self.root, moved := os.path.join(aside, self._copy.name))
            self._known, self.lease = {}, 0
            self._write_record()
            return moved

    def last_sent(self) -> Optional[int]:
        """Returns the step of the newest complete checkpoint in the store; None if the store has no such checkpoint."""
        return max(newest_complete(dict(self._known)).values(), default=None)  # a copy: another thread may change it

    def complete(self, folder: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Downloads the missing files below a folder of the local copy.

        wanted: returns True for the files to download; its argument is the file name relative to the folder.
        """
        start = self._start(folder)
        with self._lock:
            self._download([n for n in self._known if n.startswith(start) and wanted(n[len(start) :])])
            self._write_record()

    def follow(self) -> None:
        """Updates the local copy from the store and deletes local files that were never uploaded.

        Uploaded files that the store has lost remain if a manifest in the store lists them. `push` uploads them again.
        """
        with self._lock:
            unsent = self._scan().keys() - self._known.keys()
            self.pull(lazy=False)
            for name in unsent - self._known.keys():
                self._remove(name)

    def read_sent(self, folder: str, names: Collection[str]) -> Optional[dict[str, bytes]]:
        """Returns the contents, by name, of files of a folder that other processes upload; None until all exist."""
        start = self._start(folder)
        if {start + name for name in names} <= self.store.objects(os.path.dirname(start + min(names))).keys():
            return {name: self.store.read(start + name) for name in names}
        return None

    def finish_folder(self, folder: str, staging: str, names: Iterable[str]) -> None:
        """Renames the staging folder of a checkpoint to `folder`; other processes have uploaded the files `names`.

        The staging folder may also contain some of these files. All other objects in the same folder of the store are
        from an earlier attempt and are deleted.
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
        """Deletes incomplete checkpoints in the store and their local folders, so that no reader finds them."""
        with self._lock:
            listed = self.store.objects("checkpoints")
            folders = {name: f"{match[1]}/{match[2]}" for name in listed if (match := STEP.fullmatch(name))}
            whole = {os.path.dirname(n) for n in (*folders, *self._scan()) if os.path.basename(n) == MANIFEST}
            # A listing may be incomplete: request each missing manifest before its folder is deleted.
            whole |= {folder for folder in {*folders.values()} - whole if self.store.has(f"{folder}/{MANIFEST}")}
            stale = {name: folder for name, folder in folders.items() if folder not in whole}
            for folder in set(stale.values()):
                shutil.rmtree(path_below(self.root, folder), ignore_errors=True)
            self._known |= {name: ObjectState(listed[name], None) for name in stale}
            self._retract(stale)
            self._write_record()

    def _start(self, folder: str) -> str:
        """Returns the common name prefix of all objects below a folder of the local copy; "" for the whole copy."""
        inside = os.path.relpath(folder, self.root)
        return "" if inside == os.curdir else f"{inside}/"

    def fetch(self, names: Collection[str]) -> None:
        """Downloads the current versions of the objects `names`, if they are not local."""
        with self._lock:
            for name in names:
                stamp = self._stamp(name)
                known = self._known.get(name)
                if known is None or known.remote != stamp or known.local != self._scan_one(name):
                    self._known[name] = ObjectState(stamp, None)
            self._download(names)
            self._write_record()

    def move_aside(self, paths: Collection[str]) -> None:
        """Moves files that the store no longer has out of the local copy, and prints their new folder."""
        with self._lock:
            self._move_aside(names := [os.path.relpath(path, self.root) for path in paths])
            for name in names:
                self._known.pop(name, None)
            self._write_record()

    def push(self, deletes: bool = True) -> None:
        """Uploads new and changed files; then, if `deletes`, deletes the objects of files that a run deleted locally.

        Hard links keep files until their upload ends. Otherwise a run could delete each checkpoint before its upload to
        a slow store ends, and the store would never contain a complete checkpoint.
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
        """Reads byte ranges (path, start, stop) of files from the store; the files need not be local."""
        named = [(os.path.relpath(path, self.root), start, stop) for path, start, stop in ranges]
        try:
            return self.store.read_ranges(named)
        except FileNotFoundError as e:
            raise ObjectDeleted(f"one of {named[0][0]} to {named[-1][0]} is no longer in {self.store.url}") from e

    def evict(self, path: str) -> None:
        """Deletes a local file if it is unchanged since its last download or upload; `complete` downloads it again."""
        name = os.path.relpath(path, self.root)
        with self._lock:
            if (known := self._known.get(name)) is not None and known.local == self._scan_one(name):
                self._remove(name)
                self._known[name] = ObjectState(known.remote, None)
                self._write_record()

    def has_pending_uploads(self) -> bool:
        """Returns True if a local file is new or has changed since its last download or upload."""
        return bool(self._changed(self._scan()))

    def _mended(self, local: dict[str, LocalState]) -> dict[str, LocalState]:
        """Downloads damaged local files of complete checkpoints again; returns the state of all finished local files.

        A save rewrites all files of a step. If the store has the manifest of a step, and only some files of the step
        have changed since their upload, then the changed files are damaged, because no save changes only some files.
        """
        steps = {name: step_of(name) for name in local}
        same = {steps[name] for name, known in self._known.items() if name in local and known.local == local[name]}
        whole = {step_of(name) for name in self._known if os.path.basename(name) == MANIFEST}
        changed = [name for name in self._changed(local) if name in self._known]
        if not (damaged := [name for name in changed if steps[name] in same & whole - {""}]):
            return local
        print_message(f"{count_text(damaged)} in {self.root} changed after the save: fetching from {self.store.url}")
        for name in damaged:
            self._known[name] = ObjectState(self._known[name].remote, None)
        self._download(damaged)
        return self._scan()

    def _changed(self, local: dict[str, LocalState]) -> list[str]:
        return [name for name, here in local.items() if name not in self._known or self._known[name].local != here]

    # --- objects and files -------------------------------------------------------------------------------------------

    def _scan(self) -> dict[str, LocalState]:
        """Returns the state of each finished file of the local copy, by object name."""
        marks: dict[str, LocalState] = {}
        for folder, folders, files in os.walk(self.root):
            folders[:] = sorted(name for name in folders if not is_unfinished(name))
            for file in sorted(files):
                if not is_unfinished(file):
                    with contextlib.suppress(FileNotFoundError):  # deleted since its folder was listed
                        marks |= self._marks(os.path.relpath(os.path.join(folder, file), self.root))
        return marks

    def _scan_one(self, name: str) -> Optional[LocalState]:
        with contextlib.suppress(FileNotFoundError):
            return self._marks(file_of(name)).get(name)
        return None

    def _marks(self, file: str) -> dict[str, LocalState]:
        """Returns the local state of each object that represents a file in the store: one, or one per part."""
        path = path_below(self.root, file)
        if os.path.basename(file) != GROWING_FILE:
            stat = os.stat(path)
            return {file: LocalState(stat.st_size, stat.st_mtime_ns)}
        with open(path, "rb") as f:
            parts = enumerate(iter(lambda: f.read(PART), b""))
            return {f"{file}.{i:05d}": LocalState(len(part), zlib.crc32(part)) for i, part in parts}

    def _download(self, names: Collection[str]) -> None:
        """Downloads the objects that are not local; raises Gone if an object is deleted before its download."""
        wanted = [name for name in names if self._known[name].local is None]
        self._check_room(sum(self._known[name].remote.size for name in wanted))
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
        """Downloads an object; repeats the download if a run rewrites the object in the meantime, such as a plot."""
        path, stamp = path_below(self.root, name), self._known[name].remote
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
        """Assembles an append-only file from its parts, up to the first missing part or first short part."""
        parts = sorted(name for name in self._known if file_of(name) == file)
        count = 0
        while count < len(parts) and parts[count] == f"{file}.{count:05d}":
            count += 1
            if self._known[parts[count - 1]].remote.size != PART:
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
            self._known[name] = ObjectState(self._known[name].remote, here)

    def _stamp(self, name: str) -> Stamp:
        with self._present(name):
            return self.store.stamp(name)

    def _read(self, name: str) -> bytes:
        with self._present(name):
            return self.store.read(name)

    @contextlib.contextmanager
    def _present(self, name: str) -> Iterator[None]:
        """Context manager that converts a FileNotFoundError into Gone, with the name of the object in the message."""
        try:
            yield
        except FileNotFoundError as e:
            raise ObjectDeleted(
                f"{self.store.url}/{name} was deleted while it was fetched: run the same command again"
            ) from e

    def _hold(self, names: list[str], links: str) -> list[str]:
        """Creates hard links to the files of objects in a folder; returns the objects to upload.

        Omits the objects of deleted files and, if `names` contains the manifest of their folder, the whole folder.
        """
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
        self._known[name] = ObjectState(self.store.stamp(name), here)  # at once: another upload may fail

    def _gone(self, local: dict[str, LocalState]) -> list[str]:
        """Returns the objects whose local files were replaced, and the objects in the folder of a replaced manifest."""
        newest = newest_complete(local)
        deleted = (name for name, known in self._known.items() if known.local and name not in local)
        gone = [name for name in deleted if is_replaced(name, local, newest)]
        folders = tuple(f"{os.path.dirname(name)}/" for name in gone if rank_of(name) and "/" in name)
        return gone + [
            n for n, known in self._known.items() if known.local is None and folders and n.startswith(folders)
        ]

    def _retract(self, names: Iterable[str]) -> None:
        """Deletes objects in the store. Manifests and other lists of files are deleted before the listed files."""
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
                self._known[other] = ObjectState(known.remote, None)

    def _prune(self, file: str) -> None:
        """Removes the empty parent folders of a file."""
        with contextlib.suppress(OSError):  # a folder is not empty
            while file := os.path.dirname(file):
                os.rmdir(path_below(self.root, file))

    def _move_aside(self, names: Collection[str]) -> None:
        """Moves the files of objects that the store has lost out of the local copy, and prints their new folder."""
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
        """Writes the record file of the local copy, if the record has changed."""
        record = record_text(self.store.url, self.lease, self._known)
        has_content = bool(self._known or self.lease or self._recorded)
        if record != self._recorded and has_content:
            with local_errors(self._copy.record):
                write_atomically(self._copy.record, record)
            self._recorded = record
