"""Removes exact duplicates: hashes documents during tokenization, then copies the shards without the duplicates.

Each machine tokenizes all documents of its shards and saves a hash of each document. When all shards are complete, one
machine compares the hashes and copies the shards without the duplicates' tokens, so that no machine waits for another
machine during tokenization. Of several equal documents, the first is kept, so the result depends only on the order of
the documents.
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

_HASHES_PER_RANGE = 1 << 22  # approximate number of hashes in memory at once (100 MB)


def write_hashes(documents: Iterable[Document], directory: str, shard: int) -> Iterator[Document]:
    """Yields the documents unchanged and, after the last one, writes their sorted hashes to the shard's hash file.

    The file contains the first halves of all hashes, the second halves, the document numbers in the shard, and a
    checksum. A hash is 128 bits of blake2b, so the probability of any collision among 1e10 documents is about 1e-19.
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
    write_atomically(_hash_path(directory, shard), content + checksum.digest())


def _hash_path(directory: str, shard: int) -> str:
    return f"{shard_path(directory, shard)}.hashes"


def document_hash(document: Document) -> bytes:
    """Computes a 16-byte hash of a document's text and, for a record, also of its metadata.

    A str and its UTF-8 bytes have the same hash.
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
    """Finds the documents that equal an earlier one, and returns their sorted document numbers for each shard.

    The earlier document may be in any shard. To limit memory, the function compares one range of hash values at a time
    and reads the hashes in this range from all shards.

    Args:
      directory: the folder of the shards and hash files.
      count: the number of shards.
    """
    sizes = [_checked_size(_hash_path(directory, shard)) for shard in range(count)]
    duplicates = [[] for _ in range(count)]
    num_ranges = sum(sizes) // _HASHES_PER_RANGE + 1
    for i in range(num_ranges):
        hashes = [_hashes_in(_hash_path(directory, shard), sizes[shard], i, num_ranges) for shard in range(count)]
        high, low, documents = (np.concatenate(column) for column in zip(*hashes, strict=True))
        shards = np.repeat(np.arange(count), [len(shard_hashes[0]) for shard_hashes in hashes])
        order = np.lexsort((documents, shards, low, high))
        high, low = high[order], low[order]
        duplicate_indices = order[1:][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]
        for shard in np.unique(shards[duplicate_indices]):
            duplicates[shard].append(documents[duplicate_indices[shards[duplicate_indices] == shard]])
    return [np.sort(np.concatenate(numbers)) if numbers else np.empty(0, np.int64) for numbers in duplicates]


def _checked_size(path: str) -> int:
    """Returns the number of hashes in a hash file; raises UserError if the file's checksum does not match."""
    with open(path, "rb") as f:
        content = f.read()
    size, checksum = len(content) // 24, checksums.new_hash()
    checksum.update(content[: 24 * size])
    if content[24 * size :] not in (b"", checksum.digest()):  # b"": an older version wrote no checksum
        raise UserError(f"{path} is damaged: delete {os.path.dirname(path)} and run the same command again")
    return size


def _hashes_in(path: str, size: int, index: int, num_ranges: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads the hashes whose first half falls in one of `num_ranges` equal ranges of the 64-bit integers.

    Args:
      path: path of the hash file.
      size: the number of hashes in the file.
      index: which range to read, from 0 to `num_ranges` - 1.
      num_ranges: the number of ranges.

    Returns:
      The first halves of the hashes, their second halves, and the document numbers, each [number of hashes in the
      range].
    """
    if not size:
        return tuple(np.empty(0, dtype) for dtype in ("<u8", "<u8", "<i8"))
    high, low, documents = np.memmap(path, "<u8", mode="r", shape=(3, size))
    first = high.searchsorted(np.uint64((index << 64) // num_ranges))
    last = high.searchsorted(np.uint64((index + 1 << 64) // num_ranges)) if index + 1 < num_ranges else size
    return high[first:last], low[first:last], documents[first:last].view("<i8")


def copy_shard_without(source: str, directory: str, shard: int, dropped: dict[str, np.ndarray], dtype: str) -> None:
    """Copies a tokenized shard without the dropped documents.

    Args:
      source: directory of the original shard.
      directory: directory of the copy.
      shard: number of the shard.
      dropped: document numbers to drop, by reason; each document has only one reason.
      dtype: dtype of the tokens in the file.
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
    position, checksum = 0, checksums.new_hash()
    with replacing(f"{new}.tokens") as f:
        for start, end in [*_token_ranges(~retained, starts, ends), (len(tokens), len(tokens))]:
            f.write(tokens[position:start].data)  # the tokens between two ranges of dropped documents
            checksum.update(tokens[position:start].data)
            counts = counts - np.bincount(tokens[start:end], minlength=len(counts))
            position = end
    lengths = np.where(retained, ends - starts, 0)
    removed = (ends - starts - lengths).cumsum()  # [documents] dropped tokens up to the end of each document
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


def _token_ranges(chosen: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields (start, end), in token offsets, for each run of consecutive documents that are chosen.

    Args:
      chosen: [documents] True for the chosen documents.
      starts, ends: [documents] token offsets at which each document starts and ends.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]])))
    for first, stop in edges.reshape(-1, 2).tolist():
        yield int(starts[first]), int(ends[stop - 1])
