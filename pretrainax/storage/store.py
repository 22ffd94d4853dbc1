"""Reads, writes, lists and deletes the objects below one URL through fsspec, with retries.

A store has no rename, no lock and no append. Writes are atomic: an object exists as a whole or not at all.

Anyone who can write to a bucket chooses the names of its objects. Names become local paths only through `path_below`.
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

PATIENCE = 120.0  # seconds after which a call is not repeated
NEAR = 32 << 10  # maximum bytes between two ranges that one request reads; the gap costs less than another request
_MOST = 8 << 20  # maximum bytes of joined ranges
_CONNECTIONS = 100  # the default of aiohttp; the default of botocore is 10
_FIRST, _LONGEST = 0.5, 20.0  # seconds between two requests: initial and maximum
_REFUSED = re.compile(
    r"forbidden|denied|unauthori[sz]ed|credential|invalid.?access|signature|permission|\b40[13]\b", re.I
)
_FULL = re.compile(r"quota|insufficient.?storage|\b507\b", re.I)
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # local write errors, which do not name the file

T = TypeVar("T")
Range: TypeAlias = tuple[str, int, int]  # name, first byte, byte after the last


class Stamp(NamedTuple):
    """Identifies the content of an object."""

    size: int  # bytes
    version: str  # from the store: a generation or an ETag


class Store:
    """Reads and writes the objects below a URL; an object's name is the rest of its URL after a slash.

    Errors of stores fall into three groups. If a store is slow, unreachable or busy (429, 503), requests are repeated
    with growing pauses for PATIENCE seconds, and a line reports it. If it refuses the request or is full, the error is
    one line. If an object does not exist, the methods document the result.

    Raises:
      UserError: the store refuses the URL or this user; the message names both and a remedy.
      RunFailed: the store is full, or does not respond.
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
        """Returns the objects below a folder of the URL, sorted by name; {} if the folder does not exist.

        Folder markers, which are empty objects from consoles and gcsfuse, are left out.

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
        """Returns True if the URL is an object, and not a folder or a folder marker."""
        if not self._tried(lambda: self._fs.isfile(self._root)):
            return False
        return self.stamp("").size > 0 or not self.objects()

    def matches(self, pattern: str) -> list[str]:
        """Returns the sorted names of the objects that match a pattern such as `*.txt`.

        A matching folder stands for all objects below it.
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
        """Returns the content of an object; FileNotFoundError if it does not exist."""
        return self._tried(lambda: self._fs.cat_file(self._path(name)))

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """Returns the bytes of each range, by parallel requests; nearby ranges share one request."""
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
        """Writes an object and replaces an earlier one."""
        self._written(lambda: self._fs.pipe_file(self._path(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Creates an object; returns True if this call created it, and False if it exists already.

        Of several concurrent calls exactly one succeeds: requests have the precondition generation 0 (Cloud Storage) or
        no ETag (S3).
        """
        try:
            self._written(lambda: self._fs.pipe_file(self._path(name), content, mode="create"), is_first=True)
        except FileExistsError:
            return False
        return True

    def put(self, path: str, name: str) -> None:
        """Uploads a file as an object; RunFailed if the file cannot be read."""
        with local_errors(path):
            self._written(lambda: self._fs.put_file(path, self._path(name)))

    def get(self, name: str, path: str) -> None:
        """Downloads an object to a file, which gets its name when it is complete; RunFailed if it cannot be written."""
        # A short, hidden name: a name of 255 bytes has no room for a suffix.
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
        """Returns the size and version of an object; FileNotFoundError if it does not exist."""
        return _stamp(self._tried(lambda: self._fs.info(self._path(name))))

    def has(self, name: str) -> bool:
        """Returns True if an object exists; asks for the object itself, not for a listing."""
        try:
            self.stamp(name)
        except FileNotFoundError:
            return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; ignores objects that are gone already."""
        for name in names:
            try:
                self._tried(functools.partial(self._fs.rm_file, self._path(name)))
            except FileNotFoundError:
                pass

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _without_markers(self, stamps: dict[str, Stamp]) -> dict[str, Stamp]:
        """Removes folder markers; raises UserError for names that are invalid for files."""
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
        """Returns the result of a call after retries; raises its error if a retry cannot help.

        is_first: the call creates an object, and raises FileExistsError if that exists.
        """
        start, pause, reported = time.monotonic(), _FIRST, False
        while True:
            try:
                return call()
            except Exception as e:  # the libraries have no common class of errors
                # In other calls, status 412 (FileExistsError) is an error of the store.
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
    """Returns True if an error is about a local file, so that another request cannot help.

    An OSError that a library raises for a response of the store has a cause, or does not name a local path.
    """
    if not isinstance(error, OSError) or error.__cause__ is not None:
        return False
    return error.errno in _WRITING or isinstance(error.filename, str) and os.path.isabs(error.filename)


@contextlib.contextmanager
def local_errors(path: str) -> Iterator[None]:
    """Turns errors of local files into RunFailed with the path; passes on all other errors."""
    try:
        yield
    except OSError as e:
        if not _is_local(e):
            raise
        raise RunFailed(
            f"{path}: {os.strerror(e.errno or errno.EIO)} on this machine: fix this, then run the same command again"
        ) from e


def _is_not_connection_error(record: logging.LogRecord) -> bool:
    """Returns False for log records of asyncio about broken connections, which the caller reports itself."""
    return not (record.exc_info and isinstance(record.exc_info[1], ConnectionError))


def _client_options(url: str, conf: Mapping[str, Mapping[str, dict]]) -> dict[str, dict]:
    """Returns options of the store's client in addition to the user's fsspec configuration."""
    if not url.startswith("s3:"):
        return {}
    return {"config_kwargs": {"max_pool_connections": _CONNECTIONS} | conf.get("s3", {}).get("config_kwargs", {})}


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Merges nearby ranges; returns the merged ranges in order."""
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
    """Prints a message of a store in the format of all commands."""
    print(f"pretrainax: {printable(line)}", file=sys.stderr, flush=True)
