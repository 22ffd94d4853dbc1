"""Holds out a validation document if a source's split rule leaves the training or the validation split empty.

If the source has only one document, the end of this document becomes the validation split.
"""

import collections
import os
from collections.abc import Callable, Iterator
from typing import Any, Optional

from pretrainax.data import checksums
from pretrainax.data.files import digest
from pretrainax.data.preparation.duplicates import document_hash
from pretrainax.data.preparation.filters import QualityFilter
from pretrainax.data.preparation.workers import Workers, until_stopped
from pretrainax.data.sources import Source
from pretrainax.data.sources.base import Document, Record, Shard, has_text

SPLITS = ("train", "valid")


class HeldOut(Source):
    """Wraps a source whose split rule leaves a split empty, and uses one document as its validation split.

    `hold_out` chooses the document with the smallest hash. If all documents are identical, the validation split is the
    last tenth of each document. The split depends only on the documents, not on how they are distributed over files and
    shards.
    """

    def __init__(self, source: Source, chosen: str, is_only: bool):
        """Stores the source and the selected validation document.

        Args:
          source: the source to split.
          chosen: the `document_hash` of the held-out document, as hexadecimal digits.
          is_only: whether all documents of the source are identical.
        """
        self.source, self.chosen, self.is_only = source, chosen, is_only

    def __repr__(self) -> str:
        return repr(self.source)

    def __str__(self) -> str:
        return str(self.source)

    @property
    def pairs(self) -> bool:
        return self.source.pairs

    def fingerprint(self) -> str:
        return digest(self.source.fingerprint(), self.chosen, self.is_only)

    def shards(self, split: str) -> list[Shard]:
        return [(split, shard) for shard in _all_shards(self.source)]

    def read(self, shard: Shard, skipped: collections.Counter) -> Iterator[Document]:
        split, source_shard = shard
        is_valid = split == "valid"
        for document in self.source.read(source_shard, collections.Counter() if is_valid else skipped):
            if self.is_only and not isinstance(document, (tuple, Record)):
                yield _split_last_tenth(document)[is_valid]
            elif (document_hash(document).hex() == self.chosen) == is_valid:
                yield document


def hold_out(
    source: Source, quality: Optional[QualityFilter], kept_in: str, workers: Workers, report: Callable
) -> HeldOut:
    """Chooses which document of a source to hold out for validation, and returns the source with this split.

    Args:
      source: the source to split.
      quality: only documents that pass this filter can be held out; if None, any document can.
      kept_in: path of the JSON file that stores the choice. If the file exists, its choice is used.
      workers: processes that hash the documents.
      report: prints a message for the user.
    """
    choice = checksums.read_json(kept_in)
    if choice is None:
        report("the split leaves train or validation empty: looking for a document to hold out")
        tasks = [(source, shard, quality) for shard in _all_shards(source)]
        smallest = sorted(set().union(*workers.run(_smallest_hashes, tasks)))[:2]
        choice = {"chosen": smallest[0] if smallest else "", "is_only": len(smallest) == 1}
        os.makedirs(os.path.dirname(kept_in), exist_ok=True)
        checksums.write_json(kept_in, choice)
    return HeldOut(source, **choice)


def _all_shards(source: Source) -> list[Shard]:
    return [shard for split in SPLITS for shard in source.shards(split)]


def _smallest_hashes(source: Source, shard: Shard, quality: Optional[QualityFilter]) -> set[str]:
    """Returns the two smallest distinct hashes (or fewer) among the nonblank documents of a shard."""
    documents, smallest = until_stopped(source.read(shard, collections.Counter())), set()
    if quality is not None:
        documents = quality.filter(documents, collections.Counter())
    for document in documents:
        if has_text(document):
            smallest = set(sorted({*smallest, document_hash(document).hex()})[:2])
    return smallest


def _split_last_tenth(text: Any) -> tuple[Any, Any]:
    """Splits a text (str or UTF-8 bytes) at about nine tenths of its length, after whitespace if possible."""
    newline, space = (b"\n", b" ") if isinstance(text, bytearray) else ("\n", " ")
    text = text.rstrip()
    limit = len(text) * 9 // 10
    offset = max(text.rfind(newline, 0, limit), text.rfind(space, 0, limit)) + 1
    if offset < len(text) // 2:  # no whitespace in the second half up to the limit
        offset = limit
        while isinstance(text, bytearray) and text[offset] & 0xC0 == 0x80:  # the offset is inside a character
            offset -= 1
    return text[:offset], text[offset:]
