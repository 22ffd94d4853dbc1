"""Defines `Corpus`: the token shards of `pretrainax.data.preparation.shards`, memory-mapped or read from a store."""

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
    """The tokens of one split of a corpus: all documents, each followed by the separator. Pickles as its path."""

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
        self.held: Mapping[Piece, np.ndarray] = {}  # tokens read ahead; their shards are only in the store

    def _read_index(self, index: dict) -> None:
        self.num_tokens: int = index["tokens"]
        self.num_documents: int = index["documents"]
        self.num_records: int = index.get("records", self.num_documents)  # documents may be windows of a record
        self.num_bytes: int = index["bytes"]  # of the text in UTF-8
        self.skipped: dict[str, int] = index["skipped"]  # reason -> number of skipped records
        self.parts: Optional[str] = index.get("parts")  # kind of documents: "sentences" | "pairs" | "records" | None
        self.num_parts: int = index.get("num_parts", 0)
        self.fingerprint: str = index["fingerprint"]
        self.checksums: dict[str, str] = index.get("checksums", {})  # file -> checksum; {} in older corpora
        self._dtype = np.dtype(index["dtype"])
        self._starts = np.cumsum([0, *index["shards"]])  # [shards + 1] token offsets
        for name in self.checksums:
            path_below(self.directory, name)  # raises UserError for a file outside the folder

    def __reduce__(self):
        return Corpus, (self.directory,)

    @functools.cached_property
    def token_counts(self) -> np.ndarray:
        """Returns the number of occurrences of each token id, int64 [vocabulary]."""
        self.check(COUNTS)
        path = os.path.join(self.directory, COUNTS)
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        return _map(path, np.dtype(np.int64), size // 8 or 1)

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Returns `length` tokens from token offset `start`, int32 [length].

        Raises:
          ValueError: the window is not inside the corpus.
        """
        if not 0 <= start <= self.num_tokens - length or length < 1:
            raise ValueError(f"invalid window {start}..{start + length} in a corpus of {self.num_tokens} tokens")
        tokens, filled = np.empty(length, np.int32), 0
        for piece in self._pieces(start, length):
            shard, offset, count = piece
            if (mapped := self._map_shard(shard)) is not None:
                values = mapped[offset : offset + count]
            elif (values := self.held.get(piece)) is None:
                values = self._read([piece])[piece]
            tokens[filled : filled + count] = values
            filled += count
        return tokens

    def read(self, windows: Iterable[Window]) -> dict[Piece, np.ndarray]:
        """Returns the pieces of windows that are only in the store, read in one call; assign the result to `held`."""
        pieces = dict.fromkeys(piece for window in windows for piece in self._pieces(*window))
        return self._read([piece for piece in pieces if self._map_shard(piece[0]) is None])

    @property
    def is_in_store(self) -> bool:
        """Returns True if some token shards are only in the store and not on this machine."""
        return self._twin is not None and any(self._map_shard(i) is None for i in range(len(self._starts) - 1))

    def _pieces(self, start: int, length: int) -> Iterator[Piece]:
        """Yields the pieces of a window, one for each shard that contains tokens of the window."""
        shard, stop = int(self._starts.searchsorted(start, "right")) - 1, start + length
        while start < stop:
            first, last = int(self._starts[shard]), min(int(self._starts[shard + 1]), stop)
            if last > start:
                yield shard, start - first, last - start
            start, shard = max(start, last), shard + 1

    def _read(self, pieces: list[Piece]) -> dict[Piece, np.ndarray]:
        """Reads `pieces` (shard, offset, count) from the object store in one call; returns the tokens of each piece."""
        if not pieces:
            return {}
        assert self._twin is not None  # without a store, all shards are on disk
        size = self._dtype.itemsize
        ranges = [(self._path(shard), offset * size, (offset + count) * size) for shard, offset, count in pieces]
        contents = self._twin.read_ranges(ranges)
        return {piece: np.frombuffer(content, self._dtype) for piece, content in zip(pieces, contents, strict=True)}

    def window(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a window, and segment ids that number its documents from 1; both int32 [length]."""
        tokens = self.tokens(start, length)
        first, last = self.document_ends.searchsorted((start, start + length - 1), "right").tolist()
        if first == last:  # one document, the usual case
            return tokens, np.ones(length, np.int32)
        segment_ids = np.zeros(length, np.int32)
        segment_ids[0] = 1
        segment_ids[self.document_ends[first:last] - start] = 1  # a document starts where the previous one ends
        return tokens, segment_ids.cumsum(dtype=np.int32)

    def document(self, i: int) -> np.ndarray:
        """Returns the tokens of document i with its separator, int32 [tokens].

        Raises:
          IndexError: there is no document i.
        """
        if not 0 <= i < self.num_documents:
            raise IndexError(f"document {i} is outside the corpus of {self.num_documents} documents")
        start = int(self.document_ends[i - 1]) if i else 0
        return self.tokens(start, int(self.document_ends[i]) - start)

    @functools.cached_property
    def document_ends(self) -> np.ndarray:
        """Returns the token offset after the separator of each document, int64 [documents]."""
        return _map(os.path.join(self.directory, ENDS), np.dtype(np.int64), self.num_documents)

    @functools.cached_property
    def part_ends(self) -> np.ndarray:
        """Returns the token offset after the last token of each part, int64 [parts].

        Parts are sentences, or the source and target of a pair. The last part of a document ends with the document.
        """
        return _map(os.path.join(self.directory, PARTS), np.dtype(np.int64), self.num_parts)

    def note(self, i: int) -> Note:
        """Returns the metadata of document i in a corpus of records; "parts" has the ends of its text fields."""
        start, stop = int(self._note_ends[i - 1]) if i else 0, int(self._note_ends[i])
        return json.loads(self._notes[start:stop].tobytes())

    def encoded(self, i: int) -> Encoded:
        """Returns document i of a corpus of records as its task encoded it: the tokens of each field, and metadata."""
        note = self.note(i)
        return Encoded(np.split(self.document(i), note["parts"][:-1]), note)

    @functools.cached_property
    def _note_ends(self) -> np.ndarray:
        return _map(os.path.join(self.directory, NOTE_ENDS), np.dtype(np.int64), self.num_documents)

    @functools.cached_property
    def _notes(self) -> np.ndarray:
        size = int(self._note_ends[-1]) if len(self._note_ends) else 0
        return _map(os.path.join(self.directory, NOTES), np.dtype(np.uint8), size)

    def check(self, name: str, stop: Optional[threading.Event] = None) -> None:
        """Raises UserError if a file of this folder differs from its checksum; a file without a checksum passes.

        Args:
          name: name of the file in this folder.
          stop: when this event is set, the check ends early without a result.
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
        return self._path(int(self._starts.searchsorted(place, "right")) - 1)

    def shard_sizes(self) -> dict[str, int]:
        """Returns the size in bytes of each token shard, by path."""
        sizes = (np.diff(self._starts) * self._dtype.itemsize).tolist()
        return {self._path(shard): size for shard, size in enumerate(sizes)}

    def _path(self, shard: int) -> str:
        return f"{shard_path(self.directory, shard)}.tokens"

    def _map_shard(self, shard: int) -> Optional[np.ndarray]:
        """Returns the memory-mapped tokens of a shard; None if the shard is only in the store."""
        if (mapped := self._shards.get(shard)) is None:
            path = self._path(shard)
            if self._twin is None or os.path.exists(path):
                size = int(self._starts[shard + 1] - self._starts[shard])
                mapped = self._shards[shard] = _map(path, self._dtype, size)
        return mapped

    @functools.cached_property
    def _twin(self) -> Optional[Mirror]:
        """Returns the local copy of this corpus's object-store folder, or None if the corpus is local."""
        return mirror_of(self.directory)


def damage_message(path: str) -> str:
    """Returns the error message for a damaged file of a corpus."""
    return f"{path} is damaged: delete {os.path.dirname(path)} and prepare again"


def _map(path: str, dtype: np.dtype, size: int) -> np.ndarray:
    """Returns a file as a memory-mapped array [size]; raises UserError if it is missing or has another size."""
    if not os.path.isfile(path) or os.path.getsize(path) != size * dtype.itemsize:
        raise UserError(damage_message(path))
    return np.memmap(path, dtype, mode="r", shape=(size,)).view(np.ndarray) if size else np.empty(0, dtype)
