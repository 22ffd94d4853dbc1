"""Computes perplexity, bits per token and bits per byte on a source of text, with standard errors over documents."""

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
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.likelihood import score_examples
from pretrainax.scoring.results import Result, ratio
from pretrainax.scoring.scoring_examples import AS_IN_TRAINING, Method, Scoring, method_of

SPLITS = {"valid": "validation split", "train": "training split", "all": "both splits"}
Watch = Callable[[Iterable[Document]], Iterable[Document]]  # yields the documents it gets, and may show their count


def score_source(
    loaded: LoadedModel,
    source: Source,
    split: str = "valid",
    documents: Optional[int] = None,
    scoring: Scoring = AS_IN_TRAINING,
    watch: Watch = iter,
) -> list[Result]:
    """Returns perplexity, bits per token and bits per byte of a model on a source of text.

    For a mixture, the results for each part are followed by the results for all parts together. The scores do not
    include the tokens that end documents, unlike the validation loss of a run. The metrics of an encoder are
    pseudo-log-likelihoods, and their names begin with "pseudo_". The names of the metrics of a denoising model begin
    with "target_".

    Args:
      split: "valid", "train", or "all" for both.
      documents: maximum number of documents of each part, from the start of the split; None: all documents.
      watch: a function that yields the documents it gets, for a progress display; called once per part.

    Raises:
      UserError: there is no text, or the model cannot score text.
    """
    method = method_of(loaded, scoring)
    parts = source.components()
    counted = [_count(loaded, method, part, split, documents, watch) for part in parts]
    name = f"{source}, {SPLITS[split]}" + (f", at most {documents:,} documents" if documents else "")
    how = "; ".join(filter(None, (method.description, method.explanation)))
    results = []
    if len(parts) > 1:
        for part, totals in zip(parts, counted, strict=True):
            results += totals.results(method.prefix, name, how, str(part))
    return results + _together(counted).results(method.prefix, name, how)


def read_source(text: str, experiment: Experiment) -> Source:
    """Returns the data source for the flag --source; raises UserError for an invalid source.

    The message names fields of the source as --source.FIELD.
    """
    source = Source.parse(text)
    source.config_path = "--source"
    if problems := list(source.problems(experiment)):
        raise UserError(problems[0])
    return source


class _Counted(NamedTuple):
    """The negative log-likelihoods and sizes of D documents."""

    nats: np.ndarray  # [D] float64, negative log-likelihoods
    tokens: np.ndarray  # [D] numbers of predicted tokens
    bytes: np.ndarray  # [D] bytes of the predicted text
    other: collections.Counter[str]  # counts of exceptions, such as skipped documents

    def results(self, prefix: str, source: str, how: str, part: str = "") -> list[Result]:
        per_token, per_byte = ratio(self.nats, self.tokens), ratio(self.nats, self.bytes)
        perplexity = math.exp(min(per_token.value, 700.0))  # float64 overflows above exp(709)
        metrics = {
            "perplexity": per_token.times(perplexity)._replace(value=perplexity),  # d exp(x) / dx = exp(x)
            "bits_per_token": per_token.times(1 / math.log(2)),
            "bits_per_byte": per_byte.times(1 / math.log(2)),
        }
        counts = {"documents": len(self.nats), "tokens": int(self.tokens.sum()), "bytes": int(self.bytes.sum())}
        counts |= {name: count for name, count in sorted(self.other.items()) if count}
        return [Result(source, prefix + name, *value, counts, how, part) for name, value in metrics.items()]


def _count(
    loaded: LoadedModel, method: Method, source: Source, split: str, documents: Optional[int], watch: Watch
) -> _Counted:
    skipped, other, sizes = collections.Counter(), collections.Counter(), []
    nats, tokens = collections.defaultdict(float), collections.Counter()

    def questions() -> Iterator[tuple[int, Example]]:
        for number, document in enumerate(watch(itertools.islice(documents_of(source, split, skipped), documents))):
            asked = method.examples_for(document)
            sizes.append(asked.bytes)
            other.update({"unknown tokens": asked.unknown, "documents in pieces": asked.pieces > 1})
            other["pairs cut"] += asked.is_cut
            yield from ((number, example) for example in asked.examples)

    for answer in score_examples(loaded, questions()):
        nats[answer.number] += answer.nats
        tokens[answer.number] += answer.tokens
    scored = [number for number in range(len(sizes)) if tokens[number]]
    other["documents with nothing to predict left out"] = len(sizes) - len(scored)
    other.update({f"{reason} skipped": count for reason, count in skipped.items()})
    if not scored:
        seen = ", ".join(f"{count:,} {reason}" for reason, count in other.items() if count) or "no document"
        raise UserError(
            f"{source} holds no text to score ({SPLITS[split]}: {seen}); select a split with --split={'|'.join(SPLITS)}"
        )
    arrays = ([by_number[i] for i in scored] for by_number in (nats, tokens, sizes))
    return _Counted(*map(np.array, arrays), other)


def documents_of(source: Source, split: str, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the documents of a split that are not empty.

    Args:
      split: "valid", "train", or "all" for both.
      skipped: the numbers of skipped documents are added to it, by reason.
    """
    for name in ("train", "valid") if split == "all" else (split,):
        for shard in source.shards(name):
            for document in source.read(shard, skipped):
                if has_text(document):
                    yield document
                else:
                    skipped["empty documents"] += 1


def _together(parts: Sequence[_Counted]) -> _Counted:
    nats, tokens, sizes, other = zip(*parts, strict=True)
    return _Counted(*map(np.concatenate, (nats, tokens, sizes)), sum(other, collections.Counter()))
