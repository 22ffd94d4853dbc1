"""Computes the paths of local copies of object-store folders.

    BASE/USE/DIGEST/files/NAME      the local copy; NAME is the last component of the URL path
    BASE/USE/DIGEST/record.json     the record: the state of each object at its last download or upload
    BASE/USE/DIGEST/lock            locked by the process that trains in the copy
    BASE/USE/DIGEST/complete        exists while a command uploads its output
    BASE/USE/DIGEST/aside-TIME/     files moved out of the copy

BASE is ~/.cache/pretrainax/stores, or config.checkpoint.local_dir. USE is "read" or "work". DIGEST is a hash of the
URL. Because of the hash, no copy is inside another copy, and no object can have the path of a record. The folders
BASE/USE are private (mode 0700). A record in any other folder is not trusted, as it may come from an unpacked archive.
"""

import hashlib
import os
import secrets
import time
from typing import Literal, NamedTuple, Optional, TypeAlias

from pretrainax.files.errors import UserError
from pretrainax.files.json_files import read_object
from pretrainax.files.object_names import path_below
from pretrainax.files.paths import STORES
from pretrainax.files.private_folders import private_folder
from pretrainax.storage.store import print_message

Use: TypeAlias = Literal["read", "work"]  # separate copies, so that commands can read a run during its training
_USES = ("read", "work")
_FILES, _RECORD = "files", "record.json"
_OLD_RECORD = ".store.json"  # suffix of a record in version 0.6 and older: COPY.store.json, next to the folder COPY


class Copy(NamedTuple):
    """The paths of a URL's local copy and of its record, lock and marker files."""

    folder: str  # BASE/USE/DIGEST, which contains the copy, its record, and its lock and marker files
    name: str  # the last component of the URL path

    @property
    def root(self) -> str:
        """Returns the path of the local copy."""
        return os.path.join(self.folder, _FILES, self.name)

    @property
    def record(self) -> str:
        """Returns the path of the record, which stores each object's state at its last download or upload."""
        return os.path.join(self.folder, _RECORD)

    @property
    def lock(self) -> str:
        """Returns the path of the lock file, which the process that trains in the copy locks."""
        return os.path.join(self.folder, "lock")

    @property
    def complete(self) -> str:
        """Returns the path of the marker file that exists while a command uploads its output from the copy."""
        return os.path.join(self.folder, "complete")

    def new_aside(self) -> str:
        """Returns a new folder path for files to be moved out of the copy, without creating the folder."""
        return os.path.join(self.folder, f"aside-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")


def base_folder() -> str:
    """Returns the default base folder for local copies: pretrainax/stores in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(os.path.abspath(cache), "pretrainax", "stores")


def copy_of(url: str, use: Use, base: Optional[str] = None, process: int = 0) -> Copy:
    """Returns the paths of a URL's local copy; creates the copy's parent folder, but not the copy.

    Args:
      url: URL of a folder in the object store.
      use: "work" for the copy that a run trains in, or "read" for the copy that other commands use.
      base: base folder of local copies, by default `base_folder()`.
      process: index of a process of the run, as each process has its own copy.

    Raises:
      UserError: the private folder for copies belongs to another user or is a symbolic link.
    """
    url, base = url.rstrip("/"), base or base_folder()
    suffix = f".process-{process}" if process else ""
    copy = Copy(os.path.join(private_folder(os.path.join(base, use)), _digest(url) + suffix), url.rpartition("/")[2])
    os.makedirs(os.path.dirname(copy.root), mode=0o700, exist_ok=True)
    _migrate(copy, url, os.path.join(base, use), suffix)
    return copy


def copy_containing(path: str) -> Optional[tuple[str, Copy]]:
    """Finds the local copy below `base_folder()` that contains a path.

    Returns (URL, copy), or None if no local copy contains the path.
    """
    path_components = os.path.relpath(os.path.abspath(path), base := base_folder()).split(os.sep)
    if len(path_components) < 4 or path_components[0] not in _USES or path_components[2] != _FILES:
        return None
    copy = Copy(os.path.join(base, *path_components[:2]), path_components[3])
    url = _recorded_url(copy.record)
    return (url, copy) if url and path_components[1].partition(".")[0] == _digest(url) else None


def url_of_old_copy(path: str) -> str:
    """Returns the URL of the version 0.6 local copy that contains a path, or "" if there is none."""
    path_components = os.path.relpath(os.path.abspath(path), base_folder()).split(os.sep)
    is_old_layout = len(path_components) > 2 and path_components[0] in _USES and path_components[1] in STORES
    return f"{path_components[1]}://{'/'.join(path_components[2:])}" if is_old_layout else ""


def _digest(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:32]


def _recorded_url(record: str) -> str:
    try:
        url = read_object(record).get("url")
    except UserError:  # the record is missing or damaged: all objects are downloaded again
        return ""
    return url if isinstance(url, str) else ""


def _migrate(copy: Copy, url: str, folder: str, suffix: str) -> None:
    """Moves a local copy that uses the version 0.6 layout, along with its record, to the current paths.

    Does nothing if there is no old copy, or if the current paths are in use.
    """
    scheme, _, name = url.partition("://")
    old_root = path_below(os.path.join(folder, scheme), name) + suffix
    if not os.path.lexists(old_root + _OLD_RECORD) or os.path.exists(copy.record):
        return
    if _recorded_url(old_root + _OLD_RECORD) == url and os.path.isdir(old_root) and not os.path.exists(copy.root):
        os.rename(old_root, copy.root)
        os.rename(old_root + _OLD_RECORD, copy.record)
        print_message(f"the copy of {url} and its record have moved from {old_root} to {copy.folder}")
