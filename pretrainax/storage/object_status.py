"""Classifies objects that changed in a store since their last transfer: replaced, lost, or listed by a manifest."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from pretrainax.files.object_names import path_below
from pretrainax.storage.run_objects import MANIFEST, PART_NAME, STEP, file_of, newest_complete
from pretrainax.storage.store import Stamp

# replaced: the store has a newer version of the object, or a newer checkpoint.
# lost: the object is missing in the store, and nothing has replaced it.
# vouched: the object is missing or damaged in the store, but a manifest in the store lists the SHA-256 of the local
#   file, so the local file is valid.
ObjectChange: TypeAlias = Literal["replaced", "lost", "vouched"]


class ObjectStatus:
    """Classifies objects that changed since their last download or upload, based on one listing of the store."""

    def __init__(self, listing: Mapping[str, Stamp], read: Callable[[str], bytes], root: str):
        """Stores the arguments and finds the newest complete checkpoint in the listing.

        Args:
          listing: current size and version of each object in the store, by name.
          read: returns an object's content, given its name.
          root: folder of the local files.
        """
        self._listing, self._read, self._root = listing, read, root
        self._newest_steps = newest_complete(listing)  # by path of the `checkpoints` folder
        self._manifests: dict[str, dict[str, str]] = {}

    def status(self, name: str) -> ObjectChange:
        """Classifies an object that is missing from the store or has changed there."""
        match = STEP.fullmatch(name)
        if match and (manifest := f"{match[1]}/{match[2]}/{MANIFEST}") in self._listing:
            digest = self._manifest_digests(manifest).get(name.removeprefix(f"{match[1]}/{match[2]}/"))
            return "vouched" if digest is not None and digest == self._local_digest(name) else "replaced"
        if name in self._listing:
            return "replaced"
        if match:
            return "replaced" if self._newest_steps.get(match[1], -1) > int(match[2]) else "lost"
        part = PART_NAME.fullmatch(name)
        return "replaced" if part and any(file_of(other) == part[1] for other in self._listing) else "lost"

    def _manifest_digests(self, manifest: str) -> dict[str, str]:
        """Returns the {file name: SHA-256 in hex} that a manifest in the store lists; reads each manifest only once."""
        if manifest not in self._manifests:
            lines = self._read(manifest).decode(errors="replace").splitlines()
            self._manifests[manifest] = {line[66:]: line[:64] for line in lines}
        return self._manifests[manifest]

    def _local_digest(self, name: str) -> str:
        try:
            with open(path_below(self._root, name), "rb") as f:
                return hashlib.file_digest(f, "sha256").hexdigest()
        except OSError:
            return ""
