"""Says where folders of stores and models of the hub are kept on this machine: called with every path of a user."""

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
from pretrainax.storage.store import Store, local_errors, say
from pretrainax.storage.twin import SENDING, Twin

EVERY = 5.0  # seconds between two looks at what is to be sent
REPEATED = 300.0  # seconds after which a message that nothing can be sent is repeated
_CHECKPOINT = re.compile(r"@\w*")  # what may follow the name of a run
_MAGIC = re.compile(r"[*?[]")


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
    if problem := path_problem(path):
        raise UserError(f"{path}: {problem}")
    folder, slash, last = path.rstrip("/").rpartition("/")
    url, at, which = path.rstrip("/"), "", ""
    if (cut := last.rfind("@")) > 0 and _CHECKPOINT.fullmatch(last[cut:]):
        url, at, which = f"{folder}/{last[:cut]}", "@", last[cut + 1 :]
    if _MAGIC.search(path):
        return _matching(path)
    if folder.count("/") > 1 and Store(url).is_object():
        twin = _reader(folder)
        twin.bring([last])
        return os.path.join(twin.root, last)
    twin = _reader(url)
    twin.pull(lazy=False)
    return f"{twin.root}{at}{which}"


def _matching(pattern: str) -> str:
    """Brings what a pattern stands for, and returns the pattern of the files."""
    folder = pattern[: _MAGIC.search(pattern).start()].rpartition("/")[0]  # type: ignore[union-attr]
    twin, rest = _reader(folder), pattern[len(folder) + 1 :]
    twin.bring(names := twin.store.matches(rest))
    local = os.path.join(glob.escape(twin.root), rest)
    wanted = {os.path.join(twin.root, name) for name in names}
    twin.move_aside([path for path in glob.glob(local, recursive=True) if os.path.isfile(path) and path not in wanted])
    return local


def refresh(path: str) -> None:
    """Makes the twin that a path is in what the store has now, if this process only reads it."""
    if (twin := twin_around(path)) is not None and not twin.is_at_work:
        twin.pull(lazy=False)


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
    twin, complete, before = _reader(path), copy_of(path, "read").complete, _of_that_name(local)
    if os.path.exists(complete):  # a command before was killed while it sent what it had made
        _send_all(twin, complete)
    elif os.path.isdir(local):
        twin.follow()  # without what one that was killed earlier has left
    yield local
    if os.path.isdir(local):
        open(complete, "w").close()
        _send_all(twin, complete)
    for name in dict(_of_that_name(local).items() - before.items()):
        file = os.path.join(os.path.dirname(local), name)
        Store(path.rpartition("/")[0]).put(file, name)
        if local == twin.root:  # else it is in the twin of the folder that it is in
            os.remove(file)


def _of_that_name(path: str) -> dict[str, tuple[int, int]]:
    """Returns the files of a name with any ending or none, with what tells their contents: size and time."""
    stem = os.path.splitext(os.path.basename(path))[0]
    with os.scandir(os.path.dirname(path)) as found:
        files = [file for file in found if os.path.splitext(file.name)[0] == stem and file.is_file()]
        return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def _send_all(twin: Twin, complete: str) -> None:
    """Sends what a command has made; complete: a file that is there until all is sent."""
    twin.push(deletes=False)
    os.remove(complete)


@contextlib.contextmanager
def cached(path: str) -> Iterator[str]:
    """Yields a folder of which `complete` brings what is asked for; what is new there at the end is sent."""
    if not is_url(path):
        yield path
        return
    twin = _reader(path)
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
    copy = copy_of(path, "work", folder, process)
    with _alone(copy), contextlib.ExitStack() as held:
        for left in glob.glob(os.path.join(glob.escape(copy.folder), f"{SENDING}*")):  # links of a killed process
            shutil.rmtree(left, ignore_errors=True)
        lease = None if process else held.enter_context(Lease(Store(path), copy.root))
        twin = _twin(path, copy, is_at_work=True)
        if lease:
            _take_over(twin, lease)
            say(f"{path} is kept in {copy.root} too, and what is new there is sent every {EVERY:.0f} s")
        else:
            twin.follow()
        os.makedirs(copy.root, exist_ok=True)
        _senders[copy.root] = held.enter_context(_Sender(twin, lease))
        held.callback(_senders.pop, copy.root)
        yield copy.root


def send_soon(path: str) -> None:
    """Has what is new in the twin that a path is in sent now, in the thread that does so every EVERY seconds."""
    if (twin := twin_around(path)) is not None and twin.root in _senders:
        _senders[twin.root].wake.set()


