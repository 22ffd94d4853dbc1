"""`Corpus`: the token shards that `pretrainax.data.preparation.shards` writes, memory-mapped."""

import functools
import json
import os
import threading
from typing import Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.data import checksums
from pretrainax.data.preparation.shards import COUNTS, ENDS, INDEX, NOTE_ENDS, NOTES, PARTS, Encoded, base_of
from pretrainax.data.sources.base import Note


class Corpus:
    """The tokens of one split: documents one after the other, the separator after each. Pickles as its path."""

    def __init__(self, directory: str):
        self.directory = directory
        index = checksums.read_json(os.path.join(directory, INDEX))
        if index is None:
            raise ValueError(f"{directory} holds no prepared corpus")
        self.num_tokens: int = index["tokens"]
        self.num_documents: int = index["documents"]
        self.num_records: int = index.get("records", self.num_documents)  # that documents are windows of
        self.num_bytes: int = index["bytes"]  # of the text in UTF-8
        self.skipped: dict[str, int] = index["skipped"]  # reason -> records left out
        self.parts: Optional[str] = index.get("parts")  # documents are: "sentences" | "pairs" | "records" | None
        self.num_parts: int = index.get("num_parts", 0)
        self.fingerprint: str = index["fingerprint"]
        self.checksums: dict[str, str] = index.get("checksums", {})  # by file; empty where it was made before them
        self._dtype = np.dtype(index["dtype"])
        self._starts = np.cumsum([0, *index["shards"]])  # [shards + 1] token offsets
        self._shards: dict[int, np.ndarray] = {}

    def __reduce__(self):
        return Corpus, (self.directory,)

    @functools.cached_property
    def token_counts(self) -> np.ndarray:
        """int64 [vocabulary]: how often each id occurs."""
        return np.fromfile(os.path.join(self.directory, COUNTS), np.int64)

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Returns int32 [length], from offset `start` on."""
        if not 0 <= start <= self.num_tokens - length or length < 1:
            raise ValueError(f"window {start}..{start + length} of a corpus of {self.num_tokens} tokens")
        tokens = np.empty(length, np.int32)
        shard, filled = int(self._starts.searchsorted(start, "right")) - 1, 0
        while filled < length:
            offset = start + filled - int(self._starts[shard])
            piece = self._shard(shard)[offset : offset + length - filled]
            tokens[filled : filled + len(piece)] = piece
            filled, shard = filled + len(piece), shard + 1
        return tokens

    def window(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens from `start` on, and which document of the window each is of, from 1: int32 [length] both."""
        tokens = self.tokens(start, length)
        first, last = self.document_ends.searchsorted((start, start + length - 1), "right").tolist()
        if first == last:  # of one document, as most are
            return tokens, np.ones(length, np.int32)
        segment_ids = np.zeros(length, np.int32)
        segment_ids[0] = 1
        segment_ids[self.document_ends[first:last] - start] = 1  # where a document has ended, the next begins
        return tokens, segment_ids.cumsum(dtype=np.int32)

    def document(self, i: int) -> np.ndarray:
        """Returns the tokens of document i with its separator: int32 [tokens]."""
        if not 0 <= i < self.num_documents:
            raise IndexError(f"document {i} of a corpus of {self.num_documents}")
        start = int(self.document_ends[i - 1]) if i else 0
        return self.tokens(start, int(self.document_ends[i]) - start)

    @functools.cached_property
    def document_ends(self) -> np.ndarray:
        """int64 [documents]: the offset behind each document's last token."""
        return _map(os.path.join(self.directory, ENDS), np.dtype(np.int64), self.num_documents)

    @functools.cached_property
    def part_ends(self) -> np.ndarray:
        """int64 [parts]: the offset behind each part's last token; a document ends where its last part does."""
        return _map(os.path.join(self.directory, PARTS), np.dtype(np.int64), self.num_parts)

    def note(self, i: int) -> Note:
        """Returns what is noted of document i of a corpus of records; "parts" are the ends of its texts."""
        start, stop = int(self._note_ends[i - 1]) if i else 0, int(self._note_ends[i])
        return json.loads(self._notes[start:stop].tobytes())

    def encoded(self, i: int) -> Encoded:
        """Returns document i of a corpus of records as its task has made it."""
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
        """Raises UserError unless a file of this folder is as it was written. Nothing is known of one without checksum.

        stop: once it is set, the answer is no longer wanted.
        """
        path = os.path.join(self.directory, name)
        if name in self.checksums and checksums.of_file(path, stop) != self.checksums[name]:
            if stop is None or not stop.is_set():
                raise UserError(damaged(path))

    def path_of(self, place: int) -> str:
        """Returns the file that the token at an offset is in."""
        return f"{base_of(self.directory, int(self._starts.searchsorted(place, 'right')) - 1)}.tokens"

    def _shard(self, shard: int) -> np.ndarray:
        if shard not in self._shards:
            size = int(self._starts[shard + 1] - self._starts[shard])
            self._shards[shard] = _map(f"{base_of(self.directory, shard)}.tokens", self._dtype, size)
        return self._shards[shard]


def damaged(path: str) -> str:
    """Writes the error line of a file of a corpus that is not as it was written."""
    return f"{path} is damaged: delete {os.path.dirname(path)} and prepare again"


def _map(path: str, dtype: np.dtype, size: int) -> np.ndarray:
    if not os.path.exists(path) or os.path.getsize(path) != size * dtype.itemsize:
        raise UserError(damaged(path))
    return np.memmap(path, dtype, mode="r", shape=(size,)).view(np.ndarray) if size else np.empty(0, dtype)
