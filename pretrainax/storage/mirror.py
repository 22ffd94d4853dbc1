"""Synchronizes a local copy of an object-store folder with the store by downloading and uploading files.

All code that reads and writes a run's files uses the local copy (a `Mirror`), as if there were no store. The copy's
record (`record.py`) contains the state of each object at its last download or upload. Some files list other files: a
checkpoint's manifest, a corpus index, or an export's config.json. Such a list is uploaded after the listed files, and
deleted before them, so that a reader that finds a list in the store also finds all listed files.

A loss in the store or on this machine, such as an emptied bucket or a removed cache, never deletes the last copy of a
file. A file that is missing in one place is deleted in the other place only if something has replaced it: a newer
complete checkpoint, another save of the same step, or fewer parts of metrics.jsonl. Otherwise the file is uploaded or
downloaded again, or moved to a new folder, whose path is printed.
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

LOST = Stamp(-1, "")  # stamp of an object that a manifest in the store lists, but that is missing in the store
SENDING = ".sending"  # name prefix of the folders with hard links to files during their upload
_NUM_THREADS = 8
_MAX_LISTINGS = 20  # attempts to download while the store changes; a run deletes at most one checkpoint per save


class ObjectDeleted(RunFailed):
    """Raised if an object was deleted after it was listed."""


class Mirror:
    """A local folder that mirrors a folder in a store. Its methods are thread-safe."""

    def __init__(self, url: str, copy: Copy, is_at_work: bool = False):
        self.store, self.root, self._paths, self.is_working_copy = Store(url), copy.root, copy, is_at_work
        self._lock = threading.RLock()
        self._states, self.lease = read_record(copy.record, self.store.url)  # lease: the last lease number; 0: none
        self._written_record = ""

    def pull(self, lazy: bool = True) -> bool:
        """Updates the local copy from the store; returns True if the store has any objects.

        lazy: if True, leaves all downloads to `complete`; if False, downloads all files except checkpoint arrays.

        Raises:
          UserError: an object's name is not a valid file name.
          RunFailed: a local file cannot be written, or objects are deleted faster than they are downloaded.
        """
        with self._lock:
            for retries in reversed(range(_MAX_LISTINGS)):
                remote = self._list_objects()
                try:
                    self._apply_listing(remote, lazy)
                    break
                except ObjectDeleted:
                    if not retries:
                        raise
            self._write_record()
            return bool(remote)

    def _list_objects(self) -> dict[str, Stamp]:
        return {name: stamp for name, stamp in self.store.objects().items() if not name.startswith(f"{LEASES}/")}

    def _apply_listing(self, remote: dict[str, Stamp], lazy: bool) -> None:
        """Removes files that were replaced in the store, moves aside those lost from it, and downloads new ones."""
        local, classifier = self._scan(), ObjectStatus(remote, self._read, self.root)
        lost_names: list[str] = []
        damaged: list[str] = []
        for name, state in list(self._states.items()):
            if remote.get(name, LOST) == state.remote and state.local in (None, local.get(name)):
                continue
            del self._states[name]
            status = classifier.status(name)
            if status == "lost" and name in local:
                lost_names.append(name)
            elif status == "replaced":
                self._remove(name)
            elif status == "vouched" and (name in remote or not self.is_working_copy):  # a run uploads them again
                stamp = remote.get(name, LOST)
                damaged += [name] if stamp.size != local[name].size else []  # same size: the content may be equal
                self._states[name] = ObjectState(stamp, local[name])
        if damaged:
            print_message(
                f"{self.store.url} has lost or damaged {count_text(damaged)}, which its manifest lists: the local "
                f"copies stay in {self.root}"
            )
        self._move_lost(lost_names)
        for name, stamp in remote.items():
            self._states.setdefault(name, ObjectState(stamp, None))
        if not lazy:
            self._download([name for name in remote if not ARRAYS.fullmatch(name)])

    def reconcile(self) -> None:
        """Repairs losses in the store and the local copy; call only if this was the last machine that trained.

        The next `push` uploads files whose objects were lost or changed in the store. Local files that are missing
        without a newer replacement are downloaded again.
        """
        with self._lock:
            remote, local = self._list_objects(), self._scan()
            newest, lost, missing = newest_complete(local), [], []
            for name, state in list(self._states.items()):
                if name in local and state.local == local[name] and remote.get(name) != state.remote:
                    lost.append(name)
                    del self._states[name]
                elif state.local is not None and name not in local and not is_replaced(name, local, newest):
                    missing.append(name)
                    self._states[name] = ObjectState(remote.get(name, state.remote), None)
                if self._states.get(name, state).local is None and name not in remote:
                    self._states.pop(name, None)
            if lost:
                print_message(
                    f"{self.store.url} has lost or changed {count_text(lost)} that this machine has sent: sending from "
                    f"{self.root} again. To start a new run instead, delete that folder, or set another --workdir"
                )
            if missing := [name for name in missing if name in self._states]:
                print_message(f"{self.root} has lost {count_text(missing)} that {self.store.url} has: fetching again")
                self._download([name for name in missing if not ARRAYS.fullmatch(name)])
            self._write_record()

    def is_ahead(self) -> bool:
        """Returns True if the store is empty or its newest complete checkpoint is older than the local one."""
        remote = self._list_objects()
        local_step, remote_step = (max(newest_complete(names).values(), default=-1) for names in (self._scan(), remote))
        return local_step > remote_step or not remote

    def move_to_new_folder(self) -> str:
        """Moves the local copy to a new folder and clears the record; returns the copy's new path."""
        with self._lock:
            os.makedirs(new_folder := self._paths.new_aside(), mode=0o700)
            os.rename(self.root, new_path := os.path.join(new_folder, self._paths.name))
            self._states, self.lease = {}, 0
            self._write_record()
            return new_path

    def last_uploaded_step(self) -> Optional[int]:
        """Returns the step of the newest complete checkpoint in the store, or None if there is none."""
        return max(newest_complete(dict(self._states)).values(), default=None)  # a copy: another thread may change it

    def complete(self, folder: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Downloads the missing files below a folder of the local copy.

        wanted: returns True for the files to download, given a file name relative to the folder.
        """
        prefix = self._name_prefix(folder)
        with self._lock:
            self._download([n for n in self._states if n.startswith(prefix) and wanted(n[len(prefix) :])])
            self._write_record()

    def follow(self) -> None:
        """Updates the local copy from the store and deletes local files that were never uploaded.

        Uploaded files that the store has lost are kept if a manifest in the store lists them; `push` re-uploads them.
        """
        with self._lock:
            unsent = self._scan().keys() - self._states.keys()
            self.pull(lazy=False)
            for name in unsent - self._states.keys():
                self._remove(name)

    def read_sent(self, folder: str, names: Collection[str]) -> Optional[dict[str, bytes]]:
        """Reads files that other processes upload to a folder; returns {name: content}, or None until all exist."""
        prefix = self._name_prefix(folder)
        if {prefix + name for name in names} <= self.store.objects(os.path.dirname(prefix + min(names))).keys():
            return {name: self.store.read(prefix + name) for name in names}
        return None

    def finish_folder(self, folder: str, staging: str, names: Iterable[str]) -> None:
        """Renames the staging folder of a checkpoint to `folder`, after all processes have uploaded the files `names`.

        The staging folder may lack the files of other processes. Deletes all objects below `folder` in the store that
        are not in `names`, because they come from an earlier attempt to save.
        """
        prefix = self._name_prefix(folder)
        expected = {prefix + name for name in names}
        with self._lock:
            remote = self.store.objects(prefix.rstrip("/"))
            if missing_names := sorted(expected - remote.keys()):
                raise RunFailed(f"{self.store.url}/{missing_names[0]}, which another process has sent, is gone")
            self._states |= {name: ObjectState(stamp, None) for name, stamp in remote.items()}
            self._delete_objects(remote.keys() - expected)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(staging, folder)
            self._states |= {name: ObjectState(remote[name], self._scan_one(name)) for name in expected}
            self._write_record()

    def discard_unfinished(self) -> None:
        """Deletes incomplete checkpoints in the store and locally, so that no reader finds them."""
        with self._lock:
            listing = self.store.objects("checkpoints")
            folders = {name: f"{match[1]}/{match[2]}" for name in listing if (match := STEP.fullmatch(name))}
            complete = {os.path.dirname(n) for n in (*folders, *self._scan()) if os.path.basename(n) == MANIFEST}
            # The listing may be outdated, so each missing manifest is requested before its folder is deleted.
            complete |= {folder for folder in {*folders.values()} - complete if self.store.has(f"{folder}/{MANIFEST}")}
            incomplete = {name: folder for name, folder in folders.items() if folder not in complete}
            for folder in set(incomplete.values()):
                shutil.rmtree(path_below(self.root, folder), ignore_errors=True)
            self._states |= {name: ObjectState(listing[name], None) for name in incomplete}
            self._delete_objects(incomplete)
            self._write_record()

    def _name_prefix(self, folder: str) -> str:
        """Returns the name prefix of all objects below a folder of the local copy, or "" for the root of the copy."""
        relative_path = os.path.relpath(folder, self.root)
        return "" if relative_path == os.curdir else f"{relative_path}/"

    def fetch(self, names: Collection[str]) -> None:
        """Downloads the objects `names` whose current versions are not local."""
        with self._lock:
            for name in names:
                stamp = self._stamp(name)
                state = self._states.get(name)
                if state is None or state.remote != stamp or state.local != self._scan_one(name):
                    self._states[name] = ObjectState(stamp, None)
            self._download(names)
            self._write_record()

    def move_aside(self, paths: Collection[str]) -> None:
        """Moves local files that are missing in the store out of the local copy; prints the new folder."""
        with self._lock:
            self._move_lost(names := [os.path.relpath(path, self.root) for path in paths])
            for name in names:
                self._states.pop(name, None)
            self._write_record()

    def push(self, deletes: bool = True) -> None:
        """Uploads new and changed files; if `deletes`, then also deletes the objects of files that a run deleted.

        Hard links preserve the files until their upload ends. Otherwise, with a slow store, a run might delete each
        checkpoint before its upload ends, and the store would never contain a complete checkpoint.
        """
        with self._lock, tempfile.TemporaryDirectory(prefix=SENDING, dir=self._paths.folder) as link_folder:
            local = self._repair_damaged(self._scan())
            changed_names = self._link_files(self._changed_names(local), link_folder)
            self._delete_objects(name for name in changed_names if rank_of(name))
            for rank in sorted({rank_of(name) for name in changed_names}):
                self._upload({name: local[name] for name in changed_names if rank_of(name) == rank}, link_folder)
            if deletes:
                self._delete_objects(self._replaced_names(local))
            self._write_record()

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Reads byte ranges (local path, start, stop) from the store; the files need not exist locally."""
        named = [(os.path.relpath(path, self.root), start, stop) for path, start, stop in ranges]
        try:
            return self.store.read_ranges(named)
        except FileNotFoundError as e:
            raise ObjectDeleted(f"one of {named[0][0]} to {named[-1][0]} is no longer in {self.store.url}") from e

    def evict(self, path: str) -> None:
        """Deletes a local file if it has not changed since its last transfer; `complete` can download it again."""
        name = os.path.relpath(path, self.root)
        with self._lock:
            if (state := self._states.get(name)) is not None and state.local == self._scan_one(name):
                self._remove(name)
                self._states[name] = ObjectState(state.remote, None)
                self._write_record()

    def has_pending_uploads(self) -> bool:
        """Returns True if a local file is new or has changed since its last download or upload."""
        return bool(self._changed_names(self._scan()))

    def _repair_damaged(self, local: dict[str, LocalState]) -> dict[str, LocalState]:
        """Re-downloads damaged local files of complete checkpoints; returns {object name: local state}.

        A save rewrites all files of a step. If the store has a step's manifest and only some of the step's files have
        changed since their upload, then they were not changed by a save, so they must be damaged.
        """
        steps = {name: step_of(name) for name in local}
        intact = {steps[name] for name, state in self._states.items() if name in local and state.local == local[name]}
        complete_steps = {step_of(name) for name in self._states if os.path.basename(name) == MANIFEST}
        changed_names = [name for name in self._changed_names(local) if name in self._states]
        if not (damaged := [name for name in changed_names if steps[name] in intact & complete_steps - {""}]):
            return local
        print_message(f"{count_text(damaged)} in {self.root} changed after the save: fetching from {self.store.url}")
        for name in damaged:
            self._states[name] = ObjectState(self._states[name].remote, None)
        self._download(damaged)
        return self._scan()

    def _changed_names(self, local: dict[str, LocalState]) -> list[str]:
        return [name for name, state in local.items() if name not in self._states or self._states[name].local != state]

    # --- objects and files -------------------------------------------------------------------------------------------

    def _scan(self) -> dict[str, LocalState]:
        """Scans the finished files of the local copy; returns {object name: local state}."""
        states: dict[str, LocalState] = {}
        for folder, folders, files in os.walk(self.root):
            folders[:] = sorted(name for name in folders if not is_unfinished(name))
            for file in sorted(files):
                if not is_unfinished(file):
                    with contextlib.suppress(FileNotFoundError):  # the file was deleted after its folder was listed
                        states |= self._file_states(os.path.relpath(os.path.join(folder, file), self.root))
        return states

    def _scan_one(self, name: str) -> Optional[LocalState]:
        with contextlib.suppress(FileNotFoundError):
            return self._file_states(file_of(name)).get(name)
        return None

    def _file_states(self, file: str) -> dict[str, LocalState]:
        """Returns {object name: local state} for a file: a single object, or one object per part of metrics.jsonl."""
        path = path_below(self.root, file)
        if os.path.basename(file) != GROWING_FILE:
            stat = os.stat(path)
            return {file: LocalState(stat.st_size, stat.st_mtime_ns)}
        with open(path, "rb") as f:
            parts = enumerate(iter(lambda: f.read(PART), b""))
            return {f"{file}.{i:05d}": LocalState(len(part), zlib.crc32(part)) for i, part in parts}

    def _download(self, names: Collection[str]) -> None:
        """Downloads those objects that are not local; raises ObjectDeleted if one was deleted in the meantime."""
        missing_names = [name for name in names if self._states[name].local is None]
        self._check_free_space(sum(self._states[name].remote.size for name in missing_names))
        with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
            list(pool.map(self._download_one, (name for name in missing_names if file_of(name) == name)))
        for file in sorted({file_of(name) for name in missing_names if file_of(name) != name}):
            self._download_parts(file)

    def _check_free_space(self, needed: int) -> None:
        if needed > (free := shutil.disk_usage(self._paths.folder).free):
            raise RunFailed(
                f"{self.store.url}: {needed:,} bytes are to be fetched, but {self._paths.folder} has only {free:,} "
                "free: make room there, or set XDG_CACHE_HOME (runs: config.checkpoint.local_dir) to a larger disk"
            )

    def _download_one(self, name: str) -> None:
        """Downloads an object, again if a run rewrites it (such as a plot) in the meantime."""
        path, stamp = path_below(self.root, name), self._states[name].remote
        while True:
            with self._deletion_errors(name):
                self.store.get(name, path)
            if (size := os.path.getsize(path)) == stamp.size:
                break
            previous_stamp, stamp = stamp, self._stamp(name)
            if stamp == previous_stamp:
                os.remove(path)
                raise RunFailed(
                    f"{self.store.url}/{name} has {stamp.size:,} bytes, and {size:,} came: run the same command again"
                )
        self._states[name] = ObjectState(stamp, self._file_states(name)[name])

    def _download_parts(self, file: str) -> None:
        """Assembles an append-only file from its parts, up to the first part that is missing or short."""
        parts = sorted(name for name in self._states if file_of(name) == file)
        count = 0
        while count < len(parts) and parts[count] == f"{file}.{count:05d}":
            count += 1
            if self._states[parts[count - 1]].remote.size != PART:
                break
        if orphans := parts[count:]:
            message = (
                f"{self.store.url} has {orphans[0]}, but not all of {file} before it: lines are lost. To continue with "
                f"the lines before the gap, delete {orphans[0]} and the parts after it there"
            )
            if self.is_working_copy:
                raise RunFailed(message)
            print_message(f"{message}; this command leaves them out")
        path = path_below(self.root, file)
        with local_errors(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_atomically(path, b"".join(map(self._read, parts[:count])))
        for name, local_state in self._file_states(file).items():
            self._states[name] = ObjectState(self._states[name].remote, local_state)

    def _stamp(self, name: str) -> Stamp:
        with self._deletion_errors(name):
            return self.store.stamp(name)

    def _read(self, name: str) -> bytes:
        with self._deletion_errors(name):
            return self.store.read(name)

    @contextlib.contextmanager
    def _deletion_errors(self, name: str) -> Iterator[None]:
        """Converts a FileNotFoundError inside the context to ObjectDeleted, with the object's name in the message."""
        try:
            yield
        except FileNotFoundError as e:
            raise ObjectDeleted(
                f"{self.store.url}/{name} was deleted while it was fetched: run the same command again"
            ) from e

    def _link_files(self, names: list[str], link_folder: str) -> list[str]:
        """Hard-links the local files of objects into `link_folder`; returns the names of the objects to upload.

        Omits objects whose local files were deleted. If any file of a folder was deleted and `names` contains the
        folder's manifest (or other list of files), omits all objects of the folder.
        """
        deleted: set[str] = set()
        for file in dict.fromkeys(map(file_of, names)):
            link = os.path.join(link_folder, file)
            os.makedirs(os.path.dirname(link), exist_ok=True)
            try:
                os.link(os.path.join(self.root, file), link)
            except FileNotFoundError:
                deleted.add(file)
        list_folders = [os.path.dirname(name) for name in names if rank_of(name) and "/" in name]
        skipped = tuple(f"{path}/" for path in list_folders if any(file.startswith(f"{path}/") for file in deleted))
        return [name for name in names if file_of(name) not in deleted and not (skipped and name.startswith(skipped))]

    def _upload(self, files: dict[str, LocalState], link_folder: str) -> None:
        with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
            list(pool.map(lambda name: self._upload_object(name, files[name], link_folder), files))

    def _upload_object(self, name: str, local_state: LocalState, link_folder: str) -> None:
        path = os.path.join(link_folder, file_of(name))
        if match := PART_NAME.fullmatch(name):
            with open(path, "rb") as f:
                f.seek(int(match[2]) * PART)
                self.store.write(name, f.read(PART))
        else:
            self.store.put(path, name)
        self._states[name] = ObjectState(self.store.stamp(name), local_state)  # now: another upload may fail

    def _replaced_names(self, local: dict[str, LocalState]) -> list[str]:
        """Returns the objects whose local files were replaced, and all objects in a replaced manifest's folder."""
        newest = newest_complete(local)
        deleted = (name for name, state in self._states.items() if state.local and name not in local)
        replaced = [name for name in deleted if is_replaced(name, local, newest)]
        folders = tuple(f"{os.path.dirname(name)}/" for name in replaced if rank_of(name) and "/" in name)
        return replaced + [
            n for n, state in self._states.items() if state.local is None and folders and n.startswith(folders)
        ]

    def _delete_objects(self, names: Iterable[str]) -> None:
        """Deletes objects in the store, starting with manifests and other lists of files."""
        known_names = sorted({name for name in names if name in self._states}, key=rank_of, reverse=True)
        for name in known_names:
            self.store.delete([name])
            del self._states[name]

    def _remove(self, name: str) -> None:
        file = file_of(name)
        path = path_below(self.root, file)
        with local_errors(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.remove(path)
        self._remove_empty_parents(file)
        for other, state in self._states.items():  # the other parts of the same file are no longer local
            if file != name and file_of(other) == file:
                self._states[other] = ObjectState(state.remote, None)

    def _remove_empty_parents(self, file: str) -> None:
        """Removes a file's parent folders that are empty."""
        with contextlib.suppress(OSError):  # stops at the first folder that is not empty
            while file := os.path.dirname(file):
                os.rmdir(path_below(self.root, file))

    def _move_lost(self, names: Collection[str]) -> None:
        """Moves local files whose objects disappeared from the store out of the local copy; prints the new folder."""
        if not names:
            return
        new_folder, lost_files = self._paths.new_aside(), dict.fromkeys(map(file_of, names))
        steps = {*map(step_of, names)} - {""}
        other_files = [name for name in self._scan() if step_of(name) in steps and name not in lost_files]
        for file in (*lost_files, *other_files):
            target = path_below(os.path.join(new_folder, self._paths.name), file)
            with local_errors(target):
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                # Linked, not moved: the store has these files, but the checkpoint in the new folder also needs them.
                (os.rename if file in lost_files else os.link)(path_below(self.root, file), target)
            self._remove_empty_parents(file)
        print_message(f"{self.store.url} has lost {count_text(names)}: the local copies are now in {new_folder}")

    def _write_record(self) -> None:
        """Writes the local copy's record if it has changed."""
        record = record_text(self.store.url, self.lease, self._states)
        has_content = bool(self._states or self.lease or self._written_record)
        if record != self._written_record and has_content:
            with local_errors(self._paths.record):
                write_atomically(self._paths.record, record)
            self._written_record = record
