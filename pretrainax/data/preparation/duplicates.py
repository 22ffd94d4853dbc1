"""Documents that occur more than once: a hash of each while they are tokenized, and a corpus without the repetitions.

Every machine tokenizes its shards whole and notes the hashes of their documents. When all shards are there, the hashes
are compared, and the shards are copied without the tokens of the documents to drop. So nobody waits for another's
hashes, and what is dropped depends on the order of the documents alone: the first of several stays.
"""

import collections
import hashlib
import json
import os
from collections.abc import Iterable, Iterator

import numpy as np

from pretrainax.config import UserError
from pretrainax.data import checksums
from pretrainax.data.preparation.shards import base_of, finish_shard, pieces_of, read_arrays
from pretrainax.data.sources.base import Document, Record, texts_of
from pretrainax.files.atomic_files import replacing, write_atomically

_AT_A_TIME = 1 << 22  # hashes compared in memory at once: 100 MB


def hashed(documents: Iterable[Document], directory: str, shard: int) -> Iterator[Document]:
    """Passes documents on and writes their hashes, sorted: a file of all first halves, all second halves, all numbers,
    and a checksum.

    A hash is 128 bits of blake2b: two texts of 1e10 share one with a probability of 1e-19.
    """
    digests = bytearray()
    for document in documents:
        digests += hash_of(document)
        yield document
    high, low = np.frombuffer(digests, "<u8").reshape(-1, 2).T
    order = np.lexsort((low, high))  # equal ones stay in their order
    content = b"".join(column.tobytes() for column in (high[order], low[order], order.astype("<i8")))
    checksum = checksums.new()
    checksum.update(content)
    write_atomically(_path(directory, shard), content + checksum.digest())


def _path(directory: str, shard: int) -> str:
    return f"{base_of(directory, shard)}.hashes"


def hash_of(document: Document) -> bytes:
    """Returns the 16 bytes by which equal documents are known."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts_of(document):
        for piece in pieces_of(text):
            digest.update(piece.encode())
        digest.update(b"\xff")  # in no UTF-8: ("ab", "c") is not ("a", "bc")
    if isinstance(document, Record):  # of which equal texts may have other labels
        digest.update(json.dumps(document.note, sort_keys=True).encode())
    return digest.digest()


def find_duplicates(directory: str, count: int) -> list[np.ndarray]:
    """Finds for each of `count` shards the sorted numbers of its documents that occurred before, in any shard.

    A range of hashes at a time, each read from all shards once.
    """
    sizes = [_checked_size(_path(directory, shard)) for shard in range(count)]
    found = [[] for _ in range(count)]
    ranges = sum(sizes) // _AT_A_TIME + 1
    for i in range(ranges):
        parts = [_hashes_in(_path(directory, shard), sizes[shard], i, ranges) for shard in range(count)]
        high, low, documents = (np.concatenate(column) for column in zip(*parts, strict=True))
        shards = np.repeat(np.arange(count), [len(part[0]) for part in parts])
        order = np.lexsort((documents, shards, low, high))
        high, low = high[order], low[order]
        again = order[1:][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]
        for shard in np.unique(shards[again]):
            found[shard].append(documents[again[shards[again] == shard]])
    return [np.sort(np.concatenate(f)) if f else np.empty(0, np.int64) for f in found]


def _checked_size(path: str) -> int:
    """Returns how many hashes a file holds; UserError where they are not those that were written."""
    with open(path, "rb") as f:
        content = f.read()
    size, checksum = len(content) // 24, checksums.new()
    checksum.update(content[: 24 * size])
    if content[24 * size :] not in (b"", checksum.digest()):  # b"": written before there were checksums
        raise UserError(f"{path} is damaged: delete {os.path.dirname(path)} and run the same command again")
    return size


def _hashes_in(path: str, size: int, i: int, ranges: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the columns of a shard's file whose first halves are in range i of `ranges` equal ones."""
    if not size:
        return tuple(np.empty(0, dtype) for dtype in ("<u8", "<u8", "<i8"))
    high, low, documents = np.memmap(path, "<u8", mode="r", shape=(3, size))
    first = high.searchsorted(np.uint64((i << 64) // ranges))
    last = high.searchsorted(np.uint64((i + 1 << 64) // ranges)) if i + 1 < ranges else size
    return high[first:last], low[first:last], documents[first:last].view("<i8")


def copy_without(source: str, directory: str, shard: int, dropped: dict[str, np.ndarray], dtype: str) -> None:
    """Writes a shard again without some of its documents. dropped: reason -> their numbers; none has two reasons."""
    old, new = base_of(source, shard), base_of(directory, shard)
    totals = checksums.read_json(f"{old}.json")
    if totals.get("tokens_checksum") not in (None, checksums.of_file(f"{old}.tokens")):
        raise UserError(f"{old}.tokens is damaged: delete {source} and run the same command again")
    arrays = read_arrays(old, totals)
    tokens = np.memmap(f"{old}.tokens", dtype, mode="r") if totals["tokens"] else np.empty(0, dtype)
    ends, counts, kept = arrays["ends"], arrays["counts"], np.ones(totals["documents"], bool)
    for numbers in dropped.values():
        kept[numbers] = False
    starts = np.append(0, ends[:-1])
    written, checksum = 0, checksums.new()
    with replacing(f"{new}.tokens") as f:
        for start, end in [*_runs(~kept, starts, ends), (len(tokens), len(tokens))]:
            f.write(tokens[written:start].data)  # what lies between those that are dropped
            checksum.update(tokens[written:start].data)
            counts = counts - np.bincount(tokens[start:end], minlength=len(counts))
            written = end
    lengths = np.where(kept, ends - starts, 0)
    removed = (ends - starts - lengths).cumsum()  # tokens, up to the end of each document
    new_arrays = {"ends": (ends - removed)[kept], "bytes": arrays["bytes"][kept], "counts": counts}
    if "part_ends" in arrays:
        owners = ends.searchsorted(arrays["part_ends"])
        new_arrays["part_ends"] = (arrays["part_ends"] - removed[owners])[kept[owners]]
    if "notes" in arrays:
        sizes = np.diff(arrays["note_ends"], prepend=0)
        new_arrays["notes"] = arrays["notes"][np.repeat(kept, sizes)]
        new_arrays["note_ends"] = sizes[kept].cumsum()
    skipped = collections.Counter(totals["skipped"]) + collections.Counter({k: len(n) for k, n in dropped.items()})
    finish_shard(new, new_arrays, skipped, checksum.hexdigest())


def _runs(chosen: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields (start, end) in tokens of each run of chosen documents."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]])))
    for first, behind in edges.reshape(-1, 2).tolist():
        yield int(starts[first]), int(ends[behind - 1])
