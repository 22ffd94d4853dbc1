"""Writes the token shards of a corpus, which `pretrainax.data.corpus` reads.

Shard N in the folder of a split has three files:

- `N.tokens`: the token ids of all documents, as raw uint16 or uint32.
- `N.npz`: the end offsets of the documents (and of their parts) in the tokens, how many text bytes each document has,
  how often each token id occurs, and the metadata of records (notes).
- `N.json`: totals and checksums. This file is written last, so a shard with this file is complete.

`index.json` is written after all shards and contains the checksums of all files.
"""

import collections
import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Optional, Protocol, Union

import numpy as np

from pretrainax.data import checksums
from pretrainax.data.line_ends import MARKS, RETURNS
from pretrainax.data.preparation import sentences
from pretrainax.data.sources.base import Document, Note, Record, has_text, texts_of
from pretrainax.files.atomic_files import replacing
from pretrainax.storage.places import complete
from pretrainax.tokenization.base import Tokenizer

BATCH = 1 << 18  # maximum characters or bytes of text per tokenizer call, to limit memory
INDEX, ENDS, PARTS, COUNTS = "index.json", "documents.bin", "parts.bin", "counts.bin"
NOTES, NOTE_ENDS = "notes.bin", "note_ends.bin"  # metadata of records as concatenated JSON, and its end offsets


class Encoded(NamedTuple):
    """A tokenized document that a task created from a record, or from a window of a record."""

    parts: list[np.ndarray]  # int32 token ids of each string of the record
    note: Note  # metadata for the examples and metrics of the task; JSON-serializable


class Encoder(Protocol):
    """Interface of the tasks (pretrainax.tasks) that convert a record to tokenized documents."""

    def encode(self, record: Record, tokenizer: Tokenizer, /) -> Iterator[Encoded]: ...


def token_dtype(vocabulary_size: int) -> str:
    return "uint16" if vocabulary_size <= 1 << 16 else "uint32"


def shard_path(directory: str, shard: int) -> str:
    return os.path.join(directory, f"{shard:05d}")


def is_complete(directory: str, fingerprint: str) -> bool:
    """Returns True if the directory contains a complete corpus with the expected fingerprint.

    If the corpus is in an object store, this downloads all files except the tokens. It downloads the tokens too if the
    corpus has no index, or if it consists of records, because building a row plan then reads every record's tokens.

    Args:
      directory: the folder of a split.
      fingerprint: the expected fingerprint, which identifies the split and the text, or a prefix of it.
    """
    complete(directory, lambda name: not name.endswith(".tokens"))
    index = checksums.read_json(os.path.join(directory, INDEX))
    if index is None or index.get("parts") == "records":
        complete(directory)
    return index is not None and str(index.get("fingerprint")).startswith(fingerprint)


def missing_shards(directory: str, count: int, vocabulary_size: int) -> list[int]:
    """Returns the numbers of those shards among 0, …, `count` - 1 that are missing or damaged.

    For the token files, which contain most of the data, only the size is checked here; their checksums are verified
    later.
    """
    itemsize = np.dtype(token_dtype(vocabulary_size)).itemsize
    missing = []
    for shard in range(count):
        base = shard_path(directory, shard)
        totals, tokens = checksums.read_json(f"{base}.json"), f"{base}.tokens"
        if totals is None or not os.path.exists(tokens) or os.path.getsize(tokens) != totals["tokens"] * itemsize:
            missing.append(shard)
        elif read_arrays(base, totals) is None:
            missing.append(shard)
    return missing


def read_arrays(base: str, totals: dict[str, Any]) -> Optional[dict[str, np.ndarray]]:
    """Reads the arrays in a shard's .npz file, by name, or returns None if the file is missing or damaged.

    Args:
      base: path of the shard's files without extension.
      totals: content of the shard's .json file.
    """
    try:
        with np.load(f"{base}.npz", allow_pickle=False) as arrays:
            arrays = dict(arrays)
    except Exception:  # NumPy, zipfile and zlib raise various exceptions for damaged or missing files
        return None
    return arrays if totals.get("arrays_checksum") in (None, _arrays_checksum(arrays)) else None


