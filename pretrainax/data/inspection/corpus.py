"""Computes metrics of corpora: the number and lengths of documents, vocabulary use, and duplicates.

A corpus is read in blocks, so a few hundred megabytes of memory suffice for a corpus of any size.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from pretrainax.data.corpus import Corpus
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.tables import markdown
from pretrainax.tokenization.base import Tokenizer, unknown_share

_BLOCK = 1 << 22  # tokens (or document ends) per read
_MAX_COMPARED = 1 << 22  # maximum number of different documents to compare; larger corpora are sampled
_HASHES_PER_BLOCK = 1 << 20  # document hashes per block
# Lower edges of the length bins: 1, 2, 3, …, then 1 % apart.
_EDGES = np.unique(np.ceil(2.0 ** (np.arange(64 * 41) / 64)).astype(np.int64))
_OPENING_TOKENS = 24  # first tokens of the longest document, for the report
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def measure(splits: Mapping[str, Corpus], tokenizer: Tokenizer) -> dict[str, JsonObject]:
    """Computes the metrics of each split, {split: {metric: JSON value}}.

    Document lengths are in tokens and include the separator at the end. Each split is also compared with the splits
    before it in `splits`, to find documents that they share.
    """
    metrics, digests = {}, {}
    for name, corpus in splits.items():
        digests[name] = DocumentHashes(_document_digests(corpus))
        metrics[name] = {
            "documents": corpus.num_documents,
            "tokens": corpus.num_tokens,
            "bytes": corpus.num_bytes,
            "bytes_per_token": corpus.num_bytes / corpus.num_tokens,
            **_lengths(corpus, tokenizer),
            **_vocabulary_use(corpus.token_counts, tokenizer),
            "duplicates": digests[name].duplicates,
            "duplicates_compared": 0.5 ** digests[name].level,
            "in_earlier_splits": {
                earlier_split: digests[name].among(digests[earlier_split]) for earlier_split in metrics
            },
            "skipped": dict(corpus.skipped),
        }
        if corpus.parts == "sentences":
            metrics[name]["sentences"] = corpus.num_parts
    return metrics


# --- lengths -------------------------------------------------------------------------------------------------------


def _lengths(corpus: Corpus, tokenizer: Tokenizer) -> JsonObject:
    """Computes the metrics of the document lengths of a corpus."""
    counts, longest, longest_document, previous_end = np.zeros(len(_EDGES), np.int64), 0, 0, 0
    for start in range(0, corpus.num_documents, _BLOCK):
        ends = corpus.document_ends[start : start + _BLOCK]
        lengths = np.diff(ends, prepend=previous_end)
        counts += np.bincount(_EDGES.searchsorted(lengths, "right") - 1, minlength=len(_EDGES))
        if lengths.max() > longest:
            longest, longest_document = int(lengths.max()), start + int(lengths.argmax())
        previous_end = int(ends[-1])
    beginning = int(corpus.document_ends[longest_document]) - longest
    opening = tokenizer.decode(corpus.tokens(beginning, min(longest, _OPENING_TOKENS)))
    cumulative_fraction = counts.cumsum() / corpus.num_documents
    octaves = np.bincount((2 * np.log2(_EDGES) + 1e-9).astype(int), counts).astype(np.int64)  # half octaves
    bars = [[float(2 ** (i / 2)), int(count)] for i, count in enumerate(octaves) if count]
    return {
        "length_mean": corpus.num_tokens / corpus.num_documents,
        "length_quantiles": {f"{q:g}": int(_EDGES[cumulative_fraction.searchsorted(q - 1e-12)]) for q in _QUANTILES},
        "length_histogram": bars,  # [lower edge, number of documents]; an edge is sqrt(2) times the last
        "longest": {"document": longest_document, "tokens": longest, "opening": " ".join(opening.split())},
    }


# --- vocabulary ----------------------------------------------------------------------------------------------------


def _vocabulary_use(counts: np.ndarray, tokenizer: Tokenizer) -> JsonObject:
    """Computes the vocabulary metrics from `counts` [V], which says how often each token id occurs."""
    vocabulary = tokenizer.vocabulary
    pieces = np.delete(counts, sorted(vocabulary.special_ids))
    by_rank = np.sort(pieces[pieces > 0])[::-1]
    ranks = np.unique(np.geomspace(1, max(len(by_rank), 1), 200).round().astype(int))[: len(by_rank)]
    return {
        "vocabulary": vocabulary.size,
        "pieces": len(pieces),  # ids of text, which are all ids except special ids
        "pieces_used": len(by_rank),
        "pieces_below_10": int((pieces < 10).sum()),  # pieces with fewer than 10 occurrences, unused pieces included
        "counts_by_rank": [[int(rank), int(by_rank[rank - 1])] for rank in ranks],
        "unknown_share": unknown_share(counts, tokenizer),
    }


# --- duplicates ----------------------------------------------------------------------------------------------------


class DocumentHashes:
    """A set of document hashes, from which the number of duplicates is estimated.

    With at most `limit` distinct documents, `level` is 0 and the estimates are exact. With more documents, the set is a
    sample: it contains only hashes that end in `level` zero bits, and each hash counts 2^level times (adaptive
    sampling, Flajolet 1990). A sample contains either all copies of a document or none. Samples of different corpora
    with the same level select the same documents.
    """

    def __init__(self, blocks: Iterator[np.ndarray], limit: int = _MAX_COMPARED):
        """Builds the set from blocks of document hashes, each uint64 [documents]."""
        self.level = 0
        self._hashes, self._copies = np.empty(0, np.uint64), np.empty(0, np.int64)
        for block in blocks:
            self._sample(np.append(self._hashes, block), np.append(self._copies, np.ones(len(block), np.int64)))
            while len(self._hashes) > limit:
                self.level += 1
                self._sample(self._hashes, self._copies)

    @property
    def duplicates(self) -> int:
        """Returns how many documents equal an earlier document of the corpus; this is an estimate if `level` > 0."""
        return int(self._copies.sum() - len(self._hashes)) << self.level

    def among(self, others: "DocumentHashes") -> int:
        """Returns how many documents of this corpus are also in the corpus of `others`.

        The number is an estimate if this set or `others` has a level greater than 0.
        """
        level = max(self.level, others.level)
        is_shared = np.isin(self._hashes, others._hashes) & _ends_in_zeros(self._hashes, level)
        return int(self._copies[is_shared].sum()) << level

    def _sample(self, hashes: np.ndarray, copies: np.ndarray) -> None:
        """Replaces the set with those of `hashes` that end in `level` zero bits, summing the copies of equal hashes."""
        in_sample = _ends_in_zeros(hashes, self.level)
        self._hashes, group = np.unique(hashes[in_sample], return_inverse=True)
        self._copies = np.bincount(group, copies[in_sample], len(self._hashes)).astype(np.int64)


def _ends_in_zeros(hashes: np.ndarray, count: int) -> np.ndarray:
    return hashes & np.uint64((1 << count) - 1) == 0


def _document_digests(corpus: Corpus) -> Iterator[np.ndarray]:
    """Yields the 64-bit hashes of all documents, in uint64 blocks of about a million documents."""
    digest, collected = hashlib.blake2b(digest_size=8), []
    for start in range(0, corpus.num_tokens, _BLOCK):
        block = corpus.tokens(start, min(_BLOCK, corpus.num_tokens - start))
        first, last = corpus.document_ends.searchsorted((start, start + len(block)), "right")
        cuts = [0, *(corpus.document_ends[first:last] - start).tolist()]
        for begin, end in itertools.pairwise(cuts):
            digest.update(block[begin:end])
            collected.append(digest.digest())
            digest = hashlib.blake2b(digest_size=8)
        digest.update(block[cuts[-1] :])  # the document continues in the next block
        if len(collected) >= _HASHES_PER_BLOCK:
            yield np.frombuffer(b"".join(collected), np.uint64)
            collected = []
    yield np.frombuffer(b"".join(collected), np.uint64)


# --- table ---------------------------------------------------------------------------------------------------------


def table(metrics: Mapping[str, JsonObject]) -> str:
    """Formats the metrics of `measure` as a Markdown table with one column per split."""
    names = list(metrics)
    rows = {name: dict(_table_rows(metrics[name])) for name in names}
    labels = dict.fromkeys(itertools.chain.from_iterable(rows.values()))
    return markdown(["", *names], [[label, *(rows[name].get(label, "") for name in names)] for label in labels])


def _table_rows(split: JsonObject) -> Iterator[tuple[str, str]]:
    """Yields (label, value) for each row of the table, for one split."""
    documents, tokens, quantiles = split["documents"], split["tokens"], split["length_quantiles"]
    yield "documents", f"{documents:,}"
    if "sentences" in split:
        yield "sentences", f"{split['sentences']:,}"
    yield "tokens", f"{tokens:,}"
    yield "text, MB", f"{split['bytes'] / 1e6:,.2f}"
    yield "bytes per token", f"{split['bytes_per_token']:.3f}"
    yield "tokens a document: mean", f"{split['length_mean']:,.0f}"
    yield "5 % · 50 % · 95 % are at most", " · ".join(f"{quantiles[q]:,}" for q in ("0.05", "0.5", "0.95"))
    yield "longest", f"{split['longest']['tokens']:,}"
    yield "pieces of the vocabulary in use", f"{split['pieces_used']:,} of {split['pieces']:,}"
    yield "used less than 10 times", f"{split['pieces_below_10']:,}"
    yield "unknown tokens", f"{100 * split['unknown_share']:.4f} %"
    prefix = "" if split["duplicates_compared"] == 1 else "about "
    yield "duplicates of earlier documents", f"{prefix}{split['duplicates']:,} ({split['duplicates'] / documents:.2%})"
    for earlier_split, count in split["in_earlier_splits"].items():
        yield f"documents that are in {earlier_split} too", f"{prefix}{count:,} ({count / documents:.2%})"
    for reason, count in sorted(split["skipped"].items()):
        yield f"skipped: {reason}", f"{count:,}"
