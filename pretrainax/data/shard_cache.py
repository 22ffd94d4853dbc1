"""Caches token shards from an object store on this machine, up to a number of bytes.

The tokens of all other shards are read from the store by byte range, one range per row. A shuffled epoch reads every
shard in every batch. If the cache evicted the least recently used shard, the next row would need the evicted shard. The
cache therefore retains the first shards, and deletes the least recently opened shards of other corpora.
"""

import contextlib
import os
import time
from collections.abc import Sequence

from pretrainax.data.corpus import Corpus
from pretrainax.storage import places
from pretrainax.storage.mirror import Mirror


class ShardCache:
    """Selects the shards of corpora to store on this machine, and downloads them.

    Corpora that are not in an object store are on a local disk; all their shards are selected.
    """

    def __init__(self, corpora: Sequence[Corpus], limit: int):
        """Selects shards up to `limit` bytes in total, and deletes other cached shards that exceed the limit.

        The store still has the deleted shards.
        """
        left, self._selected = limit, set[str]()
        for corpus in corpora:
            for path, size in corpus.shard_sizes().items():
                if places.mirror_of(corpus.directory) is None or size <= left:
                    self._selected.add(path)
                    left -= size
        for twin in {id(t): t for c in corpora if (t := places.mirror_of(c.directory)) is not None}.values():
            self._trim(twin, left)

    def fetch(self, path: str) -> bool:
        """Downloads a file if necessary and returns True; returns False for a shard that stays in the store."""
        if os.path.exists(path):
            return True
        if path.endswith(".tokens") and path not in self._selected:
            return False
        folder, name = os.path.split(path)
        places.complete(folder, lambda each: each == name)
        return True

    def _trim(self, twin: Mirror, room: int) -> None:
        """Deletes cached shards that are not selected, except the most recently opened ones up to `room` bytes.

        twin: the local copy of a folder in the store.
        """
        candidates = []
        for folder, _, names in os.walk(twin.root):
            for path in (os.path.join(folder, name) for name in names if name.endswith(".tokens")):
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(path)
                    if path in self._selected:
                        os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns))  # a new mtime would cause an upload
                    else:
                        candidates.append((stat.st_atime_ns, path))
        for _, path in sorted(candidates, reverse=True):
            room -= os.path.getsize(path)
            if room < 0:
                twin.evict(path)
