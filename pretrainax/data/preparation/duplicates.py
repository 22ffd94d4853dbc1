"""Removes duplicate documents: hashes documents during tokenization and copies the shards without the duplicates.

Each machine tokenizes its shards in full and saves a hash of each document. When all shards are complete, the hashes
are compared and the shards are copied without the tokens of duplicates. No machine waits for the hashes of another
machine, and the result depends only on the order of the documents: the first copy stays.
"""

import collections
import hashlib
import json
import os
from collections.abc import Iterable, Iterator

import numpy as np

from pretrainax.config import UserError
from pretrainax.data import checksums
from pretrainax.data.preparation.shards import finish_shard, read_arrays, shard_path, split_text
from pretrainax.data.sources.base import Document, Record, texts_of
from pretrainax.files.atomic_files import replacing, write_atomically

_AT_A_TIME = 1 << 22  # hashes in memory at once: 100 MB


def write_hashes(documents: Iterable[Document], directory: str, shard: int) -> Iterator[Document]:
    """Yields the documents and writes their sorted hashes to a file.

    The file holds the first halves of all hashes, the second halves, the document numbers and a checksum. A hash is 128
    bits of blake2b: the probability of a collision among 1e10 texts is 1e-19.
    """
    digests = bytearray()
    for document in documents:
        digests += document_hash(document)
        yield document
    high, low = np.frombuffer(digests, "<u8").reshape(-1, 2).T
    order = np.lexsort((low, high))  # stable: equal hashes stay in document order
    content = b"".join(column.tobytes() for column in (high[order], low[order], order.astype("<i8")))
    checksum = checksums.new_hash()
    checksum.update(content)
    write_atomically(_path(directory, shard), content + checksum.digest())


def _path(directory: str, shard: int) -> str:
    return f"{shard_path(directory, shard)}.hashes"


def document_hash(document: Document) -> bytes:
    """Returns a 16-byte hash, which is equal for equal documents."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts_of(document):
        for piece in split_text(text):
            digest.update(piece.encode())
        digest.update(b"\xff")  # never in UTF-8: ("ab", "c") differs from ("a", "bc")
    if isinstance(document, Record):  # records with equal texts may have different labels
        digest.update(json.dumps(document.note, sort_keys=True).encode())
    return digest.digest()


def find_duplicates(directory: str, count: int) -> list[np.ndarray]:
    """Returns for each of `count` shards the sorted numbers of documents that repeat an earlier one in any shard.

    It processes one range of hashes at a time and reads each range once from every shard.
    """
    sizes = [_checked_size(_path(directory, shard)) for shard in range(count)]
    duplicates = [[] for _ in range(count)]
    ranges = sum(sizes) // _AT_A_TIME + 1
    for i in range(ranges):
        parts = [_hashes_in(_path(directory, shard), sizes[shard], i, ranges) for shard in range(count)]
        high, low, documents = (np.concatenate(column) for column in zip(*parts, strict=True))
        shards = np.repeat(np.arange(count), [len(part[0]) for part in parts])
        order = np.lexsort((documents, shards, low, high))
        high, low = high[order], low[order]
        repeated = order[1:][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]
        for shard in np.unique(shards[repeated]):
            duplicates[shard].append(documents[repeated[shards[repeated] == shard]])
    return [np.sort(np.concatenate(f)) if f else np.empty(0, np.int64) for f in duplicates]


def _checked_size(path: str) -> int:
    """Returns the number of hashes in a file; raises UserError if the checksum does not match."""
    with open(path, "rb") as f:
        content = f.read()
    size, checksum = len(content) // 24, checksums.new_hash()
    checksum.update(content[: 24 * size])
    if content[24 * size :] not in (b"", checksum.digest()):  # b"": a file without checksum, from an older version
        raise UserError(f"{path} is damaged: delete {os.path.dirname(path)} and run the same command again")
    return size


def _hashes_in(path: str, size: int, i: int, ranges: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the columns of a shard's hash file, for first halves in the i-th of `ranges` equal ranges."""
    if not size:
        return tuple(np.empty(0, dtype) for dtype in ("<u8", "<u8", "<i8"))
    high, low, documents = np.memmap(path, "<u8", mode="r", shape=(3, size))
    first = high.searchsorted(np.uint64((i << 64) // ranges))
    last = high.searchsorted(np.uint64((i + 1 << 64) // ranges)) if i + 1 < ranges else size
    return high[first:last], low[first:last], documents[first:last].view("<i8")


def copy_shard_without(source: str, directory: str, shard: int, dropped: dict[str, np.ndarray], dtype: str) -> None:
    """Copies a shard without some documents. dropped: reason -> document numbers, with one reason per document."""
    old, new = shard_path(source, shard), shard_path(directory, shard)
    totals = checksums.read_json(f"{old}.json")
    if totals.get("tokens_checksum") not in (None, checksums.file_checksum(f"{old}.tokens")):
        raise UserError(f"{old}.tokens is damaged: delete {source} and run the same command again")
    arrays = read_arrays(old, totals)
    tokens = np.memmap(f"{old}.tokens", dtype, mode="r") if totals["tokens"] else np.empty(0, dtype)
    ends, counts, retained = arrays["ends"], arrays["counts"], np.ones(totals["documents"], bool)
    for numbers in dropped.values():
        retained[numbers] = False
    starts = np.append(0, ends[:-1])
    written, checksum = 0, checksums.new_hash()
    with replacing(f"{new}.tokens") as f:
        for start, end in [*_runs(~retained, starts, ends), (len(tokens), len(tokens))]:
            f.write(tokens[written:start].data)  # the tokens between dropped documents
            checksum.update(tokens[written:start].data)
            counts = counts - np.bincount(tokens[start:end], minlength=len(counts))
            written = end
    lengths = np.where(retained, ends - starts, 0)
    removed = (ends - starts - lengths).cumsum()  # dropped tokens up to the end of each document
    new_arrays = {"ends": (ends - removed)[retained], "bytes": arrays["bytes"][retained], "counts": counts}
    if "part_ends" in arrays:
        owners = ends.searchsorted(arrays["part_ends"])
        new_arrays["part_ends"] = (arrays["part_ends"] - removed[owners])[retained[owners]]
    if "notes" in arrays:
        sizes = np.diff(arrays["note_ends"], prepend=0)
        new_arrays["notes"] = arrays["notes"][np.repeat(retained, sizes)]
        new_arrays["note_ends"] = sizes[retained].cumsum()
    skipped = collections.Counter(totals["skipped"]) + collections.Counter({k: len(n) for k, n in dropped.items()})
    finish_shard(new, new_arrays, skipped, checksum.hexdigest())


def _runs(chosen: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the token range (start, end) of each run of chosen documents."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]])))
    for first, stop in edges.reshape(-1, 2).tolist():
        yield int(starts[first]), int(ends[stop - 1])
