"""Converts URLs of object stores and names of hub models to local paths; commands use it for every path of a user.

A folder in an object store has a local copy (`storage.mirror.Mirror`). The functions of this module download the copy,
and upload new files of the copy to the store. Paths that are local already are returned unchanged.
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

UPLOAD_PERIOD = 5.0  # seconds between two uploads
WARNING_PERIOD = 300.0  # seconds after which the warning about failing uploads is repeated
_CHECKPOINT = re.compile(r"@\w*")  # optional suffix of a run that selects a checkpoint: @2000, @best
_WILDCARD = re.compile(r"[*?[]")


def local_path(path: str) -> str:
    """Downloads the current content of a URL and returns its local path; returns a local path unchanged.

    A URL may name a folder, a checkpoint of a run (RUN@2000), an object, or several objects by a pattern (*.txt). For a
    model on the Hugging Face Hub (hf:org/name@revision), the result is the cache folder of the model. Arrays of
    checkpoints and weights of hub models are not downloaded here: `complete` downloads them.

    Raises:
      UserError, RunFailed: for the same reasons as `Store` and `hub.folder_of`.
    """
    if is_hub(path):
        return hub.folder_of(path)
    if not is_url(path):
        return path
    if problem := path_problem(path):
        raise UserError(f"{path}: {problem}")
    folder, slash, last = path.rstrip("/").rpartition("/")
    url, at, checkpoint = path.rstrip("/"), "", ""
    if (cut := last.rfind("@")) > 0 and _CHECKPOINT.fullmatch(last[cut:]):
        url, at, checkpoint = f"{folder}/{last[:cut]}", "@", last[cut + 1 :]
    if _WILDCARD.search(path):
        return _matching(path)
    if folder.count("/") > 1 and Store(url).is_object():
        twin = _reader(folder)
        twin.fetch([last])
        return os.path.join(twin.root, last)
    twin = _reader(url)
    twin.pull(lazy=False)
    return f"{twin.root}{at}{checkpoint}"


def _matching(pattern: str) -> str:
    """Downloads the objects that match the pattern of a URL; returns a pattern that matches the local files."""
    folder = pattern[: _WILDCARD.search(pattern).start()].rpartition("/")[0]  # type: ignore[union-attr]
    twin, rest = _reader(folder), pattern[len(folder) + 1 :]
    twin.fetch(names := twin.store.matches(rest))
    local = os.path.join(glob.escape(twin.root), rest)
    wanted = {os.path.join(twin.root, name) for name in names}
    twin.move_aside([path for path in glob.glob(local, recursive=True) if os.path.isfile(path) and path not in wanted])
    return local


def refresh(path: str) -> None:
    """Updates the local copy that contains a path from the store.

    Does nothing if no local copy contains the path, or if this process trains in the local copy.
    """
    if (twin := mirror_of(path)) is not None and not twin.is_at_work:
        twin.pull(lazy=False)


def complete(path: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Downloads the missing files below a folder, if it belongs to a local copy of a URL or to the cache of the hub.

    wanted: for a copy of a URL, returns True for the files to download; its argument is the file name relative to
      `path`.
    """
    hub.download_weights(path)
    if (twin := mirror_of(path)) is not None:
        twin.complete(path, wanted)


@contextlib.contextmanager
def uploaded_output(path: str) -> Iterator[str]:
    """Yields a local path for the output of a command; if `path` is a URL, uploads new files on exit.

    The output is a folder or a file. With a file, files whose names differ only in the suffix are also uploaded, such
    as the page and the image of a report.
    """
    if not is_url(path):
        yield path
        return
    local = local_path(path)
    twin, marker, before = _reader(path), copy_of(path, "read").complete, _same_stem(local)
    if os.path.exists(marker):  # an earlier command was killed while it uploaded its output
        _send_all(twin, marker)
    elif os.path.isdir(local):
        twin.follow()  # discards incomplete output of a killed command
    yield local
    if os.path.isdir(local):
        open(marker, "w").close()
        _send_all(twin, marker)
    for name in dict(_same_stem(local).items() - before.items()):
        file = os.path.join(os.path.dirname(local), name)
        Store(path.rpartition("/")[0]).put(file, name)
        if local == twin.root:  # otherwise the file belongs to the local copy of its folder
            os.remove(file)


