"""Implements retrieval with a bi-encoder, which embeds a query close to the passage that answers the query."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Optional

import numpy as np

from pretrainax.config import Embed, Experiment, HeadConfig, UserError
from pretrainax.data.batch import Lengths
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.data.sources.records import value_of
from pretrainax.files.extras import import_extra
from pretrainax.tasks.base import Task, concatenate_segments, text_in, texts_in
from pretrainax.tasks.baselines import Baseline
from pretrainax.tasks.label_metrics import METRICS

_RECALL_AT = (1, 10, 100)
_CHANCE_WIDTH = 64  # width of the random vectors of a baseline
_MAX_NUMBERS = 2**26  # maximum size of the vectors of the TF-IDF baseline, whose width is 256 to 16,384 hashed words
_QUERIES_PER_CHUNK = 256  # number of queries whose scores are in memory at a time


@dataclasses.dataclass
class Retrieval(Task):
    """Finds the passage that answers a query among the passages of its batch (Karpukhin et al. 2020, arXiv 2004.04906).

    The record {"query": "who rains", "passage": "it rains"} becomes, for a BERT, one row with two segments that do not
    attend to each other. With `negatives`, additional segments contain passages that do not answer the query.

        tokens       [CLS] who rains [SEP] [CLS] it rains [SEP]
        segment_ids  1     1   1     1     2     2  2     2
        positions    0     1   2     3     0     1  2     3
        texts        2

    Queries are truncated to `query_length` tokens and passages to config.data.sequence_length tokens, special tokens
    included. The loss compares all queries with all passages of a batch, over all devices. For the metrics, each query
    ranks the passages of all records of the validation split. Equal passages count once. If several records have the
    same query, each record's ranking omits the correct passages of the other records.
    """

    query_field: str = "query"  # the field of the query
    passage_field: str = "passage"  # the field of the passage that answers the query
    negatives_field: Optional[str] = (
        None  # the field of one passage, or of a list of passages, that do not answer the query; None: no such passages
    )
    negatives: int = 0  # number of passages to read from negatives_field; a record with fewer passages is invalid
    query_length: int = 32  # maximum number of tokens of a query, special tokens included

    families: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    packages = ("sklearn",)
    separates_rows: ClassVar[bool] = True
    metric_names = (*(f"recall@{k}" for k in _RECALL_AT), "mrr")  # pyright: ignore[reportAssignmentType]
    select_by = "mrr"

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.query_field, self.passage_field, self.negatives and self.negatives_field)))

    def read(self, record: Mapping) -> Record:
        fields = (("query_field", self.query_field), ("passage_field", self.passage_field))
        texts = [text_in(record, name, field) for field, name in fields]
        texts += self._negatives(record)
        if empty := next((name for (_, name), text in zip(fields, texts, strict=False) if not text.strip()), None):
            raise ValueError(f"field {empty!r} is empty")
        query, *passages = map(_digest, texts)
        return Record(tuple(texts), {"query": query, "passages": passages})

    def read_unlabeled(self, record: Mapping) -> Record:
        raise UserError(
            "a retriever embeds texts and predicts nothing for a record: use pretrainax.load(DIR).embed(texts) for "
            "vectors, or python -m pretrainax.evaluate to rank the passages of records"
        )

    def _negatives(self, record: Mapping) -> list[str]:
        """Reads the negative passages of a record; raises ValueError if they are invalid or too few."""
        if not self.negatives or self.negatives_field is None:
            return []
        name = self.negatives_field
        value = value_of(record, name, "config.objective.negatives_field")
        texts = texts_in({name: [value] if isinstance(value, (str, bytes)) else value}, name, "negatives_field")
        if not all(map(str.strip, texts)):
            raise ValueError(f"field {name!r} must be a list of texts, none of them empty")
        if len(texts) < self.negatives:
            raise ValueError(
                f"field {name!r} has {len(texts)} passages, but config.objective.negatives is {self.negatives}"
            )
        return texts[: self.negatives]

    def example(self, text, rng, vocabulary):
        parts = enumerate(self.split_strings(text.tokens, text.parts))
        rows = [self.framed((ids,), vocabulary, self._max_length(i)) for i, ids in parts]
        return {**concatenate_segments(rows), "texts": np.array(len(rows), np.int32)}

    def _max_length(self, number: int) -> int:
        """Returns the maximum number of tokens of a query or passage, special tokens included.

        Args:
          number: 0 for the query, 1 or more for a passage.
        """
        return self._length if number else self.query_length

    def is_cut(self, encoded: Encoded) -> bool:
        return any(len(ids) > self.text_capacity(1, self._max_length(i)) for i, ids in enumerate(encoded.parts))

    @property
    def max_texts(self) -> int:
        return 2 + self.negatives

    def sample_note(self):
        return {"query": "", "passages": [""]}

    def lengths(self, sequence_length: int) -> Lengths:
        length = self.query_length + (1 + self.negatives) * sequence_length
        return Lengths(length, length, length)

    def max_positions(self, sequence_length: int) -> int:
        return max(self.query_length, sequence_length)

    def measure(self, raw: int) -> Lengths:
        length = min(raw + self.max_texts * self._frame.count(1), self.lengths(self._length).inputs)
        return Lengths(raw, length, length)

    # --- head and metrics ---------------------------------------------------------------------------------------------

    def head(self, model):
        return Embed.usual(model, self.max_texts)

    def head_problems(self, head: HeadConfig) -> Iterator[str]:
        if not isinstance(head, Embed) or head.num_texts != self.max_texts:
            yield f"config.model.head is {head}, Retrieval needs Embed(num_texts={self.max_texts})"

    def field_problems(self):
        if self.negatives < 0 or (self.negatives > 0) != (self.negatives_field is not None):
            yield (
                f"config.objective.negatives is {self.negatives} and negatives_field is {self.negatives_field!r}: set "
                "both, for example negatives=3, or neither"
            )
        if self.query_length < self.shortest:
            yield f"config.objective.query_length is {self.query_length}, it must be at least {self.shortest}"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if experiment.train.accumulate > 1:
            yield (
                f"config.train.accumulate is {experiment.train.accumulate}, and the negatives of a query are the "
                "passages of its batch, but a microbatch holds only a part of them: set it to 1"
            )

    def metrics(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, float]:
        return {name: float(scores.mean()) for name, (scores, _) in self.record_sums(answers, notes).items()}

    def record_sums(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        ranks = ranks_of(answers, [note["query"] for note in notes], [note["passages"] for note in notes])
        scores = {**{f"recall@{k}": (ranks <= k).astype(float) for k in _RECALL_AT}, "mrr": 1 / ranks}
        return {name: (values, np.ones(len(values))) for name, values in scores.items()}

    def baselines(self, train, valid, notes):
        sklearn = import_extra("sklearn.feature_extraction.text", METRICS, "the TF-IDF baseline")
        texts = [text for record in valid for text in record.texts]
        shape = len(valid), self.max_texts
        random = np.random.default_rng(0).standard_normal((*shape, _CHANCE_WIDTH), np.float32)
        yield Baseline("chance", random, is_constant=True, has_loss=False)
        width = 2 ** int(np.log2(np.clip(_MAX_NUMBERS / len(texts), 2**8, 2**14)))
        vectorizer = sklearn.HashingVectorizer(n_features=width, alternate_sign=False, norm=None)
        weights = sklearn.TfidfTransformer()
        weights.fit(vectorizer.transform([text for record in train for text in record.texts]))
        vectors = weights.transform(vectorizer.transform(texts)).toarray().astype(np.float32)
        yield Baseline("TF-IDF", vectors.reshape(*shape, width), has_loss=False)


def ranks_of(vectors: np.ndarray, queries: Sequence[str], passages: Sequence[Sequence[str]]) -> np.ndarray:
    """Computes the rank of each record's correct passage among all passages, [n]; 1 is the best rank.

    Passages with equal scores share the worst of their ranks.

    Args:
      vectors: [n, S, D] embeddings of the query and the S - 1 passages of each record; the first passage answers the
        query.
      queries: identifier of each of the n queries; equal queries have equal identifiers.
      passages: identifiers of the S - 1 passages of each record.
    """
    passage_index: dict[str, int] = {}  # passage identifier -> its index among the candidates
    for name in (name for names in passages for name in names):
        passage_index.setdefault(name, len(passage_index))
    candidates = np.zeros((len(passage_index), vectors.shape[-1]), np.float32)
    candidates[[passage_index[name] for names in passages for name in names]] = vectors[:, 1:].reshape(
        -1, vectors.shape[-1]
    )
    targets = np.array([passage_index[names[0]] for names in passages])
    correct_passages: dict[str, set[int]] = {}
    for query, target in zip(queries, targets.tolist(), strict=True):
        correct_passages.setdefault(query, set()).add(target)
    ranks = np.empty(len(queries), np.int64)
    for start in range(0, len(queries), _QUERIES_PER_CHUNK):
        scores = vectors[start : start + _QUERIES_PER_CHUNK, 0] @ candidates.T  # [q, candidates]
        for record, row_scores in enumerate(scores, start):
            score = row_scores[targets[record]]
            row_scores[list(correct_passages[queries[record]] - {int(targets[record])})] = -np.inf
            ranks[record] = (row_scores >= score).sum()
    return ranks


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
