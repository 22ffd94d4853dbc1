"""Classifies objects that have changed in a store since their last download or upload: replaced, lost or damaged."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from pretrainax.files.object_names import path_below
from pretrainax.storage.run_objects import MANIFEST, PART_NAME, STEP, file_of, newest_complete
from pretrainax.storage.store import Stamp

# replaced: the store has a newer version, or a newer checkpoint. lost: the object is missing in the store, and nothing
# has replaced it. vouched: the object is missing or damaged in the store, but a manifest in the store lists the SHA-256
# of the local file, so the local file is valid.
Fate: TypeAlias = Literal["replaced", "lost", "vouched"]


class ObjectStatus:
    """Classifies objects that have changed since their last download or upload, with one listing of the store."""

    def __init__(self, listing: Mapping[str, Stamp], read: Callable[[str], bytes], root: str):
        """Stores the arguments.

        Args:
          listing: current size and version of each object of the store, by name.
          read: returns the content of an object, given its name.
          root: folder of the local files.
        """
        self._listed, self._read, self._root = listing, read, root
        self._newest = newest_complete(listing)  # step of the newest complete checkpoint, by folder of checkpoints
        self._manifests: dict[str, dict[str, str]] = {}

    def status(self, name: str) -> Fate:
        """Returns the class of an object that is missing in the store, or has changed: replaced, lost or vouched."""
        match = STEP.fullmatch(name)
        if match and (manifest := f"{match[1]}/{match[2]}/{MANIFEST}") in self._listed:
            digest = self._digests(manifest).get(name.removeprefix(f"{match[1]}/{match[2]}/"))
            return "vouched" if digest is not None and digest == self._digest(name) else "replaced"
        if name in self._listed:
            return "replaced"
        if match:
            return "replaced" if self._newest.get(match[1], -1) > int(match[2]) else "lost"
        part = PART_NAME.fullmatch(name)
        return "replaced" if part and any(file_of(other) == part[1] for other in self._listed) else "lost"

    def _digests(self, manifest: str) -> dict[str, str]:
        """Returns the SHA-256 of each file that a manifest in the store lists, by name; reads each manifest once."""
        if manifest not in self._manifests:
            lines = self._read(manifest).decode(errors="replace").splitlines()
            self._manifests[manifest] = {line[66:]: line[:64] for line in lines}
        return self._manifests[manifest]

    def _digest(self, name: str) -> str:
        try:
            with open(path_below(self._root, name), "rb") as f:
                return hashlib.file_digest(f, "sha256").hexdigest()
        except OSError:
            return ""
