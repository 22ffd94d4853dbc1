"""Token shards on disk: one writer for a shard, one for the index, and `Corpus`, which reads them memory-mapped.

A split is a folder. Shard N is `N.tokens` (raw uint16 or uint32), `N.npz` (where each document ends, how often each id
occurs) and `N.json` (totals), written last: a shard that has it is complete. `index.json` is written when all are.
"""

import collections
import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.tokenizer import Tokenizer

_BATCH_CHARACTERS = 1 << 20  # tokenized at a time
_INDEX, _ENDS, _PARTS, _COUNTS = "index.json", "documents.bin", "parts.bin", "counts.bin"


class Corpus:
    """The tokens of one split: documents one after the other, the separator after each. Pickles as its path."""

    def __init__(self, directory: str):
        self.directory = directory
        index = _read_json(os.path.join(directory, _INDEX))
        if index is None:
            raise ValueError(f"{directory} holds no prepared corpus")
        self.num_tokens: int = index["tokens"]
        self.num_documents: int = index["documents"]
        self.num_bytes: int = index["bytes"]  # of the text in UTF-8
        self.skipped: dict[str, int] = index["skipped"]  # reason -> records left out
        self.parts: Optional[str] = index.get("parts")  # what documents are divided into: "sentences" | "pairs" | None
        self.num_parts: int = index.get("num_parts", 0)
        self.fingerprint: str = index["fingerprint"]
        self._dtype = np.dtype(index["dtype"])
        self._starts = np.cumsum([0, *index["shards"]])  # [shards + 1] token offsets
        self._shards: dict[int, np.ndarray] = {}

    def __reduce__(self):
        return Corpus, (self.directory,)

    @functools.cached_property
    def token_counts(self) -> np.ndarray:
        """int64 [vocabulary]: how often each id occurs."""
        return np.fromfile(os.path.join(self.directory, _COUNTS), np.int64)

    def tokens(self, start: int, length: int) -> np.ndarray:
        """int32 [length], from offset `start` on."""
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
        """Tokens from `start` on, and which of the window's documents each is of, from 1: int32 [length] both."""
        tokens = self.tokens(start, length)
        first, last = self.document_ends.searchsorted((start, start + length - 1), "right")
        segment_ids = np.zeros(length, np.int32)
        segment_ids[0] = 1
        segment_ids[self.document_ends[first:last] - start] = 1  # where a document has ended, the next begins
        return tokens, segment_ids.cumsum(dtype=np.int32)

    def document(self, i: int) -> np.ndarray:
        """The tokens of document i with its separator: int32 [tokens]."""
        if not 0 <= i < self.num_documents:
            raise IndexError(f"document {i} of a corpus of {self.num_documents}")
        start = int(self.document_ends[i - 1]) if i else 0
        return self.tokens(start, int(self.document_ends[i]) - start)

    @functools.cached_property
    def document_ends(self) -> np.ndarray:
        """int64 [documents]: the offset behind each document's last token."""
        return _map(os.path.join(self.directory, _ENDS), np.dtype(np.int64), self.num_documents)

    @functools.cached_property
    def part_ends(self) -> np.ndarray:
        """int64 [parts]: the offset behind each part's last token; a document ends where its last part does."""
        return _map(os.path.join(self.directory, _PARTS), np.dtype(np.int64), self.num_parts)

    def _shard(self, shard: int) -> np.ndarray:
        if shard not in self._shards:
            size = int(self._starts[shard + 1] - self._starts[shard])
            self._shards[shard] = _map(os.path.join(self.directory, f"{shard:05d}.tokens"), self._dtype, size)
        return self._shards[shard]


def _map(path: str, dtype: np.dtype, size: int) -> np.ndarray:
    if not os.path.exists(path) or os.path.getsize(path) != size * dtype.itemsize:
        raise UserError(f"{path} is damaged: delete {os.path.dirname(path)} and prepare again")
    return np.memmap(path, dtype, mode="r", shape=(size,)).view(np.ndarray) if size else np.empty(0, dtype)


def is_complete(directory: str) -> bool:
    return _read_json(os.path.join(directory, _INDEX)) is not None


# --- writing -------------------------------------------------------------------------------------------------------


def token_dtype(vocabulary_size: int) -> str:
    return "uint16" if vocabulary_size <= 1 << 16 else "uint32"


