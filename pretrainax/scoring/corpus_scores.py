"""Computes perplexity, bits per token and bits per byte on a data source, with errors over documents."""

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config import Experiment, UserError
from pretrainax.data.batch import Example
from pretrainax.data.sources import Source
from pretrainax.data.sources.base import Document, has_text
from pretrainax.files.errors import counted
from pretrainax.files.json_files import JsonObject
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.likelihood import score_examples
from pretrainax.scoring.results import MIN_DOCUMENTS, SPLITS, Result, ratio
from pretrainax.scoring.scoring_examples import AS_IN_TRAINING, Method, Scoring, method_of
from pretrainax.scoring.transcripts import Record, discard

_PIECE = 16  # number of predicted tokens per piece of a document, from which the errors of few documents are computed
Watch = Callable[[Iterable[Document]], Iterable[Document]]  # yields its documents unchanged, and may display progress


def score_source(
    loaded: LoadedModel,
    source: Source,
    split: str = "valid",
    documents: Optional[int] = None,
    scoring: Scoring = AS_IN_TRAINING,
    watch: Watch = iter,
    record: Record = discard,
) -> list[Result]:
    """Computes perplexity, bits per token and bits per byte of a model on a data source of text.

    For a mixture, the results for each component are followed by the results for the whole mixture. Unlike the
    validation loss of a run, the scores do not include end-of-document tokens. The metrics of an encoder are
    pseudo-log-likelihoods, and their names begin with "pseudo_". The metric names of a denoising model begin with
    "target_".

    Args:
      split: "valid", "train", or "all" for both.
      documents: maximum number of documents of each component, from the start of the split. None means all documents.
      watch: wraps an iterable of documents and yields them unchanged, to display progress; called once per component.
      record: receives the sums of each document, and of its pieces if there are few documents.

    Raises:
      UserError: the source has no text to score, or the model cannot score text.
    """
    method = method_of(loaded, scoring)
    components = source.components()
    totals_by_component = [
        _score_component(loaded, method, component, split, documents, watch) for component in components
    ]
    name = f"{source}, {SPLITS[split]}" + (f", at most {counted(documents, 'document')}" if documents else "")
    description = "; ".join(filter(None, (method.description, method.explanation)))
    whole, results = _combine(totals_by_component), []
    for component, totals in zip(components, totals_by_component, strict=True):
        part = str(component) if len(components) > 1 else ""
        for transcript in totals.transcripts(with_pieces=whole.num_documents < MIN_DOCUMENTS):
            record({"kind": "text", "source": name, "part": part, **transcript})
        if part:
            results += totals.results(method.prefix, name, description, part)
    return results + whole.results(method.prefix, name, description)


def read_source(text: str, experiment: Experiment) -> Source:
    """Parses the value of the flag --source into a data source; raises UserError if it is invalid.

    The error message refers to fields of the source as --source.FIELD.
    """
    source = Source.parse(text)
    source.config_path = "--source"
    if problems := list(source.problems(experiment)):
        raise UserError(problems[0])
    return source


class _Totals(NamedTuple):
    """The negative log-likelihoods, token counts and byte counts of U document pieces, in order."""

    nats: np.ndarray  # [U] float64, negative log-likelihood of each piece
    tokens: np.ndarray  # [U] numbers of predicted tokens
    bytes: np.ndarray  # [U] bytes of the predicted text; fractions, because a token may be a part of a character
    documents: np.ndarray  # [U] document of each piece
    extra_counts: collections.Counter[str]  # counts of special cases, for example skipped documents

    @property
    def num_documents(self) -> int:
        return len(np.unique(self.documents))

    def results(self, prefix: str, source: str, description: str, part: str = "") -> list[Result]:
        per_token = ratio(self.nats, self.tokens, self.documents)
        per_byte = ratio(self.nats, self.bytes, self.documents)
        metrics = {
            "perplexity": per_token.exp(),
            "bits_per_token": per_token.times(1 / math.log(2)),
            "bits_per_byte": per_byte.times(1 / math.log(2)),
        }
        counts = {"documents": self.num_documents, "tokens": int(self.tokens.sum()), "bytes": round(self.bytes.sum())}
        counts |= {name: count for name, count in sorted(self.extra_counts.items()) if count}
        return [
            Result(source, prefix + name, counts=counts, how=description, part=part, **estimate._asdict())
            for name, estimate in metrics.items()
        ]

    def transcripts(self, with_pieces: bool) -> Iterator[JsonObject]:
        """Yields the sums of each document, and the sums of its pieces if `with_pieces`."""
        starts = np.unique(self.documents, return_index=True)[1]
        sums = [np.split(values, starts[1:]) for values in (self.nats, self.tokens, self.bytes)]
        for document, *pieces in zip(self.documents[starts].tolist(), *sums, strict=True):
            names = dict(zip(("nats", "tokens", "bytes"), pieces, strict=True))
            pieces_of = {"pieces": {name: values.tolist() for name, values in names.items()}} if with_pieces else {}
            yield {"document": document, **{name: float(values.sum()) for name, values in names.items()}, **pieces_of}


