"""Bits per byte of held-out spans: a metric that compares encoders, encoder-decoders and decoders of any tokenizer.

`score_spans(loaded, texts)` scores the spans that `SpanChoice` selects by bytes, so that every model gets the same
spans, with up to `context` bytes on each side. The cost of a span is a code length: the number of bits that encode the
span and its end, given the model and the context,

    bits = - log2 p(ids of the span | context) + length + unknown

The metric is the sum of the bits divided by the sum of the UTF-8 bytes of the original text. The terms are:

  p        The product of the probabilities of the ids of the span. A decoder reads the left side. An encoder-decoder
           reads both sides, with a sentinel instead of the span, and predicts the ids and then the sentinel that ends
           them. An encoder reads both sides, with masks instead of the predicted id and the ids after it. Decoders that
           fill in the middle, and prefix LMs that denoise, use the format of their training.
  length   Encoder-decoders, and decoders that fill in the middle, predict the end of the span. Their probabilities of
           all spans of any length add up to 1, so nothing is added. Other models get the number of ids, and their
           probabilities of all spans with this number add up to 1. For these models, - log2 q(number) bits are added.
           q is the frequency of the number in the spans of all other documents, smoothed for numbers that never occur.
  unknown  A word that contains the tokenizer's unknown id adds 8 bits for each of its bytes.

These terms include everything that is needed to encode the ids. No model gets information about the span for free, and
over many spans, no model can have a cost below the entropy of the text. The metric has three limits:

- The metric is an upper bound for the text: of all id sequences that decode to a span, only the tokenizer's own is
  counted. The three parts of a text are tokenized separately, and their concatenated ids decode to the text.
- A tokenizer that changes the text (case, accents, white space) encodes less, and nothing is added for the lost
  information. `share_changed` is the share of bytes in spans that their ids do not reproduce: check it first.
- "Left side" and "both sides" are different problems: both sides give more information and a lower cost.
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
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.corpus_scores import documents_of
from pretrainax.scoring.likelihood import score_examples
from pretrainax.scoring.results import Estimate, Result, ratio
from pretrainax.scoring.scoring_examples import context_length
from pretrainax.scoring.span_choice import Span, SpanChoice, words
from pretrainax.scoring.span_forms import BOTH, Form, Ids, forms_of
from pretrainax.tokenization.base import Tokenizer

_FULL_STOP = "."  # added before each text, so that no tokenizer adds a space; nearly always a separate token
Watch = Callable[[Iterable], Iterable]  # yields the items it gets, and may show their count


@dataclasses.dataclass(frozen=True)
class SpanScores:
    """The costs of S spans in bits, for one model and one form. All arrays have the shape [S]."""

    origin: str  # description of the model
    form: Form
    spans: list[Span]
    token_bits: np.ndarray  # float64, - log2 of the probability of the ids, and of the end if the model predicts it
    length: np.ndarray  # float64, bits for the number of ids; 0 if the model predicts the end
    unknown: np.ndarray  # float64, bits for words with unknown ids
    is_changed: np.ndarray  # bool: True if the ids do not decode to the span
    is_cut: np.ndarray  # bool: True if the context was truncated to the length that the model reads

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
        """Returns a hash of the spans and their contexts, to compare the spans of two models."""
        return hashlib.blake2b(repr(self.spans).encode(), digest_size=4).hexdigest()

    def results(self, source: str) -> list[Result]:
        """Returns the bits per byte and their components as evaluation results.

        Components that are 0 for all spans are left out.

        Args:
          source: name of the evaluation data.
        """
        counts = {"documents": len(np.unique(self.documents)), "spans": len(self.spans), "bytes": int(self.bytes.sum())}
        if self.is_cut.any():
            counts["spans with surroundings cut"] = int(self.is_cut.sum())
        end = "the model predicts its end" if self.form.predicts_end else "with the cost of its number of tokens"
        how = f"spans chosen by bytes ({self.fingerprint}), given {self.form.given}: {end}"
        parts = {"bits_per_byte": self.bits, "bits_per_byte_for_length": self.length}
        parts |= {"bits_per_byte_for_unknown_words": self.unknown, "share_changed": self.is_changed * self.bytes}
        return [
            Result(source, f"span_{name}", *self.per_byte(values), counts, how, self.form.given, self.origin)
            for name, values in parts.items()
            if name == "bits_per_byte" or values.any()
        ]

    def per_byte(self, values: np.ndarray) -> Estimate:
        """Returns the sum of `values` [S] divided by the bytes of all spans, with the standard error over documents."""
        _, number = np.unique(self.documents, return_inverse=True)
        return ratio(np.bincount(number, values), np.bincount(number, self.bytes))


def score_spans(
    loaded: LoadedModel, texts: Iterable[str], choice: Optional[SpanChoice] = None, watch: Watch = iter
) -> list[SpanScores]:
    """Returns the costs of the spans of all documents, once for each form that the model supports.

    Args:
      texts: the documents.
      choice: the selection of spans; None: the default settings.
      watch: a function that yields the spans it gets, for a progress display; called once per form.

    Raises:
      UserError: no text has a span, the model supports no form, or a span is longer than the model reads.
    """
    choice = choice or SpanChoice()
    spans = list(choice.spans(texts))
    if not spans:
        raise UserError(f"no text is long enough for a span, with share={choice.share}: give more text, or raise share")
    ids = encode(loaded.tokenizer, spans)
    return [_score_form(loaded, form, spans, ids, watch) for form in forms_of(loaded)]


def difference(one: SpanScores, other: SpanScores) -> Estimate:
    """Returns the cost of `one` minus the cost of `other` in bits per byte, with the standard error over documents.

    The standard error is for paired samples: it does not include the difficulty of a document that both models share.

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
    """Yields the documents of a source as strings; raises UserError for pairs.

    Args:
      split: "valid", "train", or "all" for both.
      documents: maximum number of documents of each part of a mixture; None: all documents.
    """
    for part in source.components():
        for document in itertools.islice(documents_of(part, split, collections.Counter()), documents):
            if isinstance(document, tuple):
                raise UserError(f"{part} has pairs of source and target, but spans need texts: use a source of texts")
            yield document if isinstance(document, str) else document.decode()


