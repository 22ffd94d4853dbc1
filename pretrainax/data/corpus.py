"""Defines `Corpus`, which reads token shards (`pretrainax.data.preparation.shards`) from disk or an object store."""

import functools
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.data import checksums
from pretrainax.data.preparation.shards import COUNTS, ENDS, INDEX, NOTE_ENDS, NOTES, PARTS, Encoded, shard_path
from pretrainax.data.sources.base import Note
from pretrainax.files.object_names import path_below
from pretrainax.storage.mirror import Mirror
from pretrainax.storage.places import mirror_of

Window = tuple[int, int]  # offset of the first token, number of tokens
Piece = tuple[int, int, int]  # shard, offset of the first token in the shard, number of tokens


class Corpus:
    """One split of a prepared corpus: the tokens of all documents, each followed by the separator.

    Pickling an instance stores only its path.
    """

    def __init__(self, directory: str):
        """Reads the index of a corpus folder.

        Raises:
          ValueError: the folder has no index.
          UserError: the index is damaged.
        """
        self.directory = directory
        index = checksums.read_json(os.path.join(directory, INDEX))
        if index is None:
            raise ValueError(f"{directory} holds no prepared corpus")
        try:
            self._read_index(index)
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(f"{damage_message(os.path.join(directory, INDEX))} ({type(e).__name__}: {e})") from e
        self._shards: dict[int, np.ndarray] = {}
        self.prefetched: Mapping[Piece, np.ndarray] = {}  # prefetched tokens of shards that are only in the store

    def _read_index(self, index: dict) -> None:
        self.num_tokens: int = index["tokens"]
        self.num_documents: int = index["documents"]
        self.num_records: int = index.get("records", self.num_documents)  # a record may be several documents
        self.num_bytes: int = index["bytes"]  # size of the text in UTF-8
        self.skipped: dict[str, int] = index["skipped"]  # reason -> number of skipped records
        self.parts: Optional[str] = index.get("parts")  # kind of documents: "sentences" | "pairs" | "records" | None
        self.num_parts: int = index.get("num_parts", 0)
        self.fingerprint: str = index["fingerprint"]
        self.checksums: dict[str, str] = index.get("checksums", {})  # file -> checksum; {} in older corpora
        self._dtype = np.dtype(index["dtype"])
        self._shard_starts = np.cumsum([0, *index["shards"]])  # [shards + 1], token offset of each shard and of the end
        for name in self.checksums:
            path_below(self.directory, name)  # raises UserError for a file outside the folder

    def __reduce__(self):
        return Corpus, (self.directory,)

    @functools.cached_property
    def token_counts(self) -> np.ndarray:
        """Returns how often each token id occurs in the corpus, int64 [vocabulary]."""
        self.check(COUNTS)
        path = os.path.join(self.directory, COUNTS)
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        return _memory_map(path, np.dtype(np.int64), size // 8 or 1)

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Returns `length` tokens from token offset `start`, int32 [length].

        Raises:
          ValueError: the range is not inside the corpus.
        """
        if not 0 <= start <= self.num_tokens - length or length < 1:
            raise ValueError(f"invalid window {start}..{start + length} in a corpus of {self.num_tokens} tokens")
        tokens, filled = np.empty(length, np.int32), 0
        for piece in self._pieces(start, length):
            shard, offset, count = piece
            if (mapped := self._map_shard(shard)) is not None:
                values = mapped[offset : offset + count]
            elif (values := self.prefetched.get(piece)) is None:
                values = self._read([piece])[piece]
            tokens[filled : filled + count] = values
            filled += count
        return tokens

    def read(self, windows: Iterable[Window]) -> dict[Piece, np.ndarray]:
        """Reads, in one call, those pieces of `windows` that are in the object store but not on this machine.

        Returns:
          A mapping from each piece to its tokens, to be assigned to `prefetched`.
        """
        pieces = dict.fromkeys(piece for window in windows for piece in self._pieces(*window))
        return self._read([piece for piece in pieces if self._map_shard(piece[0]) is None])

    @property
    def is_in_store(self) -> bool:
        """Returns True if some token shards are in the object store but not on this machine."""
        return self._mirror is not None and any(self._map_shard(i) is None for i in range(len(self._shard_starts) - 1))

    def _pieces(self, start: int, length: int) -> Iterator[Piece]:
        """Splits a window (a token range) at shard boundaries, and yields one piece for each shard that it touches."""
        shard, stop = int(self._shard_starts.searchsorted(start, "right")) - 1, start + length
        while start < stop:
            first, last = int(self._shard_starts[shard]), min(int(self._shard_starts[shard + 1]), stop)
            if last > start:
                yield shard, start - first, last - start
            start, shard = max(start, last), shard + 1

    def _read(self, pieces: list[Piece]) -> dict[Piece, np.ndarray]:
        """Reads `pieces` from the object store in one call, and returns the tokens of each piece."""
        if not pieces:
            return {}
        assert self._mirror is not None  # without a store, all shards are on disk
        size = self._dtype.itemsize
        ranges = [(self._path(shard), offset * size, (offset + count) * size) for shard, offset, count in pieces]
        contents = self._mirror.read_ranges(ranges)
        return {piece: np.frombuffer(content, self._dtype) for piece, content in zip(pieces, contents, strict=True)}

    def window(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a window and segment ids that number its documents from 1, both int32 [length]."""
        tokens = self.tokens(start, length)
        first, last = self.document_ends.searchsorted((start, start + length - 1), "right").tolist()
        if first == last:  # a single document, the most frequent case
            return tokens, np.ones(length, np.int32)
        segment_ids = np.zeros(length, np.int32)
        segment_ids[0] = 1
        segment_ids[self.document_ends[first:last] - start] = 1  # a document starts where the previous one ends
        return tokens, segment_ids.cumsum(dtype=np.int32)

    def document(self, i: int) -> np.ndarray:
        """Returns the tokens of document i, including its separator, int32 [tokens].

        Raises:
          IndexError: there is no document i.
        """
        if not 0 <= i < self.num_documents:
            raise IndexError(f"document {i} is outside the corpus of {self.num_documents} documents")
        start = int(self.document_ends[i - 1]) if i else 0
        return self.tokens(start, int(self.document_ends[i]) - start)

    @functools.cached_property
    def document_ends(self) -> np.ndarray:
        """Returns the end offset of each document in tokens, after its separator, int64 [documents]."""
        return _memory_map(os.path.join(self.directory, ENDS), np.dtype(np.int64), self.num_documents)

    @functools.cached_property
    def part_ends(self) -> np.ndarray:
        """Returns the end offset of each part in tokens, int64 [parts].

        Parts are sentences, or the source and target of a pair. The last part of a document ends with the document.
        """
        return _memory_map(os.path.join(self.directory, PARTS), np.dtype(np.int64), self.num_parts)

    def note(self, i: int) -> Note:
        """Returns the metadata of document i in a corpus of records.

        Its entry "parts" has the end offset of each text field in the record's tokens.
        """
        start, stop = int(self._note_ends[i - 1]) if i else 0, int(self._note_ends[i])
        return json.loads(self._notes[start:stop].tobytes())

    def encoded(self, i: int) -> Encoded:
        """Returns document i of a corpus of records as encoded by the task: tokens of each text field, and metadata."""
        note = self.note(i)
        return Encoded(np.split(self.document(i), note["parts"][:-1]), note)

    @functools.cached_property
    def _note_ends(self) -> np.ndarray:
        return _memory_map(os.path.join(self.directory, NOTE_ENDS), np.dtype(np.int64), self.num_documents)

    @functools.cached_property
    def _notes(self) -> np.ndarray:
        size = int(self._note_ends[-1]) if len(self._note_ends) else 0
        return _memory_map(os.path.join(self.directory, NOTES), np.dtype(np.uint8), size)

    def check(self, name: str, stop: Optional[threading.Event] = None) -> None:
        """Compares a file of this folder with its checksum; a file without a checksum passes.

        Args:
          name: name of the file in this folder.
          stop: the check ends early, without a result, when this event is set.

        Raises:
          UserError: the file differs from its checksum or cannot be read.
        """
        path = os.path.join(self.directory, name)
        try:
            is_intact = name not in self.checksums or checksums.file_checksum(path, stop) == self.checksums[name]
        except OSError as e:
            raise UserError(f"{damage_message(path)} ({e.strerror})") from e
        if not is_intact and not (stop and stop.is_set()):
            raise UserError(damage_message(path))

    def path_of(self, place: int) -> str:
        """Returns the path of the shard that contains the token at offset `place`."""
        return self._path(int(self._shard_starts.searchsorted(place, "right")) - 1)

    def shard_sizes(self) -> dict[str, int]:
        """Returns the size in bytes of each token shard, by path."""
        sizes = (np.diff(self._shard_starts) * self._dtype.itemsize).tolist()
        return {self._path(shard): size for shard, size in enumerate(sizes)}

    def _path(self, shard: int) -> str:
        return f"{shard_path(self.directory, shard)}.tokens"

    def _map_shard(self, shard: int) -> Optional[np.ndarray]:
        """Returns the memory-mapped tokens of a shard, or None if the shard is in the object store only."""
        if (mapped := self._shards.get(shard)) is None:
            path = self._path(shard)
            if self._mirror is None or os.path.exists(path):
                size = int(self._shard_starts[shard + 1] - self._shard_starts[shard])
                mapped = self._shards[shard] = _memory_map(path, self._dtype, size)
        return mapped

    @functools.cached_property
    def _mirror(self) -> Optional[Mirror]:
        """Returns the local copy of this corpus's object-store folder, or None if the corpus is not in a store."""
        return mirror_of(self.directory)


def damage_message(path: str) -> str:
    """Returns the error message for a damaged file of a corpus."""
    return f"{path} is damaged: delete {os.path.dirname(path)} and prepare again"


def _memory_map(path: str, dtype: np.dtype, size: int) -> np.ndarray:
    """Memory-maps a file as an array [size]; raises UserError if the file is missing or has a different size."""
    if not os.path.isfile(path) or os.path.getsize(path) != size * dtype.itemsize:
        raise UserError(damage_message(path))
    return np.memmap(path, dtype, mode="r", shape=(size,)).view(np.ndarray) if size else np.empty(0, dtype)
