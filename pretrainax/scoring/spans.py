"""Computes bits per byte of held-out spans, a metric comparable across model families and tokenizers.

`score_spans(loaded, texts)` scores spans that `SpanChoice` selects by bytes, so that every model is scored on the same
spans, with up to `context` bytes of left and of right context. The cost of a span is a code length: the number of bits
that encode the span and its end, given the model and the context,

    bits = - log2 p(token ids of the span | context) + length + unknown

The metric is the sum of the bits divided by the UTF-8 bytes of the original spans. The terms are:

  p        The product of the probabilities of the token ids of the span. A decoder reads the left context. An
           encoder-decoder reads both contexts, with a sentinel instead of the span, and predicts the ids and then the
           sentinel that ends the span. An encoder reads both contexts; the predicted id and all later ids of the span
           are masked. Decoders that fill in the middle, and prefix LMs that denoise, use their training format.
  length   Encoder-decoders, and decoders that fill in the middle, predict the end of the span. Their probabilities of
           all spans of any length sum to 1, so nothing is added. All other models are given the number n of ids, and
           their probabilities of all spans with n ids sum to 1. For these models, - log2 q(n) bits are added. q(n) is
           the frequency of n in the spans of all other documents, smoothed for values that never occur.
  unknown  A word that contains the tokenizer's unk id adds 8 bits for each of its bytes.

These terms include all information that is needed to encode the ids. No model gets information about the span for free.
Over many spans, no model can have a cost below the entropy of the spans, given the context that it reads. The metric
has three limitations:

- The metric is an upper bound of the cost of the text. Many id sequences decode to the same span, but the metric counts
  only the sequence that the tokenizer returns. The left context, the span and the right context are tokenized
  separately; their concatenated ids decode to the text.
- A tokenizer that changes the text (case, accents, white space) encodes less, and nothing is added for the lost
  information. `share_changed` is the fraction of bytes in spans that their ids do not reproduce. Check it first.
- Scores given the left context and scores given both contexts are not comparable: both contexts contain more
  information, so the cost is lower.
"""

import collections
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.sources import Source
from pretrainax.files.json_files import JsonObject
from pretrainax.inference.loaded import LoadedModel
from pretrainax.reporting.units import percent
from pretrainax.scoring.corpus_scores import documents_of
from pretrainax.scoring.likelihood import score_examples
from pretrainax.scoring.results import Estimate, Result, ratio
from pretrainax.scoring.scoring_examples import context_length
from pretrainax.scoring.span_choice import Span, SpanChoice, words
from pretrainax.scoring.span_forms import BOTH, Ids, SpanFormat, span_formats
from pretrainax.tokenization.base import Tokenizer

_FULL_STOP = "."  # prepended to each text, so that no tokenizer adds a space; nearly always a separate token
Watch = Callable[[Iterable], Iterable]  # yields its items unchanged, and may display progress


