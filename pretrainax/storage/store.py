"""The objects below one URL, through fsspec: listed, read, written, made once, deleted; with patience where it helps.

A store has no rename, no lock and no append. What it has is atomic: an object is there as a whole, or not.

Whoever can write to a bucket chooses the names of its objects. Each becomes a path by `path_below` alone.
"""

import bisect
import contextlib
import datetime
import errno
import functools
import logging
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pretrainax.files.errors import RunFailed, UserError, printable, shortened
from pretrainax.files.object_names import name_problem
from pretrainax.files.paths import STORES, path_problem

PATIENCE = 120.0  # seconds after which a call is not made again
NEAR = 32 << 10  # bytes between two ranges that are read as one: they take no longer than another request
_MOST = 8 << 20  # bytes of a range that others are joined to
_AT_ONCE = 100  # requests under way, as aiohttp has; botocore has 10 where it is not told
_FIRST, _LONGEST = 0.5, 20.0  # seconds between two of them
_REFUSED = re.compile(
    r"forbidden|denied|unauthori[sz]ed|credential|invalid.?access|signature|permission|\b40[13]\b", re.I
)
_FULL = re.compile(r"quota|insufficient.?storage|\b507\b", re.I)
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of a local file that do not name it

T = TypeVar("T")
Range: TypeAlias = tuple[str, int, int]  # name, first byte, and the one behind the last


class Stamp(NamedTuple):
    """Tells one content of an object from another."""

    size: int  # bytes
    version: str  # the store's own: a generation, an ETag


