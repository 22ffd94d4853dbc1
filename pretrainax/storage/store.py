"""Reads, writes, lists and deletes the objects below a URL of an object store, through fsspec, with retries.

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
from pretrainax.files.extras import needs
from pretrainax.files.object_names import name_problem
from pretrainax.files.paths import STORES, path_problem

PATIENCE = 120.0  # seconds for which a failing request is repeated
# maximum gap in bytes between two ranges that one request reads; reading the gap costs less than a second request
NEAR = 32 << 10
_MAX_MERGED_BYTES = 8 << 20  # maximum size of a range that results from merging
_CONNECTIONS = 100  # the default of aiohttp; the default of botocore is 10
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 20.0  # seconds between two requests: initial and maximum
_ACCESS_DENIED = re.compile(
    r"forbidden|denied|unauthori[sz]ed|credential|invalid.?access|signature|permission|\b40[13]\b", re.I
)
_STORE_FULL = re.compile(r"quota|insufficient.?storage|\b507\b", re.I)
# errors of writes to a local file; the OSError does not contain the path of the file
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

T = TypeVar("T")
Range: TypeAlias = tuple[str, int, int]  # name of an object, first byte, last byte + 1


class Stamp(NamedTuple):
    """The size and version of an object in a store, which together identify its content."""

    size: int  # bytes
    version: str  # version according to the store: a generation, an ETag or a time


class Store:
    """Reads and writes the objects below a URL.

    An object's name is its URL without the `Store`'s own URL and the following slash. If the store is slow, unreachable
    or busy (429, 503), requests are retried with growing pauses for PATIENCE seconds, and a message is printed. Each
    method documents its behavior for objects that do not exist.

    Raises:
      UserError: the URL is invalid, or the store denies access to this user; the message suggests a remedy.
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
            raise UserError(needs(url, [e.name or str(e)], extra)) from e
        self._root = root.rstrip("/")

    def objects(self, folder: str = "") -> dict[str, Stamp]:
        """Lists the objects below a folder; returns {name: size and version}, sorted by name.

        The result is {} if the folder does not exist. It omits folder markers: empty objects that gcsfuse and the web
        consoles of stores create for folders.

        folder: name of the folder, or "" for all objects below the URL.

        Raises:
          UserError: an object's name is not a valid file name, or is also the name of a folder with other objects.
        """
        try:
            listing = self._with_retries(lambda: self._fs.find(self._path(folder), detail=True))
        except FileNotFoundError:
            return {}
        skip = len(self._root) + 1
        stamps = {path[skip:]: _stamp(info) for path, info in sorted(listing.items()) if len(path) > skip}
        return self._without_folder_markers(stamps)

    def is_object(self) -> bool:
        """Returns True if the URL names an object, as opposed to a folder, a folder marker, or nothing at all."""
        if not self._with_retries(lambda: self._fs.isfile(self._root)):
            return False
        return self.stamp("").size > 0 or not self.objects()

    def matches(self, pattern: str) -> list[str]:
        """Returns the sorted names of the objects that match a pattern such as `*.txt`.

        If the pattern matches a folder, all objects below the folder are included.
        """
        try:
            listing = self._with_retries(lambda: self._fs.glob(self._path(pattern), detail=True))
        except FileNotFoundError:  # the bucket does not exist
            return []
        skip = len(self._root) + 1
        names: set[str] = set()
        for path, info in listing.items():
            is_file = info.get("type") == "file" and info.get("size") and not path.endswith("/")
            names |= {path[skip:]} if is_file else self.objects(path[skip:].rstrip("/")).keys()
        return sorted(self._without_folder_markers({name: Stamp(1, "") for name in names}))

    def read(self, name: str) -> bytes:
        """Returns the content of an object; raises FileNotFoundError if the object does not exist."""
        return self._with_retries(lambda: self._fs.cat_file(self._path(name)))

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """Reads byte ranges in parallel, with one request for ranges of an object that are at most NEAR bytes apart."""
        merged = _merge_ranges(ranges)
        names, starts, stops = zip(*merged, strict=True)
        paths = [self._path(name) for name in names]
        contents = self._with_retries(lambda: self._fs.cat_ranges(paths, list(starts), list(stops), on_error="raise"))
        slices = []
        for name, start, stop in ranges:
            index = bisect.bisect_right(merged, (name, start, sys.maxsize)) - 1
            merged_start = merged[index][1]
            slices.append(contents[index][start - merged_start : stop - merged_start])
        return slices

    def write(self, name: str, content: bytes) -> None:
        """Writes an object, overwriting any existing object of the same name."""
        self._write_request(lambda: self._fs.pipe_file(self._path(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Creates an object atomically; returns True if this call created it, and False if it already exists.

        Exactly one of several concurrent calls succeeds. The request has the precondition that the object does not
        exist: generation 0 (Cloud Storage), or no ETag (S3).
        """
        try:
            self._write_request(lambda: self._fs.pipe_file(self._path(name), content, mode="create"), is_create=True)
        except FileExistsError:
            return False
        return True

    def put(self, path: str, name: str) -> None:
        """Uploads the file `path` as the object `name`; raises RunFailed if the file cannot be read."""
        with local_errors(path):
            self._write_request(lambda: self._fs.put_file(path, self._path(name)))

    def get(self, name: str, path: str) -> None:
        """Downloads the object `name` to the file `path`; raises RunFailed if the file cannot be written.

        The file is written under a temporary name and renamed when it is complete.
        """
        # The temporary name is short, because a suffix could make a name longer than 255 bytes.
        temporary_path = os.path.join(os.path.dirname(path), f".tmp-{os.getpid()}-{threading.get_ident()}")
        with local_errors(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                self._with_retries(lambda: self._fs.get_file(self._path(name), temporary_path))
                os.replace(temporary_path, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.remove(temporary_path)
                raise

    def stamp(self, name: str) -> Stamp:
        """Returns the size and version of an object; raises FileNotFoundError if the object does not exist."""
        return _stamp(self._with_retries(lambda: self._fs.info(self._path(name))))

    def has(self, name: str) -> bool:
        """Returns True if an object exists; requests the object itself, because a listing may be outdated."""
        try:
            self.stamp(name)
        except FileNotFoundError:
            return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; ignores objects that do not exist."""
        for name in names:
            try:
                self._with_retries(functools.partial(self._fs.rm_file, self._path(name)))
            except FileNotFoundError:
                pass

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _without_folder_markers(self, stamps: dict[str, Stamp]) -> dict[str, Stamp]:
        """Returns the given stamps without those of folder markers.

        Raises:
          UserError: an object's name is not a valid file name, or is also the name of a folder with other objects.
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
                nested_name = next(other for other in stamps if other.startswith(f"{name}/"))
                raise UserError(
                    f"{self.url} has the object {name!r} and, in a folder of the same name, {nested_name!r}: rename one"
                )
        return {name: stamp for name, stamp in stamps.items() if name not in markers}

    def _write_request(self, call: Callable[[], object], is_create: bool = False) -> None:
        try:
            self._with_retries(call, is_create)
        except FileNotFoundError as e:
            if _is_local(e):
                raise
            raise UserError(f"{self.url}: there is no such bucket: create it first, or set another one") from e

    def _with_retries(self, call: Callable[[], T], is_create: bool = False) -> T:
        """Returns the result of a request, retrying it for PATIENCE seconds unless a retry cannot fix the error.

        is_create: whether the request creates an object. If True, a FileExistsError is raised immediately.
        """
        start_time, pause, is_reported = time.monotonic(), _FIRST_PAUSE, False
        while True:
            try:
                return call()
            except Exception as e:  # the errors of fsspec's libraries have no common base class
                # If `is_create` is False, a FileExistsError (status 412) is a fault of the store, so a retry can help.
                if isinstance(e, FileNotFoundError) or is_create and isinstance(e, FileExistsError) or _is_local(e):
                    raise
                reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
                if _STORE_FULL.search(reason):
                    raise RunFailed(
                        f"{self.url} is full ({reason}): make room there, then run the same command again"
                    ) from e
                if isinstance(e, PermissionError) or _ACCESS_DENIED.search(reason):
                    raise UserError(f"{self.url} refuses this user ({reason}): log in, or ask for access") from e
                # gcsfs itself makes up to 6 requests per call, in 34 s.
                if (elapsed := time.monotonic() - start_time) + pause > PATIENCE:
                    raise RunFailed(f"{self.url} has not responded for {elapsed:.0f} s ({reason})") from e
                if not is_reported:
                    print_message(f"{self.url} does not respond ({reason}): retrying for {PATIENCE:.0f} s")
                is_reported = True
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE)


def _is_local(error: BaseException) -> bool:
    """Returns True if an error concerns a local file, so that retrying the request cannot help.

    An OSError that a library raises because of the store's response has a `__cause__`, or a `filename` that is not a
    local path.
    """
    if not isinstance(error, OSError) or error.__cause__ is not None:
        return False
    return error.errno in _WRITE_ERRORS or isinstance(error.filename, str) and os.path.isabs(error.filename)


@contextlib.contextmanager
def local_errors(path: str) -> Iterator[None]:
    """Converts errors about local files inside the context to RunFailed with the path; other errors pass through."""
    try:
        yield
    except OSError as e:
        if not _is_local(e):
            raise
        raise RunFailed(
            f"{path}: {os.strerror(e.errno or errno.EIO)} on this machine: fix this, then run the same command again"
        ) from e


def _is_not_connection_error(record: logging.LogRecord) -> bool:
    """Filters out asyncio's log records about broken connections, because `Store` itself reports such errors."""
    return not (record.exc_info and isinstance(record.exc_info[1], ConnectionError))


def _client_options(url: str, conf: Mapping[str, Mapping[str, dict]]) -> dict[str, dict]:
    """Returns the fsspec client options for a URL: the connection limit for S3 unless `conf` sets it, otherwise {}.

    conf: the user's fsspec configuration.
    """
    if not url.startswith("s3:"):
        return {}
    return {"config_kwargs": {"max_pool_connections": _CONNECTIONS} | conf.get("s3", {}).get("config_kwargs", {})}


def _merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Merges ranges of the same object that are at most NEAR bytes apart; returns all ranges, sorted.

    Ranges are not merged if the result would be larger than _MAX_MERGED_BYTES.
    """
    merged: list[Range] = []
    for name, start, stop in sorted(ranges):
        if merged:
            previous, first, last = merged[-1]
            if name == previous and start - last <= NEAR and stop - first <= _MAX_MERGED_BYTES:
                merged[-1] = previous, first, max(last, stop)
                continue
        merged.append((name, start, stop))
    return merged


def _stamp(info: dict[str, Any]) -> Stamp:
    version = next((info[key] for key in ("generation", "ETag", "etag", "created", "mtime") if info.get(key)), "")
    if isinstance(version, datetime.datetime):  # memory:// returns a datetime for a single object, but not in listings
        version = version.timestamp()
    return Stamp(int(info["size"]), str(version))


def print_message(line: str) -> None:
    """Prints a message to stderr as a single line, "pretrainax: …", without control characters."""
    print(f"pretrainax: {printable(line)}", file=sys.stderr, flush=True)
