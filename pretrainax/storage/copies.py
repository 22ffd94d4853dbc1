"""Computes the paths of the local copies of folders in object stores.

    BASE/USE/DIGEST/files/NAME      the local copy; NAME is the last part of the URL
    BASE/USE/DIGEST/record.json     state of each object of the copy at its last download or upload
    BASE/USE/DIGEST/lock            locked by the process that trains in the copy
    BASE/USE/DIGEST/complete        exists while a command uploads its output
    BASE/USE/DIGEST/aside-TIME/     files that were moved out of the copy

BASE is ~/.cache/pretrainax/stores, or config.checkpoint.local_dir. USE is "read" or "work". DIGEST is a hash of the
URL. With it, no copy is inside another copy, and no object can have the path of a record. The folders of USE are
private (mode 0700): a record among other files of a user, for example from an unpacked archive, cannot be trusted.
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
    """Paths for the local copy of one URL: the copy, and the files that manage the copy."""

    folder: str  # BASE/USE/DIGEST, which contains the copy and the files that manage it
    name: str  # the last part of the URL

    @property
    def root(self) -> str:
        """Returns the path of the local copy."""
        return os.path.join(self.folder, _FILES, self.name)

    @property
    def record(self) -> str:
        """Returns the path of the record: the state of each object of the copy at its last download or upload."""
        return os.path.join(self.folder, _RECORD)

    @property
    def lock(self) -> str:
        """Returns the path of the file that the process that trains in the copy has locked."""
        return os.path.join(self.folder, "lock")

    @property
    def complete(self) -> str:
        """Returns the path of the marker file that exists while a command uploads its output from the copy."""
        return os.path.join(self.folder, "complete")

    def new_aside(self) -> str:
        """Returns the path of a new folder for files that are moved out of the copy; does not create the folder."""
        return os.path.join(self.folder, f"aside-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")


def base_folder() -> str:
    """Returns the default base folder for local copies: pretrainax/stores in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(os.path.abspath(cache), "pretrainax", "stores")


def copy_of(url: str, use: Use, base: Optional[str] = None, process: int = 0) -> Copy:
    """Returns the paths of the local copy of a URL; creates the parent folder of the copy, but not the copy.

    Args:
      url: URL of the folder in the object store.
      use: "work" for the copy that a run trains in, "read" for the copy that other commands use.
      base: base folder of local copies; None: `base_folder()`.
      process: index of a process of the run; each process has its own copy.

    Raises:
      UserError: the private folder of the copies belongs to another user, or is a link.
    """
    url, base = url.rstrip("/"), base or base_folder()
    suffix = f".process-{process}" if process else ""
    copy = Copy(os.path.join(private_folder(os.path.join(base, use)), _digest(url) + suffix), url.rpartition("/")[2])
    os.makedirs(os.path.dirname(copy.root), mode=0o700, exist_ok=True)
    _migrate(copy, url, os.path.join(base, use), suffix)
    return copy


def copy_containing(path: str) -> Optional[tuple[str, Copy]]:
    """Returns the local copy below `base_folder()` that contains a path, as (URL, copy); None if there is none."""
    parts = os.path.relpath(os.path.abspath(path), base := base_folder()).split(os.sep)
    if len(parts) < 4 or parts[0] not in _USES or parts[2] != _FILES:
        return None
    copy = Copy(os.path.join(base, *parts[:2]), parts[3])
    url = _recorded_url(copy.record)
    return (url, copy) if url and parts[1].partition(".")[0] == _digest(url) else None


def url_of_old_copy(path: str) -> str:
    """Returns the URL of the local copy that contains a path, in the layout of version 0.6; "" for other paths."""
    parts = os.path.relpath(os.path.abspath(path), base_folder()).split(os.sep)
    is_old = len(parts) > 2 and parts[0] in _USES and parts[1] in STORES
    return f"{parts[1]}://{'/'.join(parts[2:])}" if is_old else ""


def _digest(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:32]


def _recorded_url(record: str) -> str:
    try:
        url = read_object(record).get("url")
    except UserError:  # missing or damaged: all objects are downloaded again
        return ""
    return url if isinstance(url, str) else ""


def _migrate(copy: Copy, url: str, folder: str, suffix: str) -> None:
    """Moves a local copy of version 0.6 and the record next to it to their current paths, if there is such a copy."""
    scheme, _, name = url.partition("://")
    old = path_below(os.path.join(folder, scheme), name) + suffix
    if not os.path.lexists(old + _OLD_RECORD) or os.path.exists(copy.record):
        return
    if _recorded_url(old + _OLD_RECORD) == url and os.path.isdir(old) and not os.path.exists(copy.root):
        os.rename(old, copy.root)
        os.rename(old + _OLD_RECORD, copy.record)
        print_message(f"the copy of {url} and its record have moved from {old} to {copy.folder}")