def _same_stem(path: str) -> dict[str, tuple[int, int]]:
    """Returns {name: (bytes, modification time in ns)} of the files in the same folder that differ only in the suffix.

    The file itself is included, if it exists.
    """
    stem = os.path.splitext(os.path.basename(path))[0]
    with os.scandir(os.path.dirname(path)) as entries:
        files = [file for file in entries if os.path.splitext(file.name)[0] == stem and file.is_file()]
        return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def _send_all(twin: Mirror, marker: str) -> None:
    """Uploads new files of a local copy, deletes nothing in the store, then deletes the file `marker`.

    The marker exists until all output of a command is uploaded.
    """
    twin.push(deletes=False)
    os.remove(marker)


@contextlib.contextmanager
def lazy_folder(path: str) -> Iterator[str]:
    """Yields the local copy of a folder without downloading its files; uploads new files on exit.

    `complete` downloads files on demand. A path that is not a URL is yielded unchanged.
    """
    if not is_url(path):
        yield path
        return
    twin = _reader(path)
    twin.pull()
    yield twin.root
    twin.push(deletes=False)


@contextlib.contextmanager
def working_copy(path: str, folder: Optional[str] = None, process: int = 0) -> Iterator[str]:
    """Yields the folder to train in. For a URL, this is a local copy, uploaded during the run and on exit.

    If this machine was the last machine that trained at the URL, its files are newer than the files of the store and
    are used. Otherwise the files of the store are used. Local files that another run has made obsolete are moved to a
    different folder.

    Args:
      path: URL or local path; a local path is yielded unchanged.
      folder: base folder of the local copies; None: the cache of this user.
      process: index of this process. Process 0 starts first. Each process has its own local copy. The copies of the
        other processes mirror the store: each process uploads only its own files and deletes nothing in the store.

    Raises:
      UserError, RunFailed: for the same reasons as `Store`, or because another run uses the folder.
      RunFailed: the last upload failed; the message contains the path of the local copy.
    """
    if not is_url(path):
        yield path
        return
    copy = copy_of(path, "work", folder, process)
    with _alone(copy), contextlib.ExitStack() as stack:
        for links in glob.glob(os.path.join(glob.escape(copy.folder), f"{SENDING}*")):  # from a killed process
            shutil.rmtree(links, ignore_errors=True)
        lease = None if process else stack.enter_context(Lease(Store(path), copy.root))
        twin = _twin(path, copy, is_working_copy=True)
        if lease:
            _take_over(twin, lease)
            print_message(f"{path} has a local copy in {copy.root}; new files are sent every {UPLOAD_PERIOD:.0f} s")
        else:
            twin.follow()
        os.makedirs(copy.root, exist_ok=True)
        _senders[copy.root] = stack.enter_context(_Sender(twin, lease))
        stack.callback(_senders.pop, copy.root)
        yield copy.root


def upload_soon(path: str) -> None:
    """Starts the next upload of the working copy that contains a path now, instead of after UPLOAD_PERIOD seconds."""
    if (twin := mirror_of(path)) is not None and twin.root in _senders:
        _senders[twin.root].wake.set()


def is_working_copy(path: str) -> bool:
    """Returns True if a path is in the working copy of this process: the local copy of a URL that it trains in.

    Each process of a run has its own working copy.
    """
    return (twin := mirror_of(path)) is not None and twin.root in _senders


@contextlib.contextmanager
def process_zero_first(path: str) -> Iterator[None]:
    """Context manager that runs its body first in process 0, which then uploads new files, and then in other processes.

    Does not order the processes if `path` is outside the working copy of this process.
    """
    is_first = (twin := mirror_of(path)) is None or (sender := _senders.get(twin.root)) is None or sender.lease
    if not is_first:
        synchronize(path)
    yield
    if is_first:
        synchronize(path)


def synchronize(path: str) -> None:
    """Uploads new files of the working copy that contains a path in process 0; downloads them in other processes."""
    if (twin := mirror_of(path)) is not None and (sender := _senders.get(twin.root)):
        sender.push() if sender.lease else twin.pull(lazy=False)


def with_urls(text: str) -> str:
    """Replaces the paths of local copies in a message by their URLs."""
    for root, twin in _twins.items():
        url = twin.store.url
        for folder, name in ((root, url), (os.path.dirname(root), url.rpartition("/")[0])):
            text = re.sub(rf"{re.escape(folder)}(?![\w-])", lambda _, name=name: name, text)
    return text


def last_uploaded_step(path: str) -> Optional[int]:
    """Returns the step of the newest complete checkpoint in the store, for the run whose local copy contains a path.

    None if the store has no complete checkpoint yet, or if no local copy contains the path.
    """
    return twin.last_sent() if (twin := mirror_of(path)) is not None else None