def _arrays_checksum(arrays: dict[str, np.ndarray]) -> str:
    """Computes a checksum of the arrays' names and contents (an .npz file itself may contain the current time)."""
    checksum = checksums.new_hash()
    for name in sorted(arrays):
        checksum.update(name.encode() + arrays[name].tobytes())
    return checksum.hexdigest()


class ShardWriter:
    """Tokenizes documents and writes their tokens as one shard.

        with ShardWriter(...) as writer:
            for document in writer.write(documents, skipped): ...

    Args:
      directory: the folder of a split's shards.
      shard: the number of the shard.
      tokenizer: the tokenizer of the documents.
      parts: the kind of documents.
        None: plain documents, each followed by a separator.
        "sentences": plain documents, of which the sentences' end offsets are saved too.
        "pairs": pairs, with a separator after the source and after the target.
        "records": records of a task, without separators. The metadata (note) of each record is saved as JSON; its entry
        "parts" has the end offset of each string in the record.
      task: converts records to tokenized documents, or None if the documents are not records.
    """

    def __init__(
        self,
        directory: str,
        shard: int,
        tokenizer: Tokenizer,
        parts: Optional[str] = None,
        task: Optional[Encoder] = None,
    ):
        self._base, self._tokenizer, self._parts = shard_path(directory, shard), tokenizer, parts
        self._task, self._notes = task, []
        self._separator = tokenizer.vocabulary.separator
        self._dtype = np.dtype(token_dtype(tokenizer.vocabulary.size))
        self._counts = np.zeros(tokenizer.vocabulary.size, np.int64)
        self._size, self._checksum = 0, checksums.new_hash()  # number and checksum of the written tokens
        self._ends, self._part_ends, self._bytes = [], [], []  # lists of arrays, which `__exit__` concatenates
        self._skipped = collections.Counter()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "ShardWriter":
        self._file = self._stack.enter_context(replacing(f"{self._base}.tokens"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        if error[0] is not None:
            return
        arrays = {"ends": self._ends, "bytes": self._bytes}
        if self._parts and self._task is None:
            arrays["part_ends"] = self._part_ends
        arrays = {name: _concatenate(parts) for name, parts in arrays.items()}
        if self._task is not None:
            arrays["notes"] = np.frombuffer(b"".join(self._notes), np.uint8)
            arrays["note_ends"] = np.cumsum([len(note) for note in self._notes], dtype=np.int64)
        finish_shard(self._base, arrays | {"counts": self._counts}, self._skipped, self._checksum.hexdigest())

    def write(self, documents: Iterable[Document], skipped: collections.Counter) -> Iterator[Document]:
        """Writes documents and yields each written document.

        Blank documents and documents without tokens are not written, but counted in `skipped`.
        """
        self._skipped, batch, batch_characters = skipped, [], 0
        for document in documents:
            num_characters = sum(map(len, texts_of(document)))
            if not has_text(document):
                skipped["empty documents"] += 1
                continue
            if isinstance(document, Record):
                yield from self._write_record(document)
                continue
            if batch and batch_characters + num_characters > BATCH:
                yield from self._write_batch(batch)
                batch, batch_characters = [], 0
            if num_characters > BATCH and self._parts != "pairs":
                yield from self._write_long(document)
            else:
                batch.append(document)
                batch_characters += num_characters
        if batch:
            yield from self._write_batch(batch)

    def _write_batch(self, documents: list[Document]) -> Iterator[Document]:
        """Tokenizes several documents in one call, then writes and yields those that have tokens."""
        is_pair_shard = self._parts == "pairs"
        if is_pair_shard:
            pieces, owners = [text for pair in documents for text in pair], np.arange(len(documents)).repeat(2)
        else:
            split_texts = [self._split(d.decode() if isinstance(d, bytearray) else d) for d in documents]
            pieces = [piece for text in split_texts for piece in text]
            owners = np.arange(len(documents)).repeat([len(text) for text in split_texts])
        encoded = self._encode(pieces)  # owners[i] is the index of the document of pieces[i]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        has_tokens = lengths > 0
        if is_pair_shard:  # a pair is written only if both source and target have tokens
            has_tokens &= ~np.isin(owners, owners[~has_tokens])
        lengths, owners = lengths[has_tokens], owners[has_tokens]
        # True for the last piece of each document.
        is_last = np.diff(owners, append=-1) != 0
        has_separator = (is_last | is_pair_shard) & (self._separator is not None)
        ends = (lengths + has_separator).cumsum()
        tokens = np.full(lengths.sum() + has_separator.sum(), self._separator or 0, self._dtype)
        is_text = np.ones(len(tokens), bool)
        is_text[ends[has_separator] - 1] = False
        tokens[is_text] = _concatenate([ids for ids, is_written in zip(encoded, has_tokens, strict=True) if is_written])
        written_documents = [documents[i] for i in owners[is_last]]
        self._skipped["empty documents"] += len(documents) - len(written_documents)
        self._record_documents(written_documents, self._size + ends[is_last], self._size + ends)
        self._append_tokens(tokens)
        yield from written_documents

    def _write_long(self, document: Union[str, bytearray]) -> Iterator[Document]:
        """Tokenizes and writes a long document piece by piece, to limit memory; yields the written document."""
        start, part_ends = self._size, []
        for piece in split_text(document):
            encoded = [ids for ids in self._tokenizer.encode_batch(self._split(piece)) if len(ids)]
            if encoded:
                part_ends.append(self._size + np.cumsum([len(ids) for ids in encoded]))
                self._append_tokens(np.concatenate(encoded).astype(self._dtype))
        if self._size == start:
            self._skipped["empty documents"] += 1
            return
        if self._separator is not None:
            self._append_tokens(np.array([self._separator], self._dtype))
            part_ends[-1][-1] = self._size
        self._record_documents([document], np.array([self._size]), np.concatenate(part_ends))
        yield document

    def _write_record(self, record: Record) -> Iterator[Document]:
        """Writes the documents that the task creates from a record, yielding the record once per written document.

        All text bytes of the record are counted for the first written document and 0 for the others (additional
        windows), so the number of documents with nonzero bytes is the number of records.
        """
        assert self._task is not None  # records require a task
        size = num_bytes(record)
        for parts, note in self._task.encode(record, self._tokenizer):
            ends = np.cumsum([len(ids) for ids in parts])
            if not ends[-1]:
                self._skipped["empty documents"] += 1
                continue
            self._append_tokens(np.concatenate(parts).astype(self._dtype))
            self._notes.append(json.dumps({**note, "parts": ends.tolist()}, separators=(",", ":")).encode())
            self._ends.append(np.array([self._size]))
            self._bytes.append(np.array([size], np.int64))
            size = 0  # for the additional windows of the record
            yield record

    def _split(self, text: str) -> list[str]:
        return sentences.split(text) if self._parts == "sentences" else [text]

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        if max(map(len, texts), default=0) <= BATCH:
            return self._tokenizer.encode_batch(texts)
        return [np.concatenate(self._tokenizer.encode_batch(list(split_text(text)))) for text in texts]

    def _record_documents(self, documents: list[Document], ends: np.ndarray, part_ends: np.ndarray) -> None:
        self._ends.append(ends)
        self._part_ends.append(part_ends)
        self._bytes.append(np.array([num_bytes(document) for document in documents], np.int64))

    def _append_tokens(self, tokens: np.ndarray) -> None:
        self._file.write(tokens.data)
        self._checksum.update(tokens.data)
        self._counts += np.bincount(tokens, minlength=len(self._counts))
        self._size += len(tokens)


def finish_shard(base: str, arrays: dict[str, np.ndarray], skipped: dict[str, int], checksum: str) -> None:
    """Writes the `.npz` and `.json` files of a shard, which marks the shard as complete.

    Args:
      base: path of the shard's files without extension.
      arrays: "ends", "bytes" and "counts"; "part_ends" for sentences and pairs; "notes" and "note_ends" for records.
      skipped: the number of skipped items, by reason.
      checksum: checksum of the tokens.
    """
    with replacing(f"{base}.npz") as f:
        np.savez(f, **arrays)
    totals = {"tokens": int(arrays["counts"].sum()), "documents": len(arrays["ends"])}
    totals |= {"parts": len(arrays.get("part_ends", ())), "bytes": int(arrays["bytes"].sum())}
    totals |= {"records": int(np.count_nonzero(arrays["bytes"]))}  # see `_write_record`
    totals |= {"skipped": {k: n for k, n in sorted(skipped.items()) if n}}
    shard_checksums = {"tokens_checksum": checksum, "arrays_checksum": _arrays_checksum(arrays)}
    checksums.write_json(f"{base}.json", totals | shard_checksums)


def write_index(
    directory: str, count: int, vocabulary_size: int, fingerprint: str, parts: Optional[str] = None
) -> None:
    """Combines finished shards into a corpus by concatenating their arrays into files and writing index.json.

    The tokens stay in the files of the individual shards.

    Args:
      directory: the folder of a split.
      count: the number of shards.
      fingerprint: identifies the split and the text.
      parts: the `parts` argument with which the `ShardWriter`s were created.
    """
    totals = [checksums.read_json(f"{shard_path(directory, shard)}.json") for shard in range(count)]
    counts, offset = np.zeros(vocabulary_size, np.int64), 0
    with contextlib.ExitStack() as stack:
        array_files = {"ends": ENDS} | ({"part_ends": PARTS} if parts not in (None, "records") else {})
        record_files = {"notes": NOTES, "note_ends": NOTE_ENDS} if parts == "records" else {}
        files = {
            name: stack.enter_context(replacing(os.path.join(directory, file)))
            for name, file in (array_files | record_files).items()
        }
        note_offset = 0
        for shard, total in enumerate(totals):
            arrays = read_arrays(shard_path(directory, shard), total)
            for name in array_files:
                files[name].write((arrays[name] + offset).tobytes())
            if record_files:
                files["notes"].write(arrays["notes"].tobytes())
                files["note_ends"].write((arrays["note_ends"] + note_offset).tobytes())
                note_offset += len(arrays["notes"])
            counts += arrays["counts"]
            offset += total["tokens"]
    with replacing(os.path.join(directory, COUNTS)) as f:
        f.write(counts.tobytes())
    index = {name: sum(t[name] for t in totals) for name in ("tokens", "documents", "bytes")}
    index["records"] = sum(t.get("records", t["documents"]) for t in totals)  # shards of older versions lack "records"
    index["skipped"] = dict(sum((collections.Counter(t["skipped"]) for t in totals), collections.Counter()))
    # Older versions did not remove these characters, so an older corpus with the same key may have different text. The
    # suffix keeps a run on the older corpus from resuming on this corpus.
    suffix = "-plain" if {MARKS, RETURNS} & index["skipped"].keys() else ""
    index |= {
        "fingerprint": fingerprint + suffix,
        "dtype": token_dtype(vocabulary_size),
        "parts": parts,
        "num_parts": sum(t["parts"] for t in totals),
        "shards": [t["tokens"] for t in totals],
    }
    file_checksums = {
        f"{shard:05d}.tokens": t["tokens_checksum"] for shard, t in enumerate(totals) if "tokens_checksum" in t
    }
    file_checksums |= {
        name: checksums.file_checksum(os.path.join(directory, name))
        for name in (*array_files.values(), *record_files.values(), COUNTS)
    }
    checksums.write_json(os.path.join(directory, INDEX), index | {"checksums": file_checksums})


# --- text ----------------------------------------------------------------------------------------------------------


def num_bytes(document: Document) -> int:
    """Returns the number of UTF-8 bytes in a document's text, not counting a record's metadata."""
    if isinstance(document, (tuple, Record)):
        return sum(map(num_bytes, texts_of(document)))
    if isinstance(document, bytearray) or document.isascii():
        return len(document)
    return sum(len(piece.encode()) for piece in split_text(document))


def split_text(text: Union[str, bytearray]) -> Iterator[str]:
    """Splits a text into pieces of at most BATCH characters or bytes, after a newline or before a space if possible."""
    newline, space = (b"\n", b" ") if isinstance(text, bytearray) else ("\n", " ")
    start = 0
    while start < len(text):
        end = start + BATCH
        if end < len(text):
            end = (
                text.rfind(newline, start, end) + 1
                or max(text.rfind(space, start + 1, end), 0)
                or _character_boundary(text, end)
            )
        piece = text[start:end]
        yield piece if isinstance(piece, str) else piece.decode()
        start = end


def _character_boundary(text: Union[str, bytearray], end: int) -> int:
    """Returns the last offset up to `end` that is not inside a UTF-8 character; for a str, this is `end` itself."""
    if isinstance(text, bytearray):
        while text[end] & 0xC0 == 0x80:
            end -= 1
    return end


# --- files ---------------------------------------------------------------------------------------------------------


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