@dataclasses.dataclass(frozen=True)
class SpanScores:
    """The costs in bits of S spans for one model and one span format; all arrays have shape [S]."""

    origin: str  # description of the model
    form: SpanFormat
    spans: list[Span]
    token_bits: np.ndarray  # float64, - log2 p of the ids, including the end of the span if the model predicts the end
    length: np.ndarray  # float64, bits for the number of ids; 0 if the model predicts the end of the span
    unknown: np.ndarray  # float64, bits for words with unknown ids
    is_changed: np.ndarray  # bool: True if the ids do not decode to the span
    is_cut: np.ndarray  # bool: True if the context was truncated to the model's input length
    is_long: np.ndarray  # bool: True if the span has more ids than each span of the training

    @property
    def bits(self) -> np.ndarray:
        return self.token_bits + self.length + self.unknown

    @property
    def bytes(self) -> np.ndarray:
        return np.array([span.num_bytes for span in self.spans])

    @property
    def documents(self) -> np.ndarray:
        return np.array([span.document for span in self.spans])

    @property
    def bits_per_byte(self) -> Estimate:
        return self.per_byte(self.bits)

    @property
    def fingerprint(self) -> str:
        """Returns a hash of spans and contexts, used to check that two models were scored on the same spans."""
        return hashlib.blake2b(repr(self.spans).encode(), digest_size=4).hexdigest()

    def results(self, source: str) -> list[Result]:
        """Returns the bits per byte and their components as evaluation results.

        Omits components that are 0 for all spans.

        Args:
          source: name of the evaluation data.
        """
        counts = {"documents": len(np.unique(self.documents)), "spans": len(self.spans), "bytes": int(self.bytes.sum())}
        if self.is_cut.any():
            counts["spans with surroundings cut"] = int(self.is_cut.sum())
        length_note = (
            "the model predicts its end" if self.form.predicts_end else "with the cost of its number of tokens"
        )
        method = f"spans chosen by bytes ({self.fingerprint}), given {self.form.given}: {length_note}"
        components = {"bits_per_byte": self.bits, "bits_per_byte_for_length": self.length}
        components |= {"bits_per_byte_for_unknown_words": self.unknown, "share_changed": self.is_changed * self.bytes}
        return [
            Result(
                source,
                f"span_{name}",
                counts=counts,
                how=method,
                part=self.form.given,
                origin=self.origin,
                note=self.caveat if name == "bits_per_byte" else "",
                **self.per_byte(values)._asdict(),
            )
            for name, values in components.items()
            if name == "bits_per_byte" or values.any()
        ]

    @property
    def caveat(self) -> str:
        """States the reasons why the cost is too low or too high, with the affected share of the bytes; "" if none.

        The cost is too low for text that the tokenizer does not restore. It is too high for spans that are longer than
        the longest span of the training: in one run, each token beyond this length cost 10 nats or more.
        """
        changed, long = (self.bytes[which].sum() / self.bytes.sum() for which in (self.is_changed, self.is_long))
        lines = []
        if changed:
            lines.append(f"{percent(changed, 1)} of the bytes do not round-trip in {self.origin}: its cost is too low")
        if long:
            longest = f"the {self.form.longest} tokens of the longest span in its training"
            lines.append(
                f"{percent(long, 1)} of the bytes are in spans that have, in {self.origin}, more than {longest}"
            )
        return "; ".join(lines)

    def transcripts(self, source: str) -> Iterator[JsonObject]:
        """Yields the text, the context and the cost of each span.

        Args:
          source: name of the evaluation data.
        """
        arrays = {name: getattr(self, name).tolist() for name in ("token_bits", "length", "unknown", "bytes")}
        arrays |= {"changed": self.is_changed.tolist(), "cut": self.is_cut.tolist()}
        for i, span in enumerate(self.spans):
            common = {"kind": "span", "source": source, "part": self.form.given, "document": span.document}
            texts = {"left": span.left, "text": span.text, "right": span.right}
            yield {**common, **texts, **{name: values[i] for name, values in arrays.items()}}

    def per_byte(self, values: np.ndarray) -> Estimate:
        """Computes the sum of `values` [S] per byte of all spans, and its error over documents."""
        return ratio(values, self.bytes, self.documents)


def score_spans(
    loaded: LoadedModel, texts: Iterable[str], choice: Optional[SpanChoice] = None, watch: Watch = iter
) -> list[SpanScores]:
    """Selects the spans of all documents, and computes their costs for each span format that the model supports.

    Args:
      texts: the documents.
      choice: the selection of spans. None means the default settings.
      watch: wraps an iterable with one item per span and yields the items unchanged, to display progress; called once
        per format.

    Raises:
      UserError: no text has a span, the model supports no span format, or a span exceeds the model's input length.
    """
    return score_chosen(loaded, chosen_spans(texts, choice or SpanChoice()), watch)


def chosen_spans(texts: Iterable[str], choice: SpanChoice) -> list[Span]:
    """Selects the spans of all documents; raises UserError if there is none."""
    if spans := list(choice.spans(texts)):
        return spans
    raise UserError(f"no text is long enough for a span, with share={choice.share}: give more text, or raise share")


def score_chosen(loaded: LoadedModel, spans: list[Span], watch: Watch = iter) -> list[SpanScores]:
    """Computes the costs of one or more spans for each span format of the model; the rest is as in `score_spans`."""
    ids = encode(loaded.tokenizer, spans)
    return [_score_form(loaded, form, spans, ids, watch) for form in span_formats(loaded)]


def difference(one: SpanScores, other: SpanScores) -> Estimate:
    """Computes the cost of `one` minus the cost of `other` in bits per byte, with its error over documents.

    The error is for paired samples: it excludes differences in difficulty between documents, which affect both
    models.

    Raises:
      UserError: the spans of the two models differ.
    """
    if one.fingerprint != other.fingerprint:
        raise UserError(
            f"{one.origin} and {other.origin} were scored on different spans ({len(one.spans)} and "
            f"{len(other.spans)}): use the same texts, share, mean_bytes, context and seed"
        )
    return one.per_byte(one.bits - other.bits)


def documents_of_source(source: Source, split: str = "valid", documents: Optional[int] = None) -> Iterator[str]:
    """Yields the documents of a data source as strings; raises UserError for pairs of source and target.

    Args:
      split: "valid", "train", or "all" for both.
      documents: maximum number of documents of each component of a mixture. None means all documents.
    """
    for component in source.components():
        for document in itertools.islice(documents_of(component, split, collections.Counter()), documents):
            if isinstance(document, tuple):
                raise UserError(
                    f"{component} has pairs of source and target, but spans need texts: use a source of texts"
                )
            yield document if isinstance(document, str) else document.decode()


