"""Defines document filters: quality rules and the removal of near-duplicates, both computed by datatrove.

datatrove is an optional dependency (`pip install 'pretrainax[filters]'`). It is imported only for configs that use a
filter.
"""

import collections
import dataclasses
import functools
import os
import resource
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from pretrainax.config import Choice, Experiment, kinds
from pretrainax.data.preparation.shards import BATCH, split_text
from pretrainax.data.sources.base import Document
from pretrainax.files.extras import missing, needs

_REQUIRED_PACKAGES = ("datatrove", "spacy")


class Filter(Choice):
    """Base class of the document filters that a config can enable."""

    config_path: ClassVar[str]  # path of the config field, for messages
    language: str  # language of datatrove's word tokenizer, as an ISO 639-3 code

    def problems(self, experiment: Experiment) -> Iterator[str]:
        if absent := missing(_REQUIRED_PACKAGES):
            yield needs(self.config_path, absent, "filters")
        elif problem := _language_problem(self.language):
            yield f"{self.config_path}.language is {self.language!r}: {problem}"


@dataclasses.dataclass
class QualityFilter(Filter, kinds.QualityFilter):
    """Drops documents that do not look like prose, by the heuristic rules of published datasets.

    Each dropped document is counted under the first rule that it violates. The rules read only the first 262,144
    characters of a document. All thresholds come from the papers.
    """

    config_path: ClassVar[str] = "config.data.quality"
    gopher_repetition: bool = True  # repeated lines, paragraphs and n-grams (Rae et al. 2021, table A1)
    gopher_quality: bool = True  # lengths, symbols, stop words, bullets (Rae et al. 2021, section A.1.1)
    c4: bool = False  # sentences, "lorem ipsum", braces, policies (Raffel et al. 2020, section 2.2); removes no lines
    fineweb: bool = (
        False  # short lines, lines without punctuation, repeated characters (Penedo et al. 2024, section 3.6)
    )
    language: str = "eng"  # language of datatrove's word tokenizer, as an ISO 639-3 code

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if not (self.gopher_repetition or self.gopher_quality or self.c4 or self.fineweb):
            yield "config.data.quality enables no rules: set gopher_repetition, gopher_quality, c4 or fineweb"

    def filter(self, documents: Iterable[Document], skipped: collections.Counter) -> Iterator[Document]:
        """Yields the documents that violate no enabled rule, counting the dropped ones in `skipped`, by reason."""
        from datatrove.data import Document as DatatroveDocument

        rules = self._rules()
        for number, document in enumerate(documents):
            candidate = DatatroveDocument(text=beginning(document), id=str(number))
            reason = next((reason for rule in rules if (reason := _reason(rule, candidate))), None)
            if reason is None:
                yield document
            else:
                skipped[f"documents by {reason}"] += 1

    def _rules(self) -> list[Any]:
        """Builds the datatrove filters of the enabled rules."""
        from datatrove.pipeline import filters

        rules = []
        if self.gopher_repetition:
            rules.append(filters.GopherRepetitionFilter(language=self.language))
        if self.gopher_quality:
            rules.append(filters.GopherQualityFilter(language=self.language))
        if self.c4:
            rules.append(filters.C4QualityFilter(filter_no_terminal_punct=False, language=self.language))
        if self.fineweb:
            rules.append(filters.FineWebQualityFilter(language=self.language))
        return rules


def _reason(rule: Any, document: Any) -> str:
    """Returns why `rule` drops a document, or "" if it keeps the document."""
    result = rule.filter(document)
    if isinstance(result, tuple):
        accepted, reason = result
        return "" if accepted else reason
    return "" if result else type(rule).__name__


