"""Says where folders of stores and models of the hub are kept on this machine: called with every path of a user."""

import contextlib
import fcntl
import glob
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, Optional

from pretrainax.config.errors import RunFailed, UserError
from pretrainax.config.json_files import read_object
from pretrainax.config.paths import is_hub, is_url
from pretrainax.storage import hub
from pretrainax.storage.lease import Lease
from pretrainax.storage.store import Store, say
from pretrainax.storage.twin import KEPT, Twin

EVERY = 5.0  # seconds between two looks at what is to be sent
_CHECKPOINT = re.compile(r"@\w*")  # what may follow the name of a run
_MAGIC = re.compile(r"[*?[]")


def place_of(url: str, use: Literal["read", "work"], folder: Optional[str] = None) -> str:
    """Returns the folder of this machine where what is below a URL is kept.

    use: who reads a run gets other files than who trains it, perhaps at the same time.
    folder: below which they are; None: the cache of this user.
    """
    scheme, _, path = url.partition("://")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(folder or os.path.join(cache, "pretrainax", "stores"), use, scheme, path.strip("/"))


def here(path: str) -> str:
    """Returns the path itself, or of a URL that of its twin, which has what the store has now.

    A URL may be of a folder, of a run with @ and a checkpoint, of an object, or a pattern of several. Arrays of
    checkpoints come when `complete` asks for them. Of a model of the hub (hf:org/name@revision) it is the folder of its
    cache, whose weights come in that way, too.

    Raises:
      UserError, RunFailed: as `Store`, and `hub.folder_of`.
    """
    if is_hub(path):
        return hub.folder_of(path)
    if not is_url(path):
        return path
    folder, slash, last = path.rstrip("/").rpartition("/")
    url, at, which = path.rstrip("/"), "", ""
    if (cut := last.rfind("@")) > 0 and _CHECKPOINT.fullmatch(last[cut:]):
        url, at, which = f"{folder}/{last[:cut]}", "@", last[cut + 1 :]
    if _MAGIC.search(path):
        return _matching(path)
    store = Store(url)
    if folder.count("/") > 1 and store.is_object():
        twin = _twin(folder, place_of(folder, "read"))
        twin.bring([last])
        return os.path.join(twin.root, last)
    twin = _twin(url, place_of(url, "read"))
    twin.pull(lazy=False)
    return f"{twin.root}{at}{which}"


def _matching(pattern: str) -> str:
    """Brings what a pattern stands for, and returns the pattern of the files."""
    folder = pattern[: _MAGIC.search(pattern).start()].rpartition("/")[0]  # type: ignore[union-attr]
    for name in Store(folder).matches(rest := pattern[len(folder) + 1 :]):
        here(f"{folder}/{name}")
    return os.path.join(glob.escape(place_of(folder, "read")), rest)