def is_at_work(path: str) -> bool:
    """Returns True if a path is in a twin that this process works in: one of several has another than the others."""
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
    """Returns a text for people in which what is in a twin, or next to it, is called by its URL."""
    for root, twin in _twins.items():
        url = twin.store.url
        for folder, name in ((root, url), (os.path.dirname(root), url.rpartition("/")[0])):
            text = re.sub(rf"{re.escape(folder)}(?![\w-])", lambda _, name=name: name, text)
    return text


def last_sent(path: str) -> Optional[int]:
    """Returns the newest step whose whole checkpoint the store has, of the run in the twin around a path.

    None where there is none yet, and for a folder that is in no twin.
    """
    return twin.last_sent() if (twin := twin_around(path)) is not None else None


def sent_line(path: str) -> str:
    """Returns `last_sent` in words; "" for a folder that is in no twin."""
    return "" if (twin := twin_around(path)) is None else _sent_line(twin)


def _sent_line(twin: Twin) -> str:
    return "no checkpoint was sent yet" if (step := twin.last_sent()) is None else f"last sent: step {step:,}"


def _take_over(twin: Twin, lease: Lease) -> None:
    """Has the twin of a run whose lease was taken hold the newest files, here and in the store."""
    url = twin.store.url
    if twin.lease and (lease.previous == twin.lease or not lease.previous and twin.is_ahead()):
        twin.reconcile()
    else:
        if twin.has_unsent():
            aside = twin.start_over()
            say(f"{url} has gone on elsewhere since this machine last sent to it: what it had not sent is in {aside}")
        twin.pull(lazy=False)
    twin.lease = lease.number
    twin.discard_unfinished()
    twin.push()


@contextlib.contextmanager
def _alone(copy: Copy) -> Iterator[None]:
    """Keeps other processes of this machine out of a copy."""
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
    """Sends what a run writes, in a thread; a context manager. No failure ends the thread: the next try may succeed."""

    def __init__(self, twin: Twin, lease: Optional[Lease]):
        """lease: None in a process that follows another one, which holds it."""
        self._twin, self.lease = twin, lease
        self._over, self.wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._live, name="sender", daemon=True)
        self._sent = time.monotonic()  # when everything was sent
        self._told: Optional[float] = None  # when a message said that it is not

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
                say(f"{self._twin.store.url} has everything ({_sent_line(self._twin)})")
        except Exception as e:
            say(f"what was not sent is in {self._twin.root}")
            raise RunFailed(f"{_reason(e)}; the same command on this machine goes on from what was not sent") from e

    def push(self) -> None:
        if self.lease:
            self.lease.check()
        self._twin.push(deletes=self.lease is not None)
        if self._told is not None:
            say(f"{self._twin.store.url} has everything again, after {time.monotonic() - self._sent:,.0f} s")
        self._sent, self._told = time.monotonic(), None

    def _live(self) -> None:
        while not self._over.is_set():
            self.wake.wait(EVERY)
            self.wake.clear()
            try:
                self.push()
            except Exception as e:  # whatever it is: a run that is not sent is lost with its machine
                self._tell(_reason(e))

    def _tell(self, reason: str) -> None:
        """Says what is not sent, and for how long, at the first failure and every REPEATED seconds."""
        now = time.monotonic()
        if self._told is not None and now - self._told < REPEATED:
            return
        self._told = now
        say(
            f"{reason}; nothing was sent for {now - self._sent:,.0f} s ({_sent_line(self._twin)}): the run "
            f"goes on in {self._twin.root}, and tries again every {EVERY:.0f} s"
        )


def _reason(error: Exception) -> str:
    """Returns what an error says, with its kind where it is none of ours."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


_senders: dict[str, _Sender] = {}  # of this process, by the folder of their twin
_twins: dict[str, Twin] = {}  # of this process, by their folder: two of one would not know what the other has brought


def _twin(url: str, copy: Copy, is_at_work: bool = False) -> Twin:
    twin = _twins.get(copy.root)
    if twin is None or twin.store.url != url.rstrip("/"):
        twin = _twins[copy.root] = Twin(url, copy)
    twin.is_at_work = twin.is_at_work or is_at_work
    return twin


def _reader(url: str) -> Twin:
    """Returns the twin that what is read from a URL comes to."""
    Store(url)  # which refuses what is no URL, before that becomes a path
    return _twin(url, copy_of(url, "read"))


def twin_around(path: str) -> Optional[Twin]:
    """Returns the twin that a path of this machine is in; None where it is in none."""
    folder = os.path.abspath(path)
    while folder != (parent := os.path.dirname(folder)):
        if folder in _twins:
            return _twins[folder]
        folder = parent
    found = copies.copy_around(path)
    return _twin(*found) if found else None