@dataclasses.dataclass
class NearDuplicates(Filter, kinds.NearDuplicates):
    """Drops near-duplicates: documents whose n-grams match those of an earlier document, according to MinHash.

    Sources: Broder 1997; Lee et al. 2022, appendix A.

    If the n-grams of two documents have Jaccard similarity s, the documents match with probability
    1 - (1 - s^hashes)^buckets. With the default values, this probability is 92 % for s = 0.8, 56 % for 0.7 and 5 % for
    0.5. Documents that match directly or through other documents form a group, of which only the first is kept. MinHash
    reads the first 262,144 characters of a document and treats all numbers as equal. Documents shorter than one n-gram
    are never dropped.
    """

    config_path: ClassVar[str] = "config.data.near_duplicates"
    ngram: int = 5  # words per n-gram
    buckets: int = 14  # number of buckets; two documents match if all their hashes in one bucket are equal
    hashes: int = 8  # hashes per bucket
    language: str = "eng"  # language of datatrove's word tokenizer, as an ISO 639-3 code

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        for name in ("ngram", "buckets", "hashes"):
            if getattr(self, name) < 1:
                yield f"config.data.near_duplicates.{name} is {getattr(self, name)}, it must be at least 1"

    def sign(self, documents: Iterable[Document], directory: str, shard: int) -> None:
        """Writes the MinHash signatures of the documents in shard number `shard` to `directory`."""
        from datatrove.data import Document as DatatroveDocument
        from datatrove.pipeline.dedup import MinhashDedupSignature

        _silence_datatrove()
        step = MinhashDedupSignature(os.path.join(directory, "signatures"), self._config, language=self.language)
        step.run((DatatroveDocument(text=beginning(d), id=str(i)) for i, d in enumerate(documents)), rank=shard)

    def find(self, directory: str, count: int) -> list[np.ndarray]:
        """Finds the near-duplicates of earlier documents, and returns their sorted document numbers for each shard.

        The earlier document may be in any shard.

        Args:
          directory: the folder with the signatures that `sign` wrote.
          count: the number of shards.
        """
        from datatrove.pipeline.dedup import MinhashDedupBuckets
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        _silence_datatrove()
        resource.setrlimit(
            resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2
        )  # datatrove opens one file per shard
        matches = []
        for bucket in range(self.buckets):
            folder = os.path.join(directory, "pairs")
            MinhashDedupBuckets(os.path.join(directory, "signatures"), folder, config=self._config).run(
                rank=bucket, world_size=self.buckets
            )
            matches.append(np.fromfile(os.path.join(folder, f"{bucket:05d}_00.dups"), "<u4").reshape(-1, 2, 2))
        shard, document = np.concatenate(matches).astype(np.int64).reshape(-1, 2).T
        nodes, edges = np.unique(shard << 32 | document, return_inverse=True)
        first, second = edges.reshape(-1, 2).T
        graph = coo_array((np.ones(len(first), bool), (first, second)), shape=(len(nodes), len(nodes)))
        _, component = connected_components(graph, directed=False)
        _, earliest = np.unique(component, return_index=True)  # nodes are in corpus order
        dropped_nodes = np.delete(nodes, earliest)
        return [dropped_nodes[dropped_nodes >> 32 == i] & 0xFFFFFFFF for i in range(count)]

    @functools.cached_property
    def _config(self) -> Any:
        from datatrove.pipeline.dedup.minhash import MinhashConfig
        from datatrove.utils.hashing import HashConfig

        # datatrove 0.10 passes strings to its default hash, xxhash, which raises an error in version 4.
        config = HashConfig(hash_fc="sha1")
        return MinhashConfig(self.ngram, self.buckets, self.hashes, hash_config=config)


def _language_problem(language: str) -> str:
    """Returns why datatrove has no word tokenizer for a language, or "" if it has one."""
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    try:
        load_word_tokenizer(language).word_tokenize("a")
    except ValueError:
        return "datatrove has no word tokenizer for it; it must be an ISO 639-3 code, such as eng, deu or zho"
    except ImportError as e:  # the word tokenizer requires a package that is not installed
        return str(e).splitlines()[0]
    return ""


def _silence_datatrove() -> None:
    from loguru import logger

    logger.disable("datatrove")


def beginning(document: Document) -> str:
    """Returns the first 262,144 characters (or UTF-8 bytes) of a document, which the filters read.

    For a pair, a newline joins the source and the target.
    """
    if isinstance(document, tuple):
        return "\n".join(document)[:BATCH]
    return next(split_text(document), "")