def _score_component(
    loaded: LoadedModel, method: Method, source: Source, split: str, documents: Optional[int], watch: Watch
) -> _Totals:
    skipped, extra_counts, sizes = collections.Counter(), collections.Counter(), []
    owners: list[int] = []  # document of each example
    targets: dict[int, np.ndarray] = {}  # predicted tokens of the examples that are not scored yet

    def numbered_examples() -> Iterator[tuple[int, Example]]:
        for document in watch(itertools.islice(documents_of(source, split, skipped), documents)):
            scoring = method.examples_for(document)
            sizes.append(scoring.bytes)
            extra_counts.update({"unknown tokens": scoring.unknown, "documents in pieces": scoring.pieces > 1})
            extra_counts["pairs cut"] += scoring.is_cut
            for example in scoring.examples:
                targets[len(owners)] = example["targets"][example["loss_weights"] > 0]
                owners.append(len(sizes) - 1)
                yield len(owners) - 1, example

    token_bytes = loaded.tokenizer.text_table.num_bytes
    rows: list[tuple[float, ...]] = []  # example, first token, nats, tokens, bytes of each piece
    for score in score_examples(loaded, numbered_examples()):
        predicted = targets.pop(score.number)
        for start in range(0, len(predicted), _PIECE):
            piece = slice(start, start + _PIECE)
            sums = score.target_nats[piece].sum(), len(predicted[piece]), token_bytes[predicted[piece]].sum()
            rows.append((score.number, start, *map(float, sums)))
    examples, _, nats, tokens, table_bytes = np.array(sorted(rows)).reshape(-1, 5).T
    of_document = np.array(owners, int)[examples.astype(int)]
    extra_counts["documents with nothing to predict left out"] = len(sizes) - len(set(of_document.tolist()))
    extra_counts.update({f"{reason} skipped": count for reason, count in skipped.items()})
    if not rows:
        summary = ", ".join(f"{count:,} {reason}" for reason, count in extra_counts.items() if count) or "no document"
        raise UserError(
            f"{source} holds no text to score ({SPLITS[split]}: {summary}); select a split with "
            f"--split={'|'.join(SPLITS)}"
        )
    return _Totals(nats, tokens, _piece_bytes(table_bytes, tokens, of_document, sizes), of_document, extra_counts)


def _piece_bytes(table_bytes: np.ndarray, tokens: np.ndarray, documents: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Divides the bytes of each document among its pieces, in proportion to the bytes of their tokens, [U].

    If the tokenizer changes a document (for example to lower case), the tokens have other bytes than the document.

    Args:
      table_bytes: bytes of the tokens of each piece, [U].
      tokens: number of tokens of each piece, [U]; replaces the bytes in documents whose tokens have none.
      sizes: bytes of the predicted text of each document.
    """
    has_bytes = np.bincount(documents, table_bytes)[documents] > 0
    weights = np.where(has_bytes, table_bytes, tokens)
    return weights * np.array(sizes, float)[documents] / np.bincount(documents, weights)[documents]


def documents_of(source: Source, split: str, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the nonempty documents of a split.

    Args:
      split: "valid", "train", or "all" for both.
      skipped: a counter of skipped documents by reason, which this function increments.
    """
    for shard in source.all_shards() if split == "all" else source.shards(split):
        for document in source.read(shard, skipped):
            if has_text(document):
                yield document
            else:
                skipped["empty documents"] += 1


def _combine(totals: Sequence[_Totals]) -> _Totals:
    firsts = np.cumsum([0, *(part.documents.max() + 1 for part in totals[:-1])])
    shifted = [part._replace(documents=part.documents + first) for part, first in zip(totals, firsts, strict=True)]
    *arrays, extra_counts = zip(*shifted, strict=True)
    return _Totals(*map(np.concatenate, arrays), sum(extra_counts, collections.Counter()))
