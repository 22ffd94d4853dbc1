"""Converts object-store URLs and hub model names to local paths; commands use it for every path that a user gives.

A folder in an object store has a local copy (`storage.mirror.Mirror`). The functions in this module download files to
the copy, and upload its new files to the store. Paths that are already local are returned unchanged.
"""

import contextlib
import fcntl
import glob
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Optional

from pretrainax.files.errors import RunFailed, UserError
from pretrainax.files.paths import is_hub, is_url, path_problem
from pretrainax.storage import copies, hub
from pretrainax.storage.copies import Copy, copy_of
from pretrainax.storage.lease import Lease
from pretrainax.storage.mirror import SENDING, Mirror
from pretrainax.storage.store import Store, local_errors, print_message

UPLOAD_PERIOD = 5.0  # seconds between the uploads of a run
WARNING_PERIOD = 300.0  # seconds after which the warning about failing uploads is repeated
_CHECKPOINT = re.compile(r"@\w*")  # optional suffix of a run's path that selects a checkpoint: @2000, @best
_WILDCARD = re.compile(r"[*?[]")


def local_path(path: str) -> str:
    """Downloads a URL's current content and returns its local path; returns a local path unchanged.

    A URL may name a folder, a run's checkpoint (RUN@2000), an object, or several objects by a pattern (*.txt). For a
    model on the Hugging Face Hub (hf:org/name@revision), the result is the model's cache folder. The arrays of
    checkpoints and the weights of hub models are not downloaded here, but by `complete`.

    Raises:
      UserError, RunFailed: for the same reasons as `Store` and `hub.folder_of`.
    """
    if is_hub(path):
        return hub.folder_of(path)
    if not is_url(path):
        return path
    if problem := path_problem(path):
        raise UserError(f"{path}: {problem}")
    folder, slash, last_component = path.rstrip("/").rpartition("/")
    url, at, checkpoint = path.rstrip("/"), "", ""
    if (cut := last_component.rfind("@")) > 0 and _CHECKPOINT.fullmatch(last_component[cut:]):
        url, at, checkpoint = f"{folder}/{last_component[:cut]}", "@", last_component[cut + 1 :]
    if _WILDCARD.search(path):
        return _fetch_matches(path)
    if folder.count("/") > 1 and Store(url).is_object():
        mirror = _mirror_for_reading(folder)
        mirror.fetch([last_component])
        return os.path.join(mirror.root, last_component)
    mirror = _mirror_for_reading(url)
    mirror.pull(lazy=False)
    return f"{mirror.root}{at}{checkpoint}"


def _fetch_matches(pattern: str) -> str:
    """Downloads the objects that match a URL with wildcards; returns the equivalent pattern for the local files."""
    folder = pattern[: _WILDCARD.search(pattern).start()].rpartition("/")[0]  # type: ignore[union-attr]
    mirror, relative_pattern = _mirror_for_reading(folder), pattern[len(folder) + 1 :]
    mirror.fetch(names := mirror.store.matches(relative_pattern))
    local = os.path.join(glob.escape(mirror.root), relative_pattern)
    matches = {os.path.join(mirror.root, name) for name in names}
    mirror.move_aside(
        [path for path in glob.glob(local, recursive=True) if os.path.isfile(path) and path not in matches]
    )
    return local


def refresh(path: str) -> None:
    """Updates the local copy that contains a path from the store.

    Does nothing if no local copy contains the path, or if the copy is the one in which this process trains.
    """
    if (mirror := mirror_of(path)) is not None and not mirror.is_working_copy:
        mirror.pull(lazy=False)


