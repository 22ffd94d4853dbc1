"""Retrieval by a bi-encoder: the vector of a query is near to that of its passage, and far from all others."""

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
from pretrainax.tasks.base import Task, side_by_side, text_in

_AT = (1, 10, 100)
_QUERIES = 256  # whose scores are in memory at a time


@dataclasses.dataclass
class Retrieval(Task):
    """The passage of a query among those of all queries of a batch (Karpukhin et al. 2020, arXiv 2004.04906).

    The record {"query": "who rains", "passage": "it rains"} becomes, for a BERT, one row of two texts, of which none
    sees the other; with `negatives` more passages follow, which are no answer to the query:

        tokens       [CLS] who rains [SEP] [CLS] it rains [SEP]
        segment_ids  1     1   1     1     2     2  2     2
        positions    0     1   2     3     0     1  2     3
        texts        2

    A query has at most `query_length` tokens, a passage config.data.sequence_length, special ones included; what is
    longer loses its end. A batch is compared as a whole, over all devices. Figures are of the passages of all records
    of the validation split: equal texts are one passage, and another passage of the same query is not held against it.
    """

    query_field: str = "query"  # the field of a record that holds the query
    passage_field: str = "passage"  # the field of the passage that answers it
    negatives_field: Optional[str] = (
        None  # the field of a list of passages that do not, or of one; None: there are none
    )
    negatives: int = 0  # the first so many of them are read; a record with fewer is a broken one
    query_length: int = 32  # most tokens of a query

    families: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    parts_rows: ClassVar[bool] = True
    figures = (*(f"recall@{k}" for k in _AT), "mrr")  # pyright: ignore[reportAssignmentType]
    select_by = "mrr"

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.query_field, self.passage_field, self.negatives and self.negatives_field)))

    def read(self, record: Mapping) -> Record:
        named = (("query_field", self.query_field), ("passage_field", self.passage_field))
        texts = [text_in(record, name, field) for field, name in named]
        texts += self._negatives(record)
        if empty := next((name for (_, name), text in zip(named, texts, strict=False) if not text.strip()), None):
            raise ValueError(f"field {empty!r} is empty")
        query, *passages = map(_digest, texts)
        return Record(tuple(texts), {"query": query, "passages": passages})

    def ask(self, record: Mapping) -> Record:
        raise UserError(
            "a retriever makes vectors, and says nothing of records: pretrainax.load(DIR).embed(texts) gives those, "
            "python -m pretrainax.evaluate ranks the passages of records"
        )

    def _negatives(self, record: Mapping) -> list[str]:
        if not self.negatives or self.negatives_field is None:
            return []
        given = value_of(record, self.negatives_field, "config.objective.negatives_field")
        given = [given] if isinstance(given, str) else given
        if not isinstance(given, (list, tuple, np.ndarray)) or not all(isinstance(x, str) and x.strip() for x in given):
            raise ValueError(f"field {self.negatives_field!r} must be a list of texts, none of them empty")
        if len(given) < self.negatives:
            raise ValueError(
                f"field {self.negatives_field!r} has {len(given)} passages, config.objective.negatives is "
                f"{self.negatives}"
            )
        return list(given[: self.negatives])

    def example(self, text, rng, vocabulary):
        parts = enumerate(self.texts(text.tokens, text.parts))
        rows = [self.framed((ids,), vocabulary, self._most(i)) for i, ids in parts]
        return {**side_by_side(rows), "texts": np.array(len(rows), np.int32)}

    def _most(self, number: int) -> int:
        """Returns how many tokens a text of a row has at most, with special ones: the query, number 0, or a passage."""
        return self._length if number else self.query_length

    def is_cut(self, encoded: Encoded) -> bool:
        return any(len(ids) > self.room(1, self._most(i)) for i, ids in enumerate(encoded.parts))

    @property
    def most_texts(self) -> int:
        return 2 + self.negatives

    def sample_note(self):
        return {"query": "", "passages": [""]}

    def lengths(self, sequence_length: int) -> Lengths:
        row = self.query_length + (1 + self.negatives) * sequence_length
        return Lengths(row, row, row)

    def places(self, sequence_length: int) -> int:
        return max(self.query_length, sequence_length)

    def measure(self, raw: int) -> Lengths:
        row = min(raw + self.most_texts * self._frame.count(1), self.lengths(self._length).inputs)
        return Lengths(raw, row, row)

    # --- the head and its figures -------------------------------------------------------------------------------------

    def head(self, model):
        return Embed.usual(model, self.most_texts)

    def head_problems(self, head: HeadConfig) -> Iterator[str]:
        if not isinstance(head, Embed) or head.num_texts != self.most_texts:
            yield f"config.model.head is {head}, Retrieval needs Embed(num_texts={self.most_texts})"

    def field_problems(self):
        if self.negatives < 0 or (self.negatives > 0) != (self.negatives_field is not None):
            yield (
                f"config.objective.negatives is {self.negatives} and negatives_field {self.negatives_field!r}: set "
                "both, as negatives=3, or neither"
            )
        if self.query_length < self.shortest:
            yield f"config.objective.query_length is {self.query_length}, it must be at least {self.shortest}"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if experiment.train.accumulate > 1:
            yield (
                f"config.train.accumulate is {experiment.train.accumulate}, and the negatives of a query are the "
                "passages of its batch, of which a micro-batch has a part: set it to 1"
            )

    def metrics(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, float]:
        ranks = ranks_of(answers, [note["query"] for note in notes], [note["passages"] for note in notes])
        return {**{f"recall@{k}": float((ranks <= k).mean()) for k in _AT}, "mrr": float((1 / ranks).mean())}


def ranks_of(vectors: np.ndarray, queries: Sequence[str], passages: Sequence[Sequence[str]]) -> np.ndarray:
    """Returns which place the passage of each record has among all, from 1, [n]; of equal scores the last.

    Args:
      vectors: [n, S, D], of a query and its passages, the first of which answers it.
      queries: what tells the queries apart, n.
      passages: likewise, n times S - 1.
    """
    first: dict[str, int] = {}  # the place of a passage among the candidates
    for name in (name for names in passages for name in names):
        first.setdefault(name, len(first))
    candidates = np.zeros((len(first), vectors.shape[-1]), np.float32)
    candidates[[first[name] for names in passages for name in names]] = vectors[:, 1:].reshape(-1, vectors.shape[-1])
    own = np.array([first[names[0]] for names in passages])
    answers: dict[str, set[int]] = {}
    for query, place in zip(queries, own.tolist(), strict=True):
        answers.setdefault(query, set()).add(place)
    ranks = np.empty(len(queries), np.int64)
    for start in range(0, len(queries), _QUERIES):
        scores = vectors[start : start + _QUERIES, 0] @ candidates.T  # [q, candidates]
        for row, of_query in enumerate(scores, start):
            score = of_query[own[row]]
            of_query[list(answers[queries[row]] - {int(own[row])})] = -np.inf
            ranks[row] = (of_query >= score).sum()
    return ranks


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