def difference_results(one: Sequence[SpanScores], other: Sequence[SpanScores], source: str) -> list[Result]:
    """Computes the paired differences `one` - `other` in bits per byte, for all pairs of the two models' formats.

    Formats differ in the context from which a model predicts the span: the left context, or both contexts.

    Args:
      source: name of the evaluation data.
    """
    results = []
    for a, b in itertools.product(one, other):
        result, part = a.results(source)[0], f"{a.form.given} - {b.form.given} of {b.origin}"
        note = "; ".join(filter(None, dict.fromkeys((a.caveat, b.caveat))))
        fields = {"measure": "span_bits_per_byte_difference", "part": part, "note": note}
        results.append(dataclasses.replace(result, **fields, **difference(a, b)._asdict()))
    return results


def _score_form(loaded: LoadedModel, form: SpanFormat, spans: list[Span], ids: list[Ids], watch: Watch) -> SpanScores:
    longest = context_length(loaded)
    truncated_ids = [form.fitted(span_ids, longest) for span_ids in ids]
    token_bits = np.zeros(len(spans))
    numbered_examples = (
        (i, example) for i, span_ids in enumerate(watch(truncated_ids)) for example in form.examples_for(span_ids)
    )
    for score in score_examples(loaded, numbered_examples):
        token_bits[score.number] += score.nats / math.log(2)
    # A span that the tokenizer drops (for example a zero-width space in WordPiece) has the length cost of one id.
    numbers = np.array([max(len(span_ids.span), 1) for span_ids in ids])
    documents = np.array([span.document for span in spans])
    full_lengths = [len(full.left) + len(full.right) * (form.given == BOTH) for full in ids]
    return SpanScores(
        origin=loaded.origin,
        form=form,
        spans=spans,
        token_bits=token_bits,
        length=np.zeros(len(spans)) if form.predicts_end else length_bits(numbers, documents),
        unknown=np.array(
            [_unknown_bits(loaded.tokenizer, *span_and_ids) for span_and_ids in zip(spans, ids, strict=True)]
        ),
        is_changed=np.array(
            [_is_changed(loaded.tokenizer, *span_and_ids) for span_and_ids in zip(spans, ids, strict=True)]
        ),
        is_cut=np.array([len(span_ids.left) + len(span_ids.right) for span_ids in truncated_ids]) < full_lengths,
        is_long=numbers > (form.longest or math.inf),
    )


def encode(tokenizer: Tokenizer, spans: Sequence[Span]) -> list[Ids]:
    """Tokenizes each span, its left context and its right context separately; the joined ids decode to the text.

    Some tokenizers add a space before a text. To prevent this, each string is tokenized with a full stop before it, and
    the ids of the full stop are removed.
    """
    stop_ids = tokenizer.encode(_FULL_STOP)
    texts = [text for span in spans for text in (span.left, span.text, span.right)]
    encoded_alone, encoded_after_stop = (
        tokenizer.encode_batch(texts),
        tokenizer.encode_batch([_FULL_STOP + text for text in texts]),
    )
    encoded = []
    for i, span in enumerate(spans):
        parts = []
        for n in range(3 * i, 3 * i + 3):
            use_alone = (span.is_start and n == 3 * i) or not np.array_equal(
                encoded_after_stop[n][: len(stop_ids)], stop_ids
            )
            parts.append(encoded_alone[n] if use_alone else encoded_after_stop[n][len(stop_ids) :])
        encoded.append(Ids(*parts, is_start=span.is_start))
    return encoded


def length_bits(numbers: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Computes how many bits encode the number of ids of each span, float64 [S].

    The probability of a number k is estimated from the spans of all other documents, plus a pseudo-count of 1 in total.
    The pseudo-count is distributed over all k with the weights 1 / (k (k + 1)), so that every number has a finite cost.

    Args:
      numbers: number of ids of each span, int [S].
      documents: document index of each span, int [S].
    """
    numbers, documents = numbers.tolist(), documents.tolist()
    by_number, by_document = collections.Counter(numbers), collections.Counter(documents)
    by_both = collections.Counter(zip(numbers, documents, strict=True))
    probabilities = [
        (by_number[k] - by_both[k, document] + 1 / (k * (k + 1))) / (len(numbers) - by_document[document] + 1)
        for k, document in zip(numbers, documents, strict=True)
    ]
    return -np.log2(probabilities)


def _unknown_bits(tokenizer: Tokenizer, span: Span, ids: Ids) -> float:
    unk = tokenizer.vocabulary.unk
    if unk is None or unk not in ids.span:
        return 0.0
    return 8.0 * sum(len(word.encode()) for word in words(span.text) if unk in tokenizer.encode(word))


def _is_changed(tokenizer: Tokenizer, span: Span, ids: Ids) -> bool:
    text = tokenizer.decode(ids.span.tolist())
    return span.text not in (text, f" {text}")  # some tokenizers drop a space at the start of a text
