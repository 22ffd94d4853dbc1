"""Caches token shards from an object store on this machine, up to a size limit.

The tokens of all other shards are read from the store by byte range, one range per row. In a shuffled epoch, every
batch may read from any shard, so if the cache evicted the least recently used shard, it would soon be needed again.
Instead, the cache keeps a corpus's first shards, and deletes the least recently opened shards of other corpora.
"""

import contextlib
import os
import time
from collections.abc import Sequence

from pretrainax.data.corpus import Corpus
from pretrainax.storage import places
from pretrainax.storage.mirror import Mirror


class ShardCache:
    """Selects which shards of the corpora to keep on this machine, and downloads them.

    All shards of a corpus that is not in an object store are selected, because they are already on a local disk.
    """

    def __init__(self, corpora: Sequence[Corpus], limit: int):
        """Selects shards of up to `limit` bytes in total, and deletes other cached shards that would exceed the limit.

        The store still has the deleted shards.
        """
        free_bytes, self._selected = limit, set[str]()
        for corpus in corpora:
            for path, size in corpus.shard_sizes().items():
                if places.mirror_of(corpus.directory) is None or size <= free_bytes:
                    self._selected.add(path)
                    free_bytes -= size
        for mirror in {id(t): t for c in corpora if (t := places.mirror_of(c.directory)) is not None}.values():
            self._trim(mirror, free_bytes)

    def fetch(self, path: str) -> bool:
        """Downloads a file if necessary and returns True, or returns False if it is a shard that stays in the store."""
        if os.path.exists(path):
            return True
        if path.endswith(".tokens") and path not in self._selected:
            return False
        folder, name = os.path.split(path)
        places.complete(folder, lambda file_name: file_name == name)
        return True

    def _trim(self, mirror: Mirror, free_bytes: int) -> None:
        """Deletes cached shards that are not selected, until the remaining ones fit in `free_bytes` bytes.

        The most recently opened shards are kept. `mirror` is the local copy of a folder in the store.
        """
        candidates = []
        for folder, _, names in os.walk(mirror.root):
            for path in (os.path.join(folder, name) for name in names if name.endswith(".tokens")):
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(path)
                    if path in self._selected:
                        os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns))  # a new mtime would cause an upload
                    else:
                        candidates.append((stat.st_atime_ns, path))
        for _, path in sorted(candidates, reverse=True):
            free_bytes -= os.path.getsize(path)
            if free_bytes < 0:
                mirror.evict(path)
