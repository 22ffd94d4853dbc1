"""Keeps token shards of a corpus in an object store on this machine, up to a number of bytes: the others are read there
by range, the tokens of a row at a time.

A shuffled epoch meets every shard with every batch, so that what made room for the last row would be asked for by the
next: the first shards stay, and of other corpora those go that no run has opened for the longest time.
"""

import contextlib
import os
import time
from collections.abc import Sequence

from pretrainax.data.corpus import Corpus
from pretrainax.storage import places
from pretrainax.storage.twin import Twin


class KeptShards:
    """Says which shards of some corpora are to be on this machine, and brings them; on a disk all are there."""

    def __init__(self, corpora: Sequence[Corpus], limit: int):
        """Makes room: deletes shards beyond `limit` bytes, which the store has too, but for those of these corpora that
        are to stay."""
        left, self._kept = limit, set[str]()
        for corpus in corpora:
            for path, size in corpus.shard_sizes().items():
                if places.twin_around(corpus.directory) is None or size <= left:
                    self._kept.add(path)
                    left -= size
        for twin in {id(t): t for c in corpora if (t := places.twin_around(c.directory)) is not None}.values():
            self._trim(twin, left)

    def bring(self, path: str) -> bool:
        """Has a file on this machine, and returns True; or False for a shard that is to stay in the store."""
        if os.path.exists(path):
            return True
        if path.endswith(".tokens") and path not in self._kept:
            return False
        folder, name = os.path.split(path)
        places.complete(folder, lambda each: each == name)
        return True

    def _trim(self, twin: Twin, room: int) -> None:
        """Deletes shards that are not to stay, but for the last used ones in `room` bytes."""
        found = []
        for folder, _, names in os.walk(twin.root):
            for path in (os.path.join(folder, name) for name in names if name.endswith(".tokens")):
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(path)
                    if path in self._kept:
                        os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns))  # when it was read; else it would be sent
                    else:
                        found.append((stat.st_atime_ns, path))
        for _, path in sorted(found, reverse=True):
            room -= os.path.getsize(path)
            if room < 0:
                twin.forget(path)