class Store:
    """Reads and writes the objects below a URL, each by its name: what follows the URL and a slash.

    Of whatever a store answers there are three kinds. It is slow, out of reach or busy (429, 503): the request is made
    again, ever later, for PATIENCE seconds, and that is said. It refuses, or is full: one line. Nothing is there.

    Raises:
      UserError: it refuses the URL or this user; names both, and what to do.
      RunFailed: it is full, or does not answer.
    """

    def __init__(self, url: str):
        if problem := path_problem(url):
            raise UserError(f"{url}: {problem}")
        self.url = url.rstrip("/")
        try:
            import fsspec.config  # here: a run on a disk needs none of it
            import fsspec.core

            logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it shows a traceback of each answer that we explain
            logging.getLogger("asyncio").addFilter(_is_no_echo)
            more = _settings(self.url, fsspec.config.conf)
            self._fs, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **more)
        except ImportError as e:
            extra = STORES[self.url.partition(":")[0]]
            raise UserError(f"{url}: {e.name or e} is not installed: pip install 'pretrainax[{extra}]'") from e
        self._root = root.rstrip("/")

    def objects(self, folder: str = "") -> dict[str, Stamp]:
        """Returns the objects below a folder of the URL, in their order; none where there is no such folder.

        Markers of folders, empty objects that consoles and gcsfuse make, are left out.

        Raises:
          UserError: no file can have the name of an object, or an object has the name of another one's folder.
        """
        try:
            found = self._tried(lambda: self._fs.find(self._path(folder), detail=True))
        except FileNotFoundError:
            return {}
        start = len(self._root) + 1
        stamps = {path[start:]: _stamp(info) for path, info in sorted(found.items()) if len(path) > start}
        return self._without_markers(stamps)

    def is_object(self) -> bool:
        """Returns True if the URL is itself that of an object, and no folder or the marker of one."""
        if not self._tried(lambda: self._fs.isfile(self._root)):
            return False
        return self.stamp("").size > 0 or not self.objects()

    def matches(self, pattern: str) -> list[str]:
        """Returns the names of the objects that a pattern stands for, as `*.txt`, in their order.

        Of a folder that matches, they are the objects below it.
        """
        try:
            found = self._tried(lambda: self._fs.glob(self._path(pattern), detail=True))
        except FileNotFoundError:  # there is no such bucket
            return []
        start = len(self._root) + 1
        names: set[str] = set()
        for path, info in found.items():
            is_file = info.get("type") == "file" and info.get("size") and not path.endswith("/")
            names |= {path[start:]} if is_file else self.objects(path[start:].rstrip("/")).keys()
        return sorted(self._without_markers({name: Stamp(1, "") for name in names}))

    def read(self, name: str) -> bytes:
        """Returns an object; FileNotFoundError where it is not there."""
        return self._tried(lambda: self._fs.cat_file(self._path(name)))

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """Returns the bytes of each range, all asked for at once; those that lie near each other are one request."""
        joined = _joined(ranges)
        names, starts, stops = zip(*joined, strict=True)
        paths = [self._path(name) for name in names]
        found = self._tried(lambda: self._fs.cat_ranges(paths, list(starts), list(stops), on_error="raise"))
        parts = []
        for name, start, stop in ranges:
            place = bisect.bisect_right(joined, (name, start, sys.maxsize)) - 1
            first = joined[place][1]
            parts.append(found[place][start - first : stop - first])
        return parts

    def write(self, name: str, content: bytes) -> None:
        """Writes an object, whatever was there."""
        self._written(lambda: self._fs.pipe_file(self._path(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Writes an object that is not there; returns whether it was this call that made it.

        Of all that try, one does: Cloud Storage is asked for generation 0, S3 for no ETag.
        """
        try:
            self._written(lambda: self._fs.pipe_file(self._path(name), content, mode="create"), is_first=True)
        except FileExistsError:
            return False
        return True

    def put(self, path: str, name: str) -> None:
        """Writes an object from a file; RunFailed where the file cannot be read."""
        with local_errors(path):
            self._written(lambda: self._fs.put_file(path, self._path(name)))

    def get(self, name: str, path: str) -> None:
        """Writes a file from an object, under its name when it is whole; RunFailed where that cannot be written."""
        # short and hidden: a name of 255 bytes has no room for an ending
        part = os.path.join(os.path.dirname(path), f".tmp-{os.getpid()}-{threading.get_ident()}")
        with local_errors(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                self._tried(lambda: self._fs.get_file(self._path(name), part))
                os.replace(part, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.remove(part)
                raise

    def stamp(self, name: str) -> Stamp:
        """Returns what tells the content of an object; FileNotFoundError where it is not there."""
        return _stamp(self._tried(lambda: self._fs.info(self._path(name))))

    def has(self, name: str) -> bool:
        """Returns True if an object is there, whatever a listing says."""
        try:
            self.stamp(name)
        except FileNotFoundError:
            return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; those that are gone already are no error."""
        for name in names:
            try:
                self._tried(functools.partial(self._fs.rm_file, self._path(name)))
            except FileNotFoundError:
                pass

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _without_markers(self, found: dict[str, Stamp]) -> dict[str, Stamp]:
        """Returns objects without the markers of folders; raises UserError for names that no file can have."""
        folders: set[str] = set()
        for name in found:
            while (name := name.rpartition("/")[0]) and name not in folders:
                folders.add(name)
        markers = {n for n, stamp in found.items() if not stamp.size and (n.endswith("/") or n in folders)}
        for name in found.keys() - markers:
            if problem := name_problem(name):
                raise UserError(
                    f"{self.url} has an object {shortened(name)!r}, and no file can have its name: {problem}"
                )
            if name in folders:
                below = next(other for other in found if other.startswith(f"{name}/"))
                raise UserError(
                    f"{self.url} has the object {name!r} and, in a folder of the same name, {below!r}: rename one"
                )
        return {name: stamp for name, stamp in found.items() if name not in markers}

    def _written(self, call: Callable[[], object], is_first: bool = False) -> None:
        try:
            self._tried(call, is_first)
        except FileNotFoundError as e:
            if _is_local(e):
                raise
            raise UserError(f"{self.url}: there is no such bucket: make it first, or give another one") from e

    def _tried(self, call: Callable[[], T], is_first: bool = False) -> T:
        """Returns what a call returns, when it does.

        is_first: it asks that nothing be there, and raises FileExistsError where something is.
        """
        began, pause, said = time.monotonic(), _FIRST, False
        while True:
            try:
                return call()
            except Exception as e:  # the libraries of stores have no class of errors in common
                # an answer 412 to anything else is an error of the store
                if isinstance(e, FileNotFoundError) or is_first and isinstance(e, FileExistsError) or _is_local(e):
                    raise
                why = " ".join(f"{type(e).__name__}: {e}".split())[:300]
                if _FULL.search(why):
                    raise RunFailed(
                        f"{self.url} takes no more ({why}): make room there, then run the same again"
                    ) from e
                if isinstance(e, PermissionError) or _REFUSED.search(why):
                    raise UserError(f"{self.url} refuses this user ({why}): log in, or ask for the right to it") from e
                # gcsfs makes up to 6 requests within a call, in 34 s
                if (waited := time.monotonic() - began) + pause > PATIENCE:
                    raise RunFailed(f"{self.url} has not answered for {waited:.0f} s ({why})") from e
                if not said:
                    say(f"{self.url} does not answer ({why}): trying again for {PATIENCE:.0f} s")
                said = True
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST)


def _is_local(error: BaseException) -> bool:
    """Returns True if an error is of a file of this machine, which another request does not mend.

    Where libraries report an answer of a store as an OSError, it has a cause or does not name a local path.
    """
    if not isinstance(error, OSError) or error.__cause__ is not None:
        return False
    return error.errno in _WRITING or isinstance(error.filename, str) and os.path.isabs(error.filename)


@contextlib.contextmanager
def local_errors(path: str) -> Iterator[None]:
    """Raises RunFailed, which names the path, for an error of a file of this machine; passes on all others."""
    try:
        yield
    except OSError as e:
        if not _is_local(e):
            raise
        raise RunFailed(
            f"{path}: {os.strerror(e.errno or errno.EIO)} on this machine: when that is mended, run the same again"
        ) from e


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Tells of a line of asyncio whether it is of anything but a broken connection, which who asked is told of too."""
    return not (record.exc_info and isinstance(record.exc_info[1], ConnectionError))


def _settings(url: str, conf: Mapping[str, Mapping[str, dict]]) -> dict[str, dict]:
    """Returns what a client is told beside what the user tells it, in a configuration of fsspec."""
    if not url.startswith("s3:"):
        return {}
    return {"config_kwargs": {"max_pool_connections": _AT_ONCE} | conf.get("s3", {}).get("config_kwargs", {})}


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Returns ranges in their order, as few as hold all of the given ones without going far beyond them."""
    joined: list[Range] = []
    for name, start, stop in sorted(ranges):
        if joined:
            of, first, last = joined[-1]
            if name == of and start - last <= NEAR and stop - first <= _MOST:
                joined[-1] = of, first, max(last, stop)
                continue
        joined.append((name, start, stop))
    return joined


def _stamp(info: dict[str, Any]) -> Stamp:
    version = next((info[key] for key in ("generation", "ETag", "etag", "created", "mtime") if info.get(key)), "")
    if isinstance(version, datetime.datetime):  # as memory:// says of one object, and not of several
        version = version.timestamp()
    return Stamp(int(info["size"]), str(version))


def say(line: str) -> None:
    """Prints a line about a store, as every command prints its own."""
    print(f"pretrainax: {printable(line)}", file=sys.stderr, flush=True)