def upload_status(path: str) -> str:
    """Returns `last_uploaded_step` as text: "last sent: step 2,000"; "" if no local copy of a URL contains the path."""
    return "" if (twin := mirror_of(path)) is None else _sent_line(twin)


def _sent_line(twin: Mirror) -> str:
    return "no checkpoint was sent yet" if (step := twin.last_sent()) is None else f"last sent: step {step:,}"


def _take_over(twin: Mirror, lease: Lease) -> None:
    """Updates the local copy or the store, whichever is older, after this process has acquired the lease of a run."""
    url = twin.store.url
    if twin.lease and (lease.previous == twin.lease or not lease.previous and twin.is_ahead()):
        twin.reconcile()
    else:
        if twin.has_pending_uploads():
            aside = twin.start_over()
            print_message(
                f"{url} was continued elsewhere since this machine last sent to it: files that were not sent are now "
                f"in {aside}"
            )
        twin.pull(lazy=False)
    twin.lease = lease.number
    twin.discard_unfinished()
    twin.push()


@contextlib.contextmanager
def _alone(copy: Copy) -> Iterator[None]:
    """Locks a local copy against other processes of this machine; raises RunFailed if another process has the lock."""
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


class _Sender:
    """Context manager whose thread uploads the new files of a run every UPLOAD_PERIOD seconds, and finally on exit.

    The thread retries after any failure.
    """

    def __init__(self, twin: Mirror, lease: Optional[Lease]):
        """Prepares the thread; `lease` is the lease that process 0 holds, and None in other processes."""
        self._twin, self.lease = twin, lease
        self._over, self.wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._live, name="sender", daemon=True)
        self._sent = time.monotonic()  # time of the last complete upload
        self._warned: Optional[float] = None  # time of the last message about a failure

    def __enter__(self) -> "_Sender":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self.wake.set()
        self._thread.join()
        try:
            self.push()
            if self.lease:
                print_message(f"{self._twin.store.url} has all files ({_sent_line(self._twin)})")
        except Exception as e:
            print_message(f"files that were not sent are in {self._twin.root}")
            raise RunFailed(f"{_reason(e)}; run the same command on this machine to continue and send the rest") from e

    def push(self) -> None:
        if self.lease:
            self.lease.check()
        self._twin.push(deletes=self.lease is not None)
        if self._warned is not None:
            print_message(f"{self._twin.store.url} has all files again, after {time.monotonic() - self._sent:,.0f} s")
        self._sent, self._warned = time.monotonic(), None

    def _live(self) -> None:
        while not self._over.is_set():
            self.wake.wait(UPLOAD_PERIOD)
            self.wake.clear()
            try:
                self.push()
            except Exception as e:  # of any class: without uploads, the run is lost with its machine
                self._warn(_reason(e))

    def _warn(self, reason: str) -> None:
        """Prints an upload failure and its duration, at the first failure and then every WARNING_PERIOD seconds."""
        now = time.monotonic()
        if self._warned is not None and now - self._warned < WARNING_PERIOD:
            return
        self._warned = now
        print_message(
            f"{reason}; nothing was sent for {now - self._sent:,.0f} s ({_sent_line(self._twin)}): the run "
            f"continues in {self._twin.root}, and retries every {UPLOAD_PERIOD:.0f} s"
        )


def _reason(error: Exception) -> str:
    """Returns the message of an error. The class name precedes it, except for a UserError."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


_senders: dict[str, _Sender] = {}  # senders of this process, by the root of the local copy
# local copies of this process, by root; two `Mirror` objects of one folder would have different records
_twins: dict[str, Mirror] = {}


def _twin(url: str, copy: Copy, is_working_copy: bool = False) -> Mirror:
    twin = _twins.get(copy.root)
    if twin is None or twin.store.url != url.rstrip("/"):
        twin = _twins[copy.root] = Mirror(url, copy)
    twin.is_at_work = twin.is_at_work or is_working_copy
    return twin


def _reader(url: str) -> Mirror:
    """Returns the local copy that commands use to read a URL; a working copy is separate from it."""
    Store(url)  # raises UserError for an invalid URL, before it becomes a path
    return _twin(url, copy_of(url, "read"))


def mirror_of(path: str) -> Optional[Mirror]:
    """Returns the local copy of a URL that contains a local path; None if no local copy contains it."""
    folder = os.path.abspath(path)
    while folder != (parent := os.path.dirname(folder)):
        if folder in _twins:
            return _twins[folder]
        folder = parent
    around = copies.copy_containing(path)
    return _twin(*around) if around else None