def missing_shards(directory: str, count: int, vocabulary_size: int) -> list[int]:
    """The shards below `count` that are still to write."""
    itemsize = np.dtype(token_dtype(vocabulary_size)).itemsize
    missing = []
    for shard in range(count):
        base = os.path.join(directory, f"{shard:05d}")
        totals = _read_json(base + ".json")
        tokens = f"{base}.tokens"
        if totals is None or not os.path.exists(tokens) or os.path.getsize(tokens) != totals["tokens"] * itemsize:
            missing.append(shard)
    return missing


def write_shard(
    directory: str, shard: int, documents: Iterable[str], skipped: collections.Counter, tokenizer: Tokenizer
) -> None:
    """Tokenizes documents into shard `shard`, about a million characters at a time: they bound its memory."""
    vocabulary = tokenizer.vocabulary
    counts = np.zeros(vocabulary.size, np.int64)
    base, ends, size, text_bytes = os.path.join(directory, f"{shard:05d}"), [], 0, 0
    with _replacing(base + ".tokens") as f:
        for texts in _batches(documents, skipped):
            for text, tokens in zip(texts, _encode(texts, tokenizer), strict=True):
                if not len(tokens):  # nothing of the text is in the vocabulary
                    skipped["empty documents"] += 1
                    continue
                if vocabulary.separator is not None:
                    tokens = np.append(tokens, vocabulary.separator)
                f.write(tokens.astype(token_dtype(vocabulary.size)).tobytes())
                counts += np.bincount(tokens, minlength=vocabulary.size)
                size += len(tokens)
                text_bytes += len(text.encode())
                ends.append(size)
    with _replacing(base + ".npz") as f:
        np.savez(f, ends=np.array(ends, np.int64), counts=counts)
    totals = {"tokens": size, "documents": len(ends), "bytes": text_bytes, "skipped": dict(skipped)}
    _write_json(base + ".json", totals)


def write_index(directory: str, count: int, vocabulary_size: int, fingerprint: str) -> None:
    """Joins `count` finished shards into a corpus."""
    totals = [_read_json(os.path.join(directory, f"{shard:05d}.json")) for shard in range(count)]
    counts, offset = np.zeros(vocabulary_size, np.int64), 0
    with _replacing(os.path.join(directory, _ENDS)) as f:
        for shard, total in enumerate(totals):
            with np.load(os.path.join(directory, f"{shard:05d}.npz"), allow_pickle=False) as arrays:
                f.write((arrays["ends"] + offset).tobytes())
                counts += arrays["counts"]
            offset += total["tokens"]
    with _replacing(os.path.join(directory, _COUNTS)) as f:
        f.write(counts.tobytes())
    index = {name: sum(t[name] for t in totals) for name in ("tokens", "documents", "bytes")}
    index["skipped"] = dict(sum((collections.Counter(t["skipped"]) for t in totals), collections.Counter()))
    index |= {
        "fingerprint": fingerprint,
        "dtype": token_dtype(vocabulary_size),
        "shards": [t["tokens"] for t in totals],
    }
    _write_json(os.path.join(directory, _INDEX), index)


def _batches(documents: Iterable[str], skipped: collections.Counter) -> Iterator[list[str]]:
    batch, characters = [], 0
    for text in documents:
        if not text.strip():
            skipped["empty documents"] += 1
            continue
        if batch and characters + len(text) > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch


def _encode(texts: list[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    if len(texts) > 1:
        yield from tokenizer.encode_batch(texts)
    else:  # perhaps a very long one: in parts
        yield np.concatenate([tokenizer.encode(part) for part in _parts(texts[0])])


def _parts(text: str) -> Iterator[str]:
    """Cuts a long text after line ends."""
    start = 0
    while len(text) - start > _BATCH_CHARACTERS:
        end = text.rfind("\n", start, start + _BATCH_CHARACTERS) + 1 or start + _BATCH_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[BinaryIO]:
    """A file that appears under its name when it is complete, or never."""
    temporary = f"{path}.tmp{os.getpid()}"
    try:
        with open(temporary, "wb") as f:
            yield f
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


def _write_json(path: str, value: Any) -> None:
    with _replacing(path) as f:
        f.write(json.dumps(value).encode())


def _read_json(path: str) -> Optional[dict]:
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except (FileNotFoundError, json.JSONDecodeError):  # missing, or cut short by a crash of the machine
        return None