def complete(path: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Downloads what is missing below a path: files of a local copy, or the weights of a model in the hub's cache.

    Does nothing for any other folder.

    wanted: returns True for the files to download from a URL, given a file name relative to `path`.
    """
    hub.download_weights(path)
    if (mirror := mirror_of(path)) is not None:
        mirror.complete(path, wanted)


@contextlib.contextmanager
def uploaded_output(path: str) -> Iterator[str]:
    """Yields a local path for a command's output; if `path` is a URL, uploads new files on exit.

    The output is a folder or a file. For a file, new files in the same folder whose names differ only in the suffix,
    such as a report's page and image, are also uploaded.
    """
    if not is_url(path):
        yield path
        return
    local = local_path(path)
    mirror, marker, files_before = _mirror_for_reading(path), copy_of(path, "read").complete, _files_with_stem(local)
    if os.path.exists(marker):  # an earlier command was killed while it uploaded its output
        _upload_output(mirror, marker)
    elif os.path.isdir(local):
        mirror.follow()  # deletes incomplete output of a killed command
    yield local
    if os.path.isdir(local):
        open(marker, "w").close()
        _upload_output(mirror, marker)
    for name in dict(_files_with_stem(local).items() - files_before.items()):
        file = os.path.join(os.path.dirname(local), name)
        Store(path.rpartition("/")[0]).put(file, name)
        if local == mirror.root:  # otherwise the file belongs to the local copy of its folder, and remains
            os.remove(file)


def _files_with_stem(path: str) -> dict[str, tuple[int, int]]:
    """Returns {name: (size, mtime in ns)} for the files next to `path` whose names differ only in the suffix.

    The result includes the file at `path` if it exists.
    """
    stem = os.path.splitext(os.path.basename(path))[0]
    with os.scandir(os.path.dirname(path)) as entries:
        files = [file for file in entries if os.path.splitext(file.name)[0] == stem and file.is_file()]
        return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def _upload_output(mirror: Mirror, marker: str) -> None:
    """Uploads a local copy's new files without deleting anything in the store, then deletes the file `marker`.

    The marker file therefore exists until all of a command's output has been uploaded.
    """
    mirror.push(deletes=False)
    os.remove(marker)


@contextlib.contextmanager
def lazy_folder(path: str) -> Iterator[str]:
    """Yields a folder's local copy without downloading its files; uploads new files on exit.

    `complete` downloads files on demand. A path that is not a URL is yielded unchanged.
    """
    if not is_url(path):
        yield path
        return
    mirror = _mirror_for_reading(path)
    mirror.pull()
    yield mirror.root
    mirror.push(deletes=False)


@contextlib.contextmanager
def working_copy(path: str, folder: Optional[str] = None, process: int = 0) -> Iterator[str]:
    """Yields the folder to train in: for a URL, a local copy that is uploaded during the run and on exit.

    If this was the last machine that trained at the URL, the run continues from the local files, which are newer than
    the store. Otherwise the run continues from the store, and a local copy with files that were never uploaded is moved
    to a different folder.

    Args:
      path: URL or local path; a local path is yielded unchanged.
      folder: base folder of the local copies, by default in the user's cache directory.
      process: index of this process. Process 0 starts first. Each process has its own local copy. Processes other than
        0 only upload their own files, and delete nothing in the store.

    Raises:
      UserError, RunFailed: for the same reasons as `Store`, or because another run uses the URL or the local copy.
      RunFailed: the last upload failed; the message contains the path of the local copy.
    """
    if not is_url(path):
        yield path
        return
    copy = copy_of(path, "work", folder, process)
    with _exclusive_lock(copy), contextlib.ExitStack() as stack:
        for link_folder in glob.glob(os.path.join(glob.escape(copy.folder), f"{SENDING}*")):  # of a killed process
            shutil.rmtree(link_folder, ignore_errors=True)
        lease = None if process else stack.enter_context(Lease(Store(path), copy.root))
        mirror = _mirror_at(path, copy, is_working_copy=True)
        if lease:
            _synchronize_at_start(mirror, lease)
            print_message(f"{path} has a local copy in {copy.root}; new files are sent every {UPLOAD_PERIOD:.0f} s")
        else:
            mirror.follow()
        os.makedirs(copy.root, exist_ok=True)
        _uploaders[copy.root] = stack.enter_context(_Uploader(mirror, lease))
        stack.callback(_uploaders.pop, copy.root)
        yield copy.root


def upload_soon(path: str) -> None:
    """Uploads the working copy that contains a path right away, instead of after UPLOAD_PERIOD."""
    if (mirror := mirror_of(path)) is not None and mirror.root in _uploaders:
        _uploaders[mirror.root].wake.set()


def is_working_copy(path: str) -> bool:
    """Returns True if `path` is inside this process's working copy, the local copy in which it trains.

    Each process of a run has its own working copy.
    """
    return (mirror := mirror_of(path)) is not None and mirror.root in _uploaders


@contextlib.contextmanager
def process_zero_first(path: str) -> Iterator[None]:
    """Runs the body of the context in process 0, uploads the new files, then runs it in the other processes.

    The processes do not wait for each other if `path` is outside this process's working copy.
    """
    is_first = (
        (mirror := mirror_of(path)) is None or (uploader := _uploaders.get(mirror.root)) is None or uploader.lease
    )
    if not is_first:
        synchronize(path)
    yield
    if is_first:
        synchronize(path)


def synchronize(path: str) -> None:
    """Synchronizes the working copy that contains a path: process 0 uploads new files, the others download them."""
    if (mirror := mirror_of(path)) is not None and (uploader := _uploaders.get(mirror.root)):
        uploader.push() if uploader.lease else mirror.pull(lazy=False)


def with_urls(text: str) -> str:
    """Replaces the paths of local copies in a message with their URLs."""
    for root, mirror in _mirrors.items():
        url = mirror.store.url
        for folder, name in ((root, url), (os.path.dirname(root), url.rpartition("/")[0])):
            text = re.sub(rf"{re.escape(folder)}(?![\w-])", lambda _, name=name: name, text)
    return text


def last_uploaded_step(path: str) -> Optional[int]:
    """Returns the step of the newest complete checkpoint in the store of the run whose local copy contains a path.

    Returns None if the store has no complete checkpoint, or if no local copy contains the path.
    """
    return mirror.last_uploaded_step() if (mirror := mirror_of(path)) is not None else None


def upload_status(path: str) -> str:
    """Formats `last_uploaded_step` as "last sent: step 2,000", or "" if no local copy contains the path."""
    return "" if (mirror := mirror_of(path)) is None else _sent_text(mirror)


def _sent_text(mirror: Mirror) -> str:
    return (
        "no checkpoint was sent yet" if (step := mirror.last_uploaded_step()) is None else f"last sent: step {step:,}"
    )


def _synchronize_at_start(mirror: Mirror, lease: Lease) -> None:
    """Updates whichever is older, the local copy or the store, once this process has acquired the lease."""
    url = mirror.store.url
    if mirror.lease and (lease.previous == mirror.lease or not lease.previous and mirror.is_ahead()):
        mirror.reconcile()
    else:
        if mirror.has_pending_uploads():
            new_path = mirror.move_to_new_folder()
            print_message(
                f"{url} was continued elsewhere since this machine last sent to it: files that were not sent are now "
                f"in {new_path}"
            )
        mirror.pull(lazy=False)
    mirror.lease = lease.number
    mirror.discard_unfinished()
    mirror.push()


@contextlib.contextmanager
def _exclusive_lock(copy: Copy) -> Iterator[None]:
    """Locks a local copy against this machine's other processes; raises RunFailed if one of them has the lock."""
    with local_errors(copy.lock):
        lock = open(copy.lock, "w")
    with lock as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise RunFailed(
                f"{copy.root} is in use by another process of this machine: wait for its end, or stop it"
            ) from e
        yield


class _Uploader:
    """Context manager that uploads a run's new files from a thread every UPLOAD_PERIOD seconds and on exit.

    The thread retries after any failure.
    """

    def __init__(self, mirror: Mirror, lease: Optional[Lease]):
        """Prepares the thread; `lease` is the run's lease in process 0, and None in all other processes."""
        self._mirror, self.lease = mirror, lease
        self._stopped, self.wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._upload_periodically, name="sender", daemon=True)
        self._last_upload = time.monotonic()  # time of the last complete upload
        self._last_warning: Optional[float] = None  # time of the last message about a failure

    def __enter__(self) -> "_Uploader":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stopped.set()
        self.wake.set()
        self._thread.join()
        try:
            self.push()
            if self.lease:
                print_message(f"{self._mirror.store.url} has all files ({_sent_text(self._mirror)})")
        except Exception as e:
            print_message(f"files that were not sent are in {self._mirror.root}")
            raise RunFailed(
                f"{_error_text(e)}; run the same command on this machine to continue and send the rest"
            ) from e

    def push(self) -> None:
        if self.lease:
            self.lease.check()
        self._mirror.push(deletes=self.lease is not None)
        if self._last_warning is not None:
            print_message(
                f"{self._mirror.store.url} has all files again, after {time.monotonic() - self._last_upload:,.0f} s"
            )
        self._last_upload, self._last_warning = time.monotonic(), None

    def _upload_periodically(self) -> None:
        while not self._stopped.is_set():
            self.wake.wait(UPLOAD_PERIOD)
            self.wake.clear()
            try:
                self.push()
            except Exception as e:  # of any class: without uploads, the run is lost with its machine
                self._warn(_error_text(e))

    def _warn(self, reason: str) -> None:
        """Prints why and since when uploads fail, at the first failure and then every WARNING_PERIOD seconds."""
        now = time.monotonic()
        if self._last_warning is not None and now - self._last_warning < WARNING_PERIOD:
            return
        self._last_warning = now
        print_message(
            f"{reason}; nothing was sent for {now - self._last_upload:,.0f} s ({_sent_text(self._mirror)}): the run "
            f"continues in {self._mirror.root}, and retries every {UPLOAD_PERIOD:.0f} s"
        )


