"""Bits per byte of held-out spans: one currency for encoders, encoder-decoders and decoders of any tokenizer.

`score_spans(loaded, texts)` asks a model for spans that `SpanChoice` takes out of texts by their bytes, so that every
model is asked for the same ones, each given up to `context` bytes on its sides. What a span costs is a code length: the
bits in which someone who has the model and the surroundings could write down the span, and where it ends,

    bits = - log2 p(ids of the span | surroundings) + length + unknown

and the figure is the sum of the bits over the sum of the bytes, those of the original text in UTF-8. Its parts are

  p        by the chain rule over the ids of the span. A decoder is given the left side. An encoder-decoder is given
           both: the span is a sentinel in what it reads, and it says the ids and then the sentinel that ends them. An
           encoder is given both: each id is asked for with masks in its place and in those of the ids after it.
           Decoders that fill in the middle, and prefix LMs that denoise, are asked in the form they were trained in.
  length   Encoder-decoders, and decoders that fill in the middle, say themselves where the span ends, so that their
           probabilities of all spans of any length add up to 1 and nothing is added. Others are told how many ids the
           span has, and their probabilities of all spans of so many ids add up to 1: for the number they pay
           - log2 q(number) bits, where q is how often it comes in the spans of all other documents, and a little for
           those that never came.
  unknown  A word in which the tokenizer has its unknown id is written down in full, 8 bits for each of its bytes.

So everything that is needed to write down the ids is paid for: no model is given the answer, and over many spans none
can cost less than the entropy of the text. Three things to know:

- It is an upper bound for the text: of all ids that spell a span only those that the tokenizer gives are counted. The
  three parts of a text are tokenized each for itself, and their ids one after the other spell the text.
- A tokenizer that changes the text (case, accents, white space) has less to say, and what it loses is not paid for;
  `share_changed` is how much of the bytes is in spans that do not come back from their ids: look at it first.
- "Left side" and "both sides" are not the same question: more is known in the second, so that it costs less.
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
from pretrainax.scoring.likelihood import answers
from pretrainax.scoring.questions import context_of
from pretrainax.scoring.results import Estimate, Result, ratio
from pretrainax.scoring.span_choice import Span, SpanChoice, words
from pretrainax.scoring.span_forms import BOTH, Form, Ids, forms_of
from pretrainax.tokenization.base import Tokenizer

_BEHIND = "."  # what texts are tokenized behind, so that no space is put before them; a piece by itself nearly always
Watch = Callable[[Iterable], Iterable]  # passes on what it sees, and shows how much there was


@dataclasses.dataclass(frozen=True)
class SpanScores:
    """Holds what a model pays for each of S spans, asked for in one form. Arrays [S]."""

    origin: str  # of the model
    form: Form
    spans: list[Span]
    said: np.ndarray  # float64, - log2 of the probability of the ids, and of their end where the model says it
    length: np.ndarray  # float64, bits for the number of ids; 0 where the model says the end
    unknown: np.ndarray  # float64, bits for words that the tokenizer does not know
    is_changed: np.ndarray  # bool: the ids do not spell the span
    is_cut: np.ndarray  # bool: the surroundings were longer than the model reads

    @property
    def bits(self) -> np.ndarray:
        return self.said + self.length + self.unknown

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
        """Tells which spans these are, and what could be read beside them."""
        return hashlib.blake2b(repr(self.spans).encode(), digest_size=4).hexdigest()

    def results(self, source: str) -> list[Result]:
        """Returns the figure, and beside it what it is made of, for the table and the file of an evaluation."""
        counts = {"documents": len(np.unique(self.documents)), "spans": len(self.spans), "bytes": int(self.bytes.sum())}
        if self.is_cut.any():
            counts["spans with surroundings cut"] = int(self.is_cut.sum())
        says = "the model says where a span ends" if self.form.says_end else "the number of its tokens is paid for"
        how = f"spans chosen by bytes ({self.fingerprint}), given {self.form.given}: {says}"
        parts = {"bits_per_byte": self.bits, "bits_per_byte_for_length": self.length}
        parts |= {"bits_per_byte_for_unknown_words": self.unknown, "share_changed": self.is_changed * self.bytes}
        return [
            Result(source, f"span_{name}", *self.per_byte(values), counts, how, self.form.given, self.origin)
            for name, values in parts.items()
            if name == "bits_per_byte" or values.any()
        ]

    def per_byte(self, values: np.ndarray) -> Estimate:
        """Returns the sum of [S] values over that of the bytes, with its standard error over documents."""
        _, number = np.unique(self.documents, return_inverse=True)
        return ratio(np.bincount(number, values), np.bincount(number, self.bytes))


def score_spans(
    loaded: LoadedModel, texts: Iterable[str], choice: Optional[SpanChoice] = None, watch: Watch = iter
) -> list[SpanScores]:
    """Returns what a model pays for the spans of texts, once for each form in which it can be asked.

    Args:
      watch: sees the spans go by, in each form.

    Raises:
      UserError: no text has a span; a model that cannot be asked for one; a span that is longer than it reads.
    """
    choice = choice or SpanChoice()
    spans = list(choice.spans(texts))
    if not spans:
        raise UserError(f"no text is long enough for a span, with share={choice.share}: give more text, or raise it")
    ids = encode(loaded.tokenizer, spans)
    return [_scored(loaded, form, spans, ids, watch) for form in forms_of(loaded)]


def difference(one: SpanScores, other: SpanScores) -> Estimate:
    """Returns by how many bits per byte `one` costs more than `other`, with the standard error over documents.

    The error is of the difference: what makes a document hard for both is not in it.

    Raises:
      UserError: their spans are not the same.
    """
    if one.fingerprint != other.fingerprint:
        raise UserError(
            f"{one.origin} and {other.origin} were not asked for the same spans ({len(one.spans)} and "
            f"{len(other.spans)}): take the same texts, share, mean_bytes, context and seed"
        )
    return one.per_byte(one.bits - other.bits)


def texts_of(source: Source, split: str = "valid", documents: Optional[int] = None) -> Iterator[str]:
    """Yields the texts of a source, at most so many of each of its parts; UserError for one of pairs."""
    for part in source.components():
        for document in itertools.islice(documents_of(part, split, collections.Counter()), documents):
            if isinstance(document, tuple):
                raise UserError(f"{part} has pairs of source and target, and spans are taken out of texts: give texts")
            yield document if isinstance(document, str) else document.decode()


def results_beside(one: Sequence[SpanScores], other: Sequence[SpanScores], source: str) -> list[Result]:
    """Returns the differences between two models, in each of their forms."""
    results = []
    for a, b in itertools.product(one, other):
        figure, part = a.results(source)[0], f"{a.form.given} - {b.form.given} of {b.origin}"
        estimate = difference(a, b)._asdict()
        results.append(dataclasses.replace(figure, measure="span_bits_per_byte_difference", part=part, **estimate))
    return results


def _scored(loaded: LoadedModel, form: Form, spans: list[Span], ids: list[Ids], watch: Watch) -> SpanScores:
    longest = context_of(loaded)
    fitted = [form.fitted(of_span, longest) for of_span in ids]
    said = np.zeros(len(spans))
    questions = ((i, example) for i, of in enumerate(watch(fitted)) for example in form.ask(of))
    for answer in answers(loaded, questions):
        said[answer.number] += answer.nats / math.log(2)
    numbers = np.array([len(of_span.span) for of_span in ids])
    documents = np.array([span.document for span in spans])
    whole = [len(of.left) + len(of.right) * (form.given == BOTH) for of in ids]
    return SpanScores(
        origin=loaded.origin,
        form=form,
        spans=spans,
        said=said,
        length=np.zeros(len(spans)) if form.says_end else length_bits(numbers, documents),
        unknown=np.array([_unknown_bits(loaded.tokenizer, *both) for both in zip(spans, ids, strict=True)]),
        is_changed=np.array([_is_changed(loaded.tokenizer, *both) for both in zip(spans, ids, strict=True)]),
        is_cut=np.array([len(of.left) + len(of.right) for of in fitted]) < whole,
    )


def encode(tokenizer: Tokenizer, spans: Sequence[Span]) -> list[Ids]:
    """Returns the ids of each span and of its sides, each of these told from the others: joined, they spell the text.

    Each is tokenized behind a full stop, as some tokenizers put a space before a text.
    """
    stop = tokenizer.encode(_BEHIND)
    texts = [text for span in spans for text in (span.left, span.text, span.right)]
    alone, behind = tokenizer.encode_batch(texts), tokenizer.encode_batch([_BEHIND + text for text in texts])
    found = []
    for i, span in enumerate(spans):
        parts = []
        for place in range(3 * i, 3 * i + 3):
            begins_alone = (span.is_start and place == 3 * i) or not np.array_equal(behind[place][: len(stop)], stop)
            parts.append(alone[place] if begins_alone else behind[place][len(stop) :])
        found.append(Ids(*parts, is_start=span.is_start))
    return found


def length_bits(numbers: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Returns what it costs to say how many ids each span has, float64 [S].

    The chance of a number k is its share in the spans of all other documents, to which one more is added that is k with
    a chance of 1 / (k (k + 1)), so that every number has a code.

    Args:
      numbers, documents: int [S].
    """
    numbers, documents = numbers.tolist(), documents.tolist()
    of_number, of_document = collections.Counter(numbers), collections.Counter(documents)
    of_both = collections.Counter(zip(numbers, documents, strict=True))
    chances = [
        (of_number[k] - of_both[k, document] + 1 / (k * (k + 1))) / (len(numbers) - of_document[document] + 1)
        for k, document in zip(numbers, documents, strict=True)
    ]
    return -np.log2(chances)


def _unknown_bits(tokenizer: Tokenizer, span: Span, ids: Ids) -> float:
    unknown = tokenizer.vocabulary.unk
    if unknown is None or unknown not in ids.span:
        return 0.0
    return 8.0 * sum(len(word.encode()) for word in words(span.text) if unknown in tokenizer.encode(word))


def _is_changed(tokenizer: Tokenizer, span: Span, ids: Ids) -> bool:
    text = tokenizer.decode(ids.span.tolist())
    return span.text not in (text, f" {text}")  # some leave out the space before a text
