"""Filters of documents, for their quality or their likeness to the rest, by datatrove's rules and signatures.

datatrove is an extra (`pip install 'pretrainax[filters]'`) and imported only where a config asks for it.
"""

import collections
import dataclasses
import functools
import importlib.util
import os
import resource
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from pretrainax.config import Choice, Experiment, kinds
from pretrainax.data.preparation.shards import BATCH, pieces_of
from pretrainax.data.sources.base import Document

_PACKAGES = ("datatrove", "spacy")


class Filter(Choice):
    """Base of what a config can filter a corpus by."""

    language: str  # of the rules that divide a text into words, as datatrove names it

    def problems(self, experiment: Experiment) -> Iterator[str]:
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            yield f"{type(self).__name__} needs {' and '.join(missing)}: pip install 'pretrainax[filters]'"
        elif problem := _no_words(self.language):
            yield f"{type(self).__name__}.language is {self.language!r}: {problem}"


@dataclasses.dataclass
class QualityFilter(Filter, kinds.QualityFilter):
    """Heuristics of running text. A document is dropped by the first rule it breaks, and counted under its name.

    Only the first 250,000 characters of a document are judged. The rules have the thresholds of their papers.
    """

    gopher_repetition: bool = True  # repeated lines, paragraphs and n-grams (Rae et al. 2021, table A1)
    gopher_quality: bool = True  # lengths, symbols, stop words, bullets (Rae et al. 2021, section A.1.1)
    c4: bool = False  # sentences, "lorem ipsum", braces, policies (Raffel et al. 2020, section 2.2); lines are kept
    fineweb: bool = (
        False  # short lines, lines without punctuation, repeated characters (Penedo et al. 2024, section 3.6)
    )
    language: str = "eng"  # whose rules find the words, as datatrove names it

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if not (self.gopher_repetition or self.gopher_quality or self.c4 or self.fineweb):
            yield "config.data.quality has no rule set: set gopher_repetition, gopher_quality, c4 or fineweb"

    def kept(self, documents: Iterable[Document], skipped: collections.Counter) -> Iterator[Document]:
        from datatrove.data import Document as Judged

        rules = self._rules()
        for number, document in enumerate(documents):
            judged = Judged(text=beginning(document), id=str(number))
            reason = next((reason for rule in rules if (reason := _reason(rule, judged))), None)
            if reason is None:
                yield document
            else:
                skipped[f"documents by {reason}"] += 1

    def _rules(self) -> list[Any]:
        from datatrove.pipeline import filters

        made = []
        if self.gopher_repetition:
            made.append(filters.GopherRepetitionFilter(language=self.language))
        if self.gopher_quality:
            made.append(filters.GopherQualityFilter(language=self.language))
        if self.c4:
            made.append(filters.C4QualityFilter(filter_no_terminal_punct=False, language=self.language))
        if self.fineweb:
            made.append(filters.FineWebQualityFilter(language=self.language))
        return made


def _reason(rule: Any, document: Any) -> str:
    """Says why `rule` drops the document; empty where it keeps it."""
    result = rule.filter(document)
    if isinstance(result, tuple):
        kept, reason = result
        return "" if kept else reason
    return "" if result else type(rule).__name__


@dataclasses.dataclass
class NearDuplicates(Filter, kinds.NearDuplicates):
    """Documents that share most of their n-grams, found by MinHash (Broder 1997; Lee et al. 2022, appendix A).

    Two documents of Jaccard similarity s are taken for the same with probability 1 - (1 - s^hashes)^buckets: by default
    92 % at 0.8, 56 % at 0.7 and 5 % at 0.5. Of all that hang together the first stays. Only the first
    250,000 characters of a document are compared, and documents of fewer words than an n-gram are not. All numbers
    count as the same.
    """

    ngram: int = 5  # words
    buckets: int = 14  # of which one must be the same
    hashes: int = 8  # of a bucket
    language: str = "eng"  # whose rules find the words, as datatrove names it

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        for name in ("ngram", "buckets", "hashes"):
            if getattr(self, name) < 1:
                yield f"config.data.near_duplicates.{name} is {getattr(self, name)}, it must be at least 1"

    def sign(self, documents: Iterable[Document], directory: str, shard: int) -> None:
        """Writes the signatures of a shard's documents."""
        from datatrove.data import Document as Signed
        from datatrove.pipeline.dedup import MinhashDedupSignature

        _be_quiet()
        step = MinhashDedupSignature(os.path.join(directory, "signatures"), self._config, language=self.language)
        step.run((Signed(text=beginning(d), id=str(i)) for i, d in enumerate(documents)), rank=shard)

    def find(self, directory: str, count: int) -> list[np.ndarray]:
        """Finds for each of `count` shards the sorted numbers of the documents that are like an earlier one."""
        from datatrove.pipeline.dedup import MinhashDedupBuckets
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        _be_quiet()
        resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2)  # a file a shard
        pairs = []
        for bucket in range(self.buckets):
            found = os.path.join(directory, "pairs")
            MinhashDedupBuckets(os.path.join(directory, "signatures"), found, config=self._config).run(
                rank=bucket, world_size=self.buckets
            )
            pairs.append(np.fromfile(os.path.join(found, f"{bucket:05d}_00.dups"), "<u4").reshape(-1, 2, 2))
        shard, document = np.concatenate(pairs).astype(np.int64).reshape(-1, 2).T
        nodes, edges = np.unique(shard << 32 | document, return_inverse=True)
        first, second = edges.reshape(-1, 2).T
        graph = coo_array((np.ones(len(first), bool), (first, second)), shape=(len(nodes), len(nodes)))
        _, component = connected_components(graph, directed=False)
        _, earliest = np.unique(component, return_index=True)  # nodes are in the order of the corpus
        dropped = np.delete(nodes, earliest)
        return [dropped[dropped >> 32 == i] & 0xFFFFFFFF for i in range(count)]

    @functools.cached_property
    def _config(self) -> Any:
        from datatrove.pipeline.dedup.minhash import MinhashConfig
        from datatrove.utils.hashing import HashConfig

        # Not xxhash, its default: from version 4 on that takes no strings, which datatrove 0.10 gives it.
        config = HashConfig(hash_fc="sha1")
        return MinhashConfig(self.ngram, self.buckets, self.hashes, hash_config=config)


def _no_words(language: str) -> str:
    """Says why datatrove cannot divide this language into words; empty where it can."""
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    try:
        load_word_tokenizer(language).word_tokenize("a")
    except ValueError:
        return "datatrove has no words of it; it must be an ISO 639-3 code, as eng, deu, zho"
    except ImportError as e:  # of a package for this language
        return str(e).splitlines()[0]
    return ""


def _be_quiet() -> None:
    from loguru import logger

    logger.disable("datatrove")


def beginning(document: Document) -> str:
    """Returns the text by which a document is judged."""
    if isinstance(document, tuple):
        return "\n".join(document)[:BATCH]
    return next(pieces_of(document), "")