def difference_results(one: Sequence[SpanScores], other: Sequence[SpanScores], source: str) -> list[Result]:
    """Returns the paired differences `one` - `other` in bits per byte, for all pairs of their forms.

    A form is a context in which a model predicts the span: the left side, or both sides.

    Args:
      source: name of the evaluation data.
    """
    results = []
    for a, b in itertools.product(one, other):
        result, part = a.results(source)[0], f"{a.form.given} - {b.form.given} of {b.origin}"
        estimate = difference(a, b)._asdict()
        results.append(dataclasses.replace(result, measure="span_bits_per_byte_difference", part=part, **estimate))
    return results


def _score_form(loaded: LoadedModel, form: Form, spans: list[Span], ids: list[Ids], watch: Watch) -> SpanScores:
    longest = context_length(loaded)
    fitted = [form.fitted(span_ids, longest) for span_ids in ids]
    token_bits = np.zeros(len(spans))
    questions = ((i, example) for i, span_ids in enumerate(watch(fitted)) for example in form.examples_for(span_ids))
    for answer in score_examples(loaded, questions):
        token_bits[answer.number] += answer.nats / math.log(2)
    numbers = np.array([len(span_ids.span) for span_ids in ids])
    documents = np.array([span.document for span in spans])
    whole = [len(full.left) + len(full.right) * (form.given == BOTH) for full in ids]
    return SpanScores(
        origin=loaded.origin,
        form=form,
        spans=spans,
        token_bits=token_bits,
        length=np.zeros(len(spans)) if form.predicts_end else length_bits(numbers, documents),
        unknown=np.array([_unknown_bits(loaded.tokenizer, *both) for both in zip(spans, ids, strict=True)]),
        is_changed=np.array([_is_changed(loaded.tokenizer, *both) for both in zip(spans, ids, strict=True)]),
        is_cut=np.array([len(span_ids.left) + len(span_ids.right) for span_ids in fitted]) < whole,
    )


def encode(tokenizer: Tokenizer, spans: Sequence[Span]) -> list[Ids]:
    """Returns the ids of each span and of its two sides, tokenized separately; concatenated, they decode to the text.

    Each part is tokenized after a full stop, because some tokenizers add a space at the start of a text.
    """
    stop = tokenizer.encode(_FULL_STOP)
    texts = [text for span in spans for text in (span.left, span.text, span.right)]
    alone, after_stop = tokenizer.encode_batch(texts), tokenizer.encode_batch([_FULL_STOP + text for text in texts])
    encoded = []
    for i, span in enumerate(spans):
        parts = []
        for n in range(3 * i, 3 * i + 3):
            begins_alone = (span.is_start and n == 3 * i) or not np.array_equal(after_stop[n][: len(stop)], stop)
            parts.append(alone[n] if begins_alone else after_stop[n][len(stop) :])
        encoded.append(Ids(*parts, is_start=span.is_start))
    return encoded


def length_bits(numbers: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Returns the cost of the number of ids of each span in bits, float64 [S].

    The probability of a number k is its frequency in the spans of all other documents plus one pseudo-count. The
    pseudo-count is distributed over all k with the weights 1 / (k (k + 1)), so that every number has a finite cost.

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
    unknown = tokenizer.vocabulary.unk
    if unknown is None or unknown not in ids.span:
        return 0.0
    return 8.0 * sum(len(word.encode()) for word in words(span.text) if unknown in tokenizer.encode(word))


def _is_changed(tokenizer: Tokenizer, span: Span, ids: Ids) -> bool:
    text = tokenizer.decode(ids.span.tolist())
    return span.text not in (text, f" {text}")  # some tokenizers drop a space at the start of a text
