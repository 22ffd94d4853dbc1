"""Holds out one document, or the end of the only document, if a split rule leaves train or validation empty."""

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
    """A source with a new split, for sources whose own rule leaves one split empty.

    The validation split is the document with the smallest hash. If all documents are equal, it is the last tenth of the
    document. The split depends only on the documents, not on their distribution over files and shards.
    """

    def __init__(self, source: Source, chosen: str, is_only: bool):
        """chosen: the hash of the held-out document; is_only: True if the source has no other document."""
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
    """Returns the source with one document held out. The file `kept_in` saves the choice."""
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
    """Returns the two smallest hashes of the non-empty documents of a shard, or fewer for fewer documents."""
    documents, smallest = until_stopped(source.read(shard, collections.Counter())), set()
    if quality is not None:
        documents = quality.kept(documents, collections.Counter())
    for document in documents:
        if has_text(document):
            smallest = set(sorted({*smallest, document_hash(document).hex()})[:2])
    return smallest


def _cut(text: Any) -> tuple[Any, Any]:
    """Splits a text (str or UTF-8) into its first nine tenths and its last tenth, after white space if possible."""
    line, space = (b"\n", b" ") if isinstance(text, bytearray) else ("\n", " ")
    text = text.rstrip()
    limit = len(text) * 9 // 10
    cut = max(text.rfind(line, 0, limit), text.rfind(space, 0, limit)) + 1
    if cut < len(text) // 2:  # one long word
        cut = limit
        while isinstance(text, bytearray) and text[cut] & 0xC0 == 0x80:  # inside a character
            cut -= 1
    return text[:cut], text[cut:]
