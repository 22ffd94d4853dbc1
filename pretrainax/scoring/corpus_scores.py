"""Computes perplexity, bits per token and bits per byte on a data source, with standard errors over documents."""

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
from pretrainax.scoring.results import SPLITS, Result, ratio
from pretrainax.scoring.scoring_examples import AS_IN_TRAINING, Method, Scoring, method_of

Watch = Callable[[Iterable[Document]], Iterable[Document]]  # yields its documents unchanged, and may display progress


def score_source(
    loaded: LoadedModel,
    source: Source,
    split: str = "valid",
    documents: Optional[int] = None,
    scoring: Scoring = AS_IN_TRAINING,
    watch: Watch = iter,
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

    Raises:
      UserError: the source has no text to score, or the model cannot score text.
    """
    method = method_of(loaded, scoring)
    components = source.components()
    totals_by_component = [
        _score_component(loaded, method, component, split, documents, watch) for component in components
    ]
    name = f"{source}, {SPLITS[split]}" + (f", at most {documents:,} documents" if documents else "")
    description = "; ".join(filter(None, (method.description, method.explanation)))
    results = []
    if len(components) > 1:
        for component, totals in zip(components, totals_by_component, strict=True):
            results += totals.results(method.prefix, name, description, str(component))
    return results + _combine(totals_by_component).results(method.prefix, name, description)


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
    """The negative log-likelihoods, token counts and byte counts of D documents."""

    nats: np.ndarray  # [D] float64, negative log-likelihood of each document
    tokens: np.ndarray  # [D] numbers of predicted tokens
    bytes: np.ndarray  # [D] bytes of the predicted text
    extra_counts: collections.Counter[str]  # counts of special cases, such as skipped documents

    def results(self, prefix: str, source: str, description: str, part: str = "") -> list[Result]:
        per_token, per_byte = ratio(self.nats, self.tokens), ratio(self.nats, self.bytes)
        perplexity = math.exp(min(per_token.value, 700.0))  # float64 overflows above exp(709)
        metrics = {
            "perplexity": per_token.times(perplexity)._replace(value=perplexity),  # d exp(x) / dx = exp(x)
            "bits_per_token": per_token.times(1 / math.log(2)),
            "bits_per_byte": per_byte.times(1 / math.log(2)),
        }
        counts = {"documents": len(self.nats), "tokens": int(self.tokens.sum()), "bytes": int(self.bytes.sum())}
        counts |= {name: count for name, count in sorted(self.extra_counts.items()) if count}
        return [Result(source, prefix + name, *value, counts, description, part) for name, value in metrics.items()]


def _score_component(
    loaded: LoadedModel, method: Method, source: Source, split: str, documents: Optional[int], watch: Watch
) -> _Totals:
    skipped, extra_counts, sizes = collections.Counter(), collections.Counter(), []
    nats, tokens = collections.defaultdict(float), collections.Counter()

    def numbered_examples() -> Iterator[tuple[int, Example]]:
        for number, document in enumerate(watch(itertools.islice(documents_of(source, split, skipped), documents))):
            scoring = method.examples_for(document)
            sizes.append(scoring.bytes)
            extra_counts.update({"unknown tokens": scoring.unknown, "documents in pieces": scoring.pieces > 1})
            extra_counts["pairs cut"] += scoring.is_cut
            yield from ((number, example) for example in scoring.examples)

    for score in score_examples(loaded, numbered_examples()):
        nats[score.number] += score.nats
        tokens[score.number] += score.tokens
    scored_numbers = [number for number in range(len(sizes)) if tokens[number]]
    extra_counts["documents with nothing to predict left out"] = len(sizes) - len(scored_numbers)
    extra_counts.update({f"{reason} skipped": count for reason, count in skipped.items()})
    if not scored_numbers:
        summary = ", ".join(f"{count:,} {reason}" for reason, count in extra_counts.items() if count) or "no document"
        raise UserError(
            f"{source} holds no text to score ({SPLITS[split]}: {summary}); select a split with "
            f"--split={'|'.join(SPLITS)}"
        )
    arrays = ([values[i] for i in scored_numbers] for values in (nats, tokens, sizes))
    return _Totals(*map(np.array, arrays), extra_counts)


def documents_of(source: Source, split: str, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the nonempty documents of a split.

    Args:
      split: "valid", "train", or "all" for both.
      skipped: a counter of skipped documents by reason, which this function increments.
    """
    for name in ("train", "valid") if split == "all" else (split,):
        for shard in source.shards(name):
            for document in source.read(shard, skipped):
                if has_text(document):
                    yield document
                else:
                    skipped["empty documents"] += 1


def _combine(totals: Sequence[_Totals]) -> _Totals:
    nats, tokens, sizes, extra_counts = zip(*totals, strict=True)
    return _Totals(*map(np.concatenate, (nats, tokens, sizes)), sum(extra_counts, collections.Counter()))
