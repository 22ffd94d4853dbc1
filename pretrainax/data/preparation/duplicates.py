"""Removes duplicate documents: hashes documents during tokenization, then copies the shards without the duplicates.

Each machine tokenizes all documents of its shards and saves a hash of each document. When all shards are complete, the
hashes are compared, and the shards are copied without the tokens of the duplicates. No machine waits for the hashes of
another machine. The result depends only on the order of the documents, because the first of several equal documents
remains.
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

_AT_A_TIME = 1 << 22  # number of hashes in memory at a time (100 MB)


def write_hashes(documents: Iterable[Document], directory: str, shard: int) -> Iterator[Document]:
    """Yields the documents unchanged, and writes their sorted hashes to the hash file of a shard at the end.

    The file contains the first halves of all hashes, then the second halves, the document numbers and a checksum. A
    hash is 128 bits of blake2b, so the probability of a collision among 1e10 documents is 1e-19.
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
    """Returns a 16-byte hash of a document's text and, for records, of the metadata. Equal documents have equal hashes.

    The str and the UTF-8 bytes of the same text have the same hash.
    """
    digest = hashlib.blake2b(digest_size=16)
    for text in texts_of(document):
        for piece in split_text(text):
            digest.update(piece.encode())
        digest.update(b"\xff")  # never occurs in UTF-8, so ("ab", "c") and ("a", "bc") have different hashes
    if isinstance(document, Record):  # records with equal texts may have different labels
        digest.update(json.dumps(document.note, sort_keys=True).encode())
    return digest.digest()


def find_duplicates(directory: str, count: int) -> list[np.ndarray]:
    """Returns, for each of `count` shards, the sorted numbers of the documents that equal an earlier document.

    The earlier document may be in any shard. To bound memory, the function compares one range of hashes at a time, for
    which it reads the hash files of all shards.
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
    """Returns the number of hashes in a hash file; raises UserError if the checksum does not match."""
    with open(path, "rb") as f:
        content = f.read()
    size, checksum = len(content) // 24, checksums.new_hash()
    checksum.update(content[: 24 * size])
    if content[24 * size :] not in (b"", checksum.digest()):  # b"": a file without checksum, from an older version
        raise UserError(f"{path} is damaged: delete {os.path.dirname(path)} and run the same command again")
    return size


def _hashes_in(path: str, size: int, i: int, ranges: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the hashes of a hash file in range `i` of `ranges` equal ranges of the first half of a hash.

    Returns:
      First halves of the hashes, second halves of the hashes, and document numbers, each [hashes in the range].
    """
    if not size:
        return tuple(np.empty(0, dtype) for dtype in ("<u8", "<u8", "<i8"))
    high, low, documents = np.memmap(path, "<u8", mode="r", shape=(3, size))
    first = high.searchsorted(np.uint64((i << 64) // ranges))
    last = high.searchsorted(np.uint64((i + 1 << 64) // ranges)) if i + 1 < ranges else size
    return high[first:last], low[first:last], documents[first:last].view("<i8")


def copy_shard_without(source: str, directory: str, shard: int, dropped: dict[str, np.ndarray], dtype: str) -> None:
    """Copies a tokenized shard without the dropped documents.

    Args:
      source: directory of the original shard.
      directory: directory of the copy.
      shard: number of the shard.
      dropped: reason -> numbers of the dropped documents; each document has only one reason.
      dtype: dtype of the tokens.
    """
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
            f.write(tokens[written:start].data)  # the tokens since the last dropped documents
            checksum.update(tokens[written:start].data)
            counts = counts - np.bincount(tokens[start:end], minlength=len(counts))
            written = end
    lengths = np.where(retained, ends - starts, 0)
    removed = (ends - starts - lengths).cumsum()  # [documents] number of dropped tokens before the end of each document
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
    """Yields the token range (start, end) of each run of consecutive chosen documents.

    Args:
      chosen: [documents] True for the chosen documents.
      starts, ends: [documents] token offsets of each document.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]])))
    for first, stop in edges.reshape(-1, 2).tolist():
        yield int(starts[first]), int(ends[stop - 1])