def complete(path: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Brings what is below a folder, where it is in a twin, or of the hub's cache, and not all of it is here.

    wanted: tells of a name below the folder of a twin whether it is asked for.
    """
    hub.complete(path)
    if (twin := twin_around(path)) is not None:
        twin.complete(path, wanted)


@contextlib.contextmanager
def sent(path: str) -> Iterator[str]:
    """Yields a path to write to: what is new there at the end is sent, where it is a URL.

    That is a folder, a file, and others beside it that have its name but for the ending: a report's page and picture.
    """
    if not is_url(path):
        yield path
        return
    local = here(path)
    os.makedirs(os.path.dirname(local), exist_ok=True)
    twin, done, before = _twin(path, local), f"{local}.done", _of_that_name(local)
    if os.path.exists(done):  # a command before was killed while it sent what it had made
        _send_all(twin, done)
    elif os.path.isdir(local):
        twin.follow()  # without what one that was killed earlier has left
    yield local
    if os.path.isdir(local):
        open(done, "w").close()
        _send_all(twin, done)
    for name in dict(_of_that_name(local).items() - before.items()):
        Store(path.rpartition("/")[0]).put(os.path.join(os.path.dirname(local), name), name)


def _of_that_name(path: str) -> dict[str, tuple[int, int]]:
    """Returns the files of a name with any ending or none, with what tells their contents: size and time."""
    stem = os.path.splitext(os.path.basename(path))[0]
    with os.scandir(os.path.dirname(path)) as found:
        files = [file for file in found if os.path.splitext(file.name)[0] == stem and file.is_file()]
        return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def _send_all(twin: Twin, done: str) -> None:
    """Sends what a command has made; done: a file that is there until all is sent."""
    twin.push(deletes=False)
    os.remove(done)


@contextlib.contextmanager
def cached(path: str) -> Iterator[str]:
    """Yields a folder of which `complete` brings what is asked for; what is new there at the end is sent."""
    if not is_url(path):
        yield path
        return
    twin = _twin(path, place_of(path, "read"))
    twin.pull()
    yield twin.root
    twin.push(deletes=False)


@contextlib.contextmanager
def at_work(path: str, folder: Optional[str] = None, process: int = 0) -> Iterator[str]:
    """Yields the folder to train in; of a URL its twin, whose files are sent while the run goes on, and at the end.

    Where this machine was the last to train there, its files are newer than those of the store, and are kept; else they
    are those of the store. What another run has overtaken is put aside.

    Args:
      folder: where twins are; None: the cache of this user.
      process: which of several this is. Process 0 comes first; each has a twin of its own, which for the others is what
        the store has, but for what they write: that they send, and delete nothing there.

    Raises:
      UserError, RunFailed: as `Store`; another run is at work there.
      RunFailed: at the end not all could be sent; says where it is.
    """
    if not is_url(path):
        yield path
        return
    root = place_of(path, "work", folder) + (f".process-{process}" if process else "")
    with _alone(root), contextlib.ExitStack() as held:
        lease = None if process else held.enter_context(Lease(Store(path), root))
        twin = _opened(path, root, lease) if lease else _twin(path, root)
        if lease:
            say(f"{path} is kept in {root} too, and what is new there is sent every {EVERY:.0f} s")
        else:
            twin.follow()
        _senders[root] = held.enter_context(_Sender(twin, lease))
        held.callback(_senders.pop, root)
        yield root


def send_soon(path: str) -> None:
    """Has what is new in the twin that a path is in sent now, in the thread that does so every EVERY seconds."""
    if (twin := twin_around(path)) is not None and twin.root in _senders:
        _senders[twin.root].wake.set()


def is_at_work(path: str) -> bool:
    """Tells whether a path is in a twin that this process works in: one of several has another than the others."""
    return (twin := twin_around(path)) is not None and twin.root in _senders


@contextlib.contextmanager
def shared(path: str) -> Iterator[None]:
    """Wraps what the first process of several does before all others: they begin with what it has sent at the end."""
    is_first = (twin := twin_around(path)) is None or (sender := _senders.get(twin.root)) is None or sender.lease
    if not is_first:
        share(path)
    yield
    if is_first:
        share(path)


def share(path: str) -> None:
    """Sends what is new in the twin that a path is in; in another process than the first, brings what that has sent."""
    if (twin := twin_around(path)) is not None and (sender := _senders.get(twin.root)):
        sender.push() if sender.lease else twin.pull(lazy=False)


def named(text: str) -> str:
    """Returns a text for people in which what is in a twin is called as the user calls it, by its URL."""
    for root, twin in sorted(_twins.items(), reverse=True):  # the inner ones first
        text = re.sub(rf"{re.escape(root)}(?![\w-])", lambda _, url=twin.store.url: url, text)
    return text


def _opened(url: str, root: str, lease: Lease) -> Twin:
    """Returns the twin of a run whose lease was taken, with the newest files."""
    twin = _twin(url, root)
    if lease.previous != twin.lease or not lease.previous:
        if twin.has_unsent():
            os.rename(root, aside := f"{root}.overtaken-{time.strftime('%Y%m%d-%H%M%S')}")
            say(f"{url} has gone on elsewhere since this machine last sent to it: what it had not sent is in {aside}")
            os.rename(root + KEPT, aside + KEPT)
            del _twins[root]
            twin = _twin(url, root)
        twin.pull(lazy=False)
    twin.lease = lease.number
    twin.discard_unfinished()
    twin.push()
    return twin


@contextlib.contextmanager
def _alone(root: str) -> Iterator[None]:
    """Keeps other processes of this machine out of a twin."""
    os.makedirs(os.path.dirname(root), exist_ok=True)
    with open(f"{root}.lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise RunFailed(f"{root} is in use by another process of this machine: wait for its end, or stop it") from e
        yield


class _Sender:
    """Sends what a run writes, in a thread; a context manager. What goes wrong there is said once, and ends nothing."""

    def __init__(self, twin: Twin, lease: Optional[Lease]):
        """lease: None in a process that follows another one, which holds it."""
        self._twin, self.lease = twin, lease
        self._over, self.wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._live, name="sender", daemon=True)
        self._said: Optional[str] = None

    def __enter__(self) -> "_Sender":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self.wake.set()
        self._thread.join()
        try:
            self.push()
        except UserError as e:
            say(f"what was not sent is in {self._twin.root}")
            raise RunFailed(f"{e}; the same command on this machine goes on from what was not sent") from e

    def push(self) -> None:
        if self.lease:
            self.lease.check()
        self._twin.push(deletes=self.lease is not None)

    def _live(self) -> None:
        while not self._over.is_set():
            self.wake.wait(EVERY)
            self.wake.clear()
            try:
                self.push()
                self._said = None
            except UserError as e:
                if self._said is None:
                    say(f"{e}; the run goes on in {self._twin.root}, and sends it later")
                self._said = str(e)


_senders: dict[str, _Sender] = {}  # of this process, by the folder of their twin
_twins: dict[str, Twin] = {}  # of this process, by their folder: two of one would not know what the other has brought


def _twin(url: str, root: str) -> Twin:
    twin = _twins.get(root)
    if twin is None or twin.store.url != url.rstrip("/"):
        twin = _twins[root] = Twin(url, root)
    return twin


def twin_around(path: str) -> Optional[Twin]:
    """Returns the twin that a path of this machine is in; None where it is in none."""
    folder = os.path.abspath(path)
    while folder != (parent := os.path.dirname(folder)):
        if folder in _twins:
            return _twins[folder]
        if os.path.exists(folder + KEPT):
            return _twin(read_object(folder + KEPT)["url"], folder)
        folder = parent
    return None
