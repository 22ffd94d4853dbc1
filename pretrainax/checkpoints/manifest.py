"""Writes and verifies manifests, which list the SHA-256 of each file in a folder in the format of `sha256sum -c`."""

import concurrent.futures
import errno
import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pretrainax.config import UserError
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.errors import shortened
from pretrainax.files.object_names import name_problem
from pretrainax.files.regular_files import check_regular, read_bytes

MANIFEST = "manifest.sha256"
_IGNORED = {"Thumbs.db", "ehthumbs.db", "desktop.ini", "Icon\r"}  # files that file managers create in opened folders


def write_manifest(directory: str, elsewhere: Mapping[str, str] = MappingProxyType({})) -> None:
    """Flushes the files of a folder to disk, then writes the folder's manifest.

    Because of this order, a power failure cannot leave a manifest without the files that it lists.

    Args:
      directory: path of the folder.
      elsewhere: {name: SHA-256} of files written by other processes. Some of these files may also be local.

    Raises:
      OSError: a local file differs from the file of the same name in `elsewhere`.
    """
    local = flush_and_hash(directory)
    if conflicts := [name for name in sorted(local.keys() & elsewhere.keys()) if local[name] != elsewhere[name]]:
        raise OSError(errno.EIO, f"{conflicts[0]} differs from the file that another process wrote")
    manifest = os.path.join(directory, MANIFEST)
    digests = sorted({**local, **elsewhere}.items())
    write_atomically(manifest, "".join(f"{digest}  {name}\n" for name, digest in digests))
    fsync_path(manifest)
    fsync_path(directory)


def flush_and_hash(directory: str) -> dict[str, str]:
    """Flushes the files of a folder to disk; returns {path relative to the folder: SHA-256}."""
    names = _files(directory)
    paths = [os.path.join(directory, name) for name in names]
    for folder, _, _ in os.walk(directory):
        fsync_path(folder)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(fsync_path, paths))
        return dict(zip(names, pool.map(_digest, paths), strict=True))


def faults(directory: str, needed: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Compares a folder with its manifest; returns one line per difference, or [] if the folder is valid.

    The function follows links, so it verifies their targets. Links that the manifest does not list are allowed.

    Args:
      needed: returns True for the files to verify, given a file name in the manifest.
    """
    try:
        content = read_bytes(os.path.join(directory, MANIFEST)).decode("utf-8")
        lines = [re.fullmatch(r"([0-9a-f]{64})  (.+)\n", line) for line in io.StringIO(content, newline=None)]
    except FileNotFoundError:
        return [f"{MANIFEST} missing"]
    except (OSError, UnicodeDecodeError, UserError) as error:
        return [f"{MANIFEST}: {_reason(error)}"]
    if not lines or None in lines:
        return [f"{MANIFEST} broken"]
    listed = {match[2]: match[1] for match in lines}
    if invalid := [f"{MANIFEST} names {shortened(name)!r}: {why}" for name in listed if (why := name_problem(name))]:
        return invalid[:1]
    expected = {name: digest for name, digest in listed.items() if needed(name)}
    existing = sorted(name for name in expected if os.path.isfile(os.path.join(directory, name)))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        digests = pool.map(_digest_or_reason, (os.path.join(directory, name) for name in existing))
    changed = [
        f"{n} {'changed' if len(d) == 64 else d}" for n, d in zip(existing, digests, strict=True) if d != expected[n]
    ]
    missing = [f"{name} missing" for name in sorted(expected.keys() - set(existing))]
    return changed + missing + [f"{name} not in {MANIFEST}" for name in _files(directory) if name not in listed]


def _files(directory: str) -> list[str]:
    """Returns the sorted relative paths of the files that a folder's manifest must list.

    Omits the manifest, links, hidden files (created by NFS and snapshots) and files created by file managers.
    """
    files = []
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [os.path.join(folder, name) for name in names if not name.startswith(".") and name not in _IGNORED]
        files += [os.path.relpath(path, directory) for path in paths if not os.path.islink(path)]
    return sorted(name for name in files if name != MANIFEST)


def _digest(path: str) -> str:
    check_regular(path)
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _digest_or_reason(path: str) -> str:
    try:
        return _digest(path)
    except (OSError, UserError) as error:
        return f"unreadable ({_reason(error)})"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def fsync_path(path: str) -> None:
    """Flushes a file to disk; for a folder, flushes the list of its entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