def _error_text(error: Exception) -> str:
    """Returns an error's message, preceded by the class name unless it is a UserError."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


_uploaders: dict[str, _Uploader] = {}  # uploaders of this process, by root of the local copy
# local copies of this process, by root; a second `Mirror` of the same folder would have a different record
_mirrors: dict[str, Mirror] = {}


def _mirror_at(url: str, copy: Copy, is_working_copy: bool = False) -> Mirror:
    mirror = _mirrors.get(copy.root)
    if mirror is None or mirror.store.url != url.rstrip("/"):
        mirror = _mirrors[copy.root] = Mirror(url, copy)
    mirror.is_working_copy = mirror.is_working_copy or is_working_copy
    return mirror


def _mirror_for_reading(url: str) -> Mirror:
    """Returns the local copy that commands use to read a URL, which is separate from a run's working copy."""
    Store(url)  # raises UserError for an invalid URL, before it becomes a path
    return _mirror_at(url, copy_of(url, "read"))


def mirror_of(path: str) -> Optional[Mirror]:
    """Returns the local copy that contains a local path, or None if there is none."""
    folder = os.path.abspath(path)
    while folder != (parent := os.path.dirname(folder)):
        if folder in _mirrors:
            return _mirrors[folder]
        folder = parent
    url_and_copy = copies.copy_containing(path)
    return _mirror_at(*url_and_copy) if url_and_copy else None
