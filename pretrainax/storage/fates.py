"""Says why a store does not have an object as this machine has copied it: it was replaced, lost or damaged."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from pretrainax.files.object_names import path_below
from pretrainax.storage.run_objects import MANIFEST, PART_NAME, STEP, file_of, newest_whole
from pretrainax.storage.store import Stamp

# Replaced: by something newer. Lost: the store has nothing in its place. Vouched: lost or damaged, as a manifest of the
# store still names what is here.
Fate: TypeAlias = Literal["replaced", "lost", "vouched"]


class Fates:
    """Judges objects by one listing of the store."""

    def __init__(self, found: Mapping[str, Stamp], read: Callable[[str], bytes], root: str):
        """read: returns an object by its name. root: of the copies."""
        self._found, self._read, self._root = found, read, root
        self._newest = newest_whole(found)  # step of each folder of checkpoints
        self._manifests: dict[str, dict[str, str]] = {}

    def of(self, name: str) -> Fate:
        """Returns the fate of an object that the store had otherwise than it has now."""
        match = STEP.fullmatch(name)
        if match and (manifest := f"{match[1]}/{match[2]}/{MANIFEST}") in self._found:
            digest = self._digests(manifest).get(name.removeprefix(f"{match[1]}/{match[2]}/"))
            return "vouched" if digest is not None and digest == self._digest(name) else "replaced"
        if name in self._found:
            return "replaced"
        if match:
            return "replaced" if self._newest.get(match[1], -1) > int(match[2]) else "lost"
        part = PART_NAME.fullmatch(name)
        return "replaced" if part and any(file_of(other) == part[1] for other in self._found) else "lost"

    def _digests(self, manifest: str) -> dict[str, str]:
        """Returns the SHA-256 of each file that a manifest in the store names; read once."""
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
