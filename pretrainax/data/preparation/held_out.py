"""Chooses a document for validation if the split rule of a source leaves the training or the validation split empty.

If the source has only one document, the end of this document is used for validation.
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
    """Replaces the split of a source whose split rule leaves the training or the validation split empty.

    The validation split is the document with the smallest hash. If all documents are equal, the validation split is the
    last tenth of the document. The split depends only on the documents, not on their distribution over files and
    shards.
    """

    def __init__(self, source: Source, chosen: str, is_only: bool):
        """Stores the source and the selected validation document.

        Args:
          chosen: the `document_hash` of the held-out document, as hexadecimal digits.
          is_only: True if all documents of the source are identical.
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
        split, inner = shard
        is_valid = split == "valid"
        for document in self.source.read(inner, collections.Counter() if is_valid else skipped):
            if self.is_only and not isinstance(document, (tuple, Record)):
                yield _cut(document)[is_valid]
            elif (document_hash(document).hex() == self.chosen) == is_valid:
                yield document


def hold_out(
    source: Source, quality: Optional[QualityFilter], kept_in: str, workers: Workers, report: Callable
) -> HeldOut:
    """Returns a `HeldOut` of the source with one held-out document.

    Args:
      quality: only documents that pass this filter can be held out; None: all documents.
      kept_in: path of a JSON file with the choice. If the file exists, its choice is used; otherwise it is written.
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
    """Returns the two smallest hashes of the documents of a shard that are not blank; fewer for fewer documents."""
    documents, smallest = until_stopped(source.read(shard, collections.Counter())), set()
    if quality is not None:
        documents = quality.filter(documents, collections.Counter())
    for document in documents:
        if has_text(document):
            smallest = set(sorted({*smallest, document_hash(document).hex()})[:2])
    return smallest


def _cut(text: Any) -> tuple[Any, Any]:
    """Splits a text (str or UTF-8 bytes) into about nine tenths and one tenth, after white space if possible."""
    line, space = (b"\n", b" ") if isinstance(text, bytearray) else ("\n", " ")
    text = text.rstrip()
    limit = len(text) * 9 // 10
    cut = max(text.rfind(line, 0, limit), text.rfind(space, 0, limit)) + 1
    if cut < len(text) // 2:  # the text has a very long word
        cut = limit
        while isinstance(text, bytearray) and text[cut] & 0xC0 == 0x80:  # the cut is inside a character
            cut -= 1
    return text[:cut], text[cut:]
