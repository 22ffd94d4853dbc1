"""Reads, writes, lists and deletes objects in an object store below one URL, through fsspec, with retries.

Object stores have no rename, no lock and no append. Writes are atomic: an object is either complete or missing.

Everyone with write access to a bucket can choose the names of its objects, so the names are untrusted. Only
`path_below` converts them to local paths.
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

PATIENCE = 120.0  # seconds for which a failing request is repeated
# maximum number of bytes between two ranges that one request reads; reading the gap costs less than a second request
NEAR = 32 << 10
_MOST = 8 << 20  # maximum number of bytes of merged ranges
_CONNECTIONS = 100  # the default of aiohttp; the default of botocore is 10
_FIRST, _LONGEST = 0.5, 20.0  # seconds between two requests: initial and maximum
_REFUSED = re.compile(
    r"forbidden|denied|unauthori[sz]ed|credential|invalid.?access|signature|permission|\b40[13]\b", re.I
)
_FULL = re.compile(r"quota|insufficient.?storage|\b507\b", re.I)
# errors of writes to a local file; their OSError does not contain the path of the file
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

T = TypeVar("T")
Range: TypeAlias = tuple[str, int, int]  # name of an object, first byte, last byte + 1


class Stamp(NamedTuple):
    """The size and version of an object in a store; they identify its content."""

    size: int  # bytes
    version: str  # version according to the store: a generation, an ETag or a time


class Store:
    """Reads and writes the objects below a URL.

    The name of an object is the part of its URL after the URL of the `Store` and a slash. If the store is slow,
    unreachable or busy (429, 503), requests are repeated with growing pauses for PATIENCE seconds, and a message is
    printed. The result for an object that does not exist is documented at each method.

    Raises:
      UserError: the URL is invalid, or the store rejects the request of this user; the message contains a remedy.
      RunFailed: the store is full, or does not respond for PATIENCE seconds.
    """

    def __init__(self, url: str):
        if problem := path_problem(url):
            raise UserError(f"{url}: {problem}")
        self.url = url.rstrip("/")
        try:
            import fsspec.config  # imported here: runs on local disks do not need fsspec
            import fsspec.core

            logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # hides tracebacks: errors become one line
            logging.getLogger("asyncio").addFilter(_is_not_connection_error)
            options = _client_options(self.url, fsspec.config.conf)
            self._fs, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **options)
        except ImportError as e:
            extra = STORES[self.url.partition(":")[0]]
            raise UserError(f"{url}: {e.name or e} is not installed: pip install 'pretrainax[{extra}]'") from e
        self._root = root.rstrip("/")

    def objects(self, folder: str = "") -> dict[str, Stamp]:
        """Returns size and version of each object below a folder of the URL, by sorted name; {} without such a folder.

        folder: name of the folder; "": all objects below the URL. Folder markers are omitted: empty objects that the
          web consoles of stores and gcsfuse create for folders.

        Raises:
          UserError: an object's name is invalid for a file, or equals the name of another object's folder.
        """
        try:
            listing = self._tried(lambda: self._fs.find(self._path(folder), detail=True))
        except FileNotFoundError:
            return {}
        start = len(self._root) + 1
        stamps = {path[start:]: _stamp(info) for path, info in sorted(listing.items()) if len(path) > start}
        return self._without_markers(stamps)

    def is_object(self) -> bool:
        """Returns True if the URL names an object; False for a folder, a folder marker, or a URL without objects."""
        if not self._tried(lambda: self._fs.isfile(self._root)):
            return False
        return self.stamp("").size > 0 or not self.objects()

    def matches(self, pattern: str) -> list[str]:
        """Returns the sorted names of the objects that match a pattern such as `*.txt`.

        If a folder matches, all objects below the folder are included.
        """
        try:
            listing = self._tried(lambda: self._fs.glob(self._path(pattern), detail=True))
        except FileNotFoundError:  # the bucket does not exist
            return []
        start = len(self._root) + 1
        names: set[str] = set()
        for path, info in listing.items():
            is_file = info.get("type") == "file" and info.get("size") and not path.endswith("/")
            names |= {path[start:]} if is_file else self.objects(path[start:].rstrip("/")).keys()
        return sorted(self._without_markers({name: Stamp(1, "") for name in names}))

    def read(self, name: str) -> bytes:
        """Returns the content of an object; raises FileNotFoundError if the object does not exist."""
        return self._tried(lambda: self._fs.cat_file(self._path(name)))

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """Reads byte ranges of objects with parallel requests; ranges at most NEAR bytes apart share one request."""
        joined = _joined(ranges)
        names, starts, stops = zip(*joined, strict=True)
        paths = [self._path(name) for name in names]
        contents = self._tried(lambda: self._fs.cat_ranges(paths, list(starts), list(stops), on_error="raise"))
        parts = []
        for name, start, stop in ranges:
            index = bisect.bisect_right(joined, (name, start, sys.maxsize)) - 1
            first = joined[index][1]
            parts.append(contents[index][start - first : stop - first])
        return parts

    def write(self, name: str, content: bytes) -> None:
        """Writes an object; replaces an existing object of the same name."""
        self._written(lambda: self._fs.pipe_file(self._path(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Creates an object; returns True if this call has created the object, and False if it already exists.

        Exactly one of several concurrent calls succeeds. Its request has the precondition that the object has
        generation 0 (Cloud Storage) or no ETag (S3), which means that it does not exist.
        """
        try:
            self._written(lambda: self._fs.pipe_file(self._path(name), content, mode="create"), is_first=True)
        except FileExistsError:
            return False
        return True

    def put(self, path: str, name: str) -> None:
        """Uploads the file `path` as the object `name`; raises RunFailed if the file cannot be read."""
        with local_errors(path):
            self._written(lambda: self._fs.put_file(path, self._path(name)))

    def get(self, name: str, path: str) -> None:
        """Downloads the object `name` to the file `path`; raises RunFailed if the file cannot be written.

        The file is written under a temporary name and renamed when it is complete.
        """
        # The temporary name is short, because a suffix could make a name longer than 255 bytes.
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
        """Returns the size and version of an object; raises FileNotFoundError if the object does not exist."""
        return _stamp(self._tried(lambda: self._fs.info(self._path(name))))

    def has(self, name: str) -> bool:
        """Returns True if an object exists. Requests the object itself, because a listing may be outdated."""
        try:
            self.stamp(name)
        except FileNotFoundError:
            return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; ignores objects that do not exist."""
        for name in names:
            try:
                self._tried(functools.partial(self._fs.rm_file, self._path(name)))
            except FileNotFoundError:
                pass

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _without_markers(self, stamps: dict[str, Stamp]) -> dict[str, Stamp]:
        """Returns the objects without folder markers.

        Raises:
          UserError: the name of an object is invalid for a file, or equals the name of another object's folder.
        """
        folders: set[str] = set()
        for name in stamps:
            while (name := name.rpartition("/")[0]) and name not in folders:
                folders.add(name)
        markers = {n for n, stamp in stamps.items() if not stamp.size and (n.endswith("/") or n in folders)}
        for name in stamps.keys() - markers:
            if problem := name_problem(name):
                raise UserError(
                    f"{self.url} has an object {shortened(name)!r}, and no file can have its name: {problem}"
                )
            if name in folders:
                below = next(other for other in stamps if other.startswith(f"{name}/"))
                raise UserError(
                    f"{self.url} has the object {name!r} and, in a folder of the same name, {below!r}: rename one"
                )
        return {name: stamp for name, stamp in stamps.items() if name not in markers}

    def _written(self, call: Callable[[], object], is_first: bool = False) -> None:
        try:
            self._tried(call, is_first)
        except FileNotFoundError as e:
            if _is_local(e):
                raise
            raise UserError(f"{self.url}: there is no such bucket: create it first, or set another one") from e

    def _tried(self, call: Callable[[], T], is_first: bool = False) -> T:
        """Returns the result of a request, with retries for PATIENCE seconds; raises errors that a retry cannot change.

        is_first: the request creates an object, and its FileExistsError (the object exists) is raised without a retry.
        """
        start, pause, reported = time.monotonic(), _FIRST, False
        while True:
            try:
                return call()
            except Exception as e:  # the errors of fsspec's libraries have no common base class
                # Without is_first, a FileExistsError (status 412) is a fault of the store, so a retry can help.
                if isinstance(e, FileNotFoundError) or is_first and isinstance(e, FileExistsError) or _is_local(e):
                    raise
                why = " ".join(f"{type(e).__name__}: {e}".split())[:300]
                if _FULL.search(why):
                    raise RunFailed(
                        f"{self.url} is full ({why}): make room there, then run the same command again"
                    ) from e
                if isinstance(e, PermissionError) or _REFUSED.search(why):
                    raise UserError(f"{self.url} refuses this user ({why}): log in, or ask for access") from e
                # gcsfs itself makes up to 6 requests per call, in 34 s.
                if (waited := time.monotonic() - start) + pause > PATIENCE:
                    raise RunFailed(f"{self.url} has not responded for {waited:.0f} s ({why})") from e
                if not reported:
                    print_message(f"{self.url} does not respond ({why}): retrying for {PATIENCE:.0f} s")
                reported = True
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST)


def _is_local(error: BaseException) -> bool:
    """Returns True if an error concerns a local file, so a retry of the request cannot help.

    An OSError that a library raises for a response of the store has a `__cause__`, or has no local path as its
    `filename`.
    """
    if not isinstance(error, OSError) or error.__cause__ is not None:
        return False
    return error.errno in _WRITING or isinstance(error.filename, str) and os.path.isabs(error.filename)


@contextlib.contextmanager
def local_errors(path: str) -> Iterator[None]:
    """Context manager that converts errors of local files into RunFailed with the path; other errors are unchanged."""
    try:
        yield
    except OSError as e:
        if not _is_local(e):
            raise
        raise RunFailed(
            f"{path}: {os.strerror(e.errno or errno.EIO)} on this machine: fix this, then run the same command again"
        ) from e


def _is_not_connection_error(record: logging.LogRecord) -> bool:
    """Logging filter: drops the records of asyncio about broken connections. `Store` itself reports such errors."""
    return not (record.exc_info and isinstance(record.exc_info[1], ConnectionError))


def _client_options(url: str, conf: Mapping[str, Mapping[str, dict]]) -> dict[str, dict]:
    """Returns options for the fsspec client of a URL: for S3, the connection limit, unless `conf` sets it; else {}.

    conf: the user's fsspec configuration.
    """
    if not url.startswith("s3:"):
        return {}
    return {"config_kwargs": {"max_pool_connections": _CONNECTIONS} | conf.get("s3", {}).get("config_kwargs", {})}


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Merges ranges of an object that are at most NEAR bytes apart; returns the merged ranges, sorted.

    Merged ranges have at most _MOST bytes.
    """
    joined: list[Range] = []
    for name, start, stop in sorted(ranges):
        if joined:
            previous, first, last = joined[-1]
            if name == previous and start - last <= NEAR and stop - first <= _MOST:
                joined[-1] = previous, first, max(last, stop)
                continue
        joined.append((name, start, stop))
    return joined


def _stamp(info: dict[str, Any]) -> Stamp:
    version = next((info[key] for key in ("generation", "ETag", "etag", "created", "mtime") if info.get(key)), "")
    if isinstance(version, datetime.datetime):  # from memory://, for one object but not for several
        version = version.timestamp()
    return Stamp(int(info["size"]), str(version))


def print_message(line: str) -> None:
    """Prints a message to stderr as one line, "pretrainax: …", without control characters."""
    print(f"pretrainax: {printable(line)}", file=sys.stderr, flush=True)
