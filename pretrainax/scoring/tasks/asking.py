"""Asks a model about the texts of a task, in the form that its family was trained in.

A sentence: of a decoder its log-likelihood, of an encoder its pseudo-log-likelihood (`scoring.likelihood`). A model
that fills holes is asked for one word after the other, in a hole of its own in the sentence; the first is given, as no
such hole is in training.

A continuation of a text: `scoring.span_forms`, with nothing after it. A decoder goes on after the text. An encoder is
asked for one token after the other, with masks from there on, and so is told how many there are. A model that fills
holes says what a hole at the end of the text stands for, and that it ends.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example
from pretrainax.data.objectives.masking_units import WholeWords
from pretrainax.files.errors import shortened
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.likelihood import answers, score
from pretrainax.scoring.questions import Scoring, Targets, context_of, method_of
from pretrainax.scoring.span_forms import BOTH, LEFT, Form, Ids, forms_of
from pretrainax.tokenization.base import Tokenizer

_NOTHING = np.zeros(0, np.int32)


class Said(NamedTuple):
    """Says how likely a model finds a continuation."""

    log_likelihood: float  # in nats
    is_best: bool  # each of its tokens is the most likely one after those before it
    is_cut: bool  # the text before it is longer than the model reads


def sentence_log_likelihoods(loaded: LoadedModel, sentences: Sequence[str]) -> np.ndarray:
    """Returns the log-likelihood of each sentence in nats, float64 [S], or what stands for it in the model's family."""
    if not isinstance(method_of(loaded, Scoring()), Targets):
        return np.array([-found.nats for found in score(loaded, sentences)])
    form, longest = _form(loaded, BOTH), context_of(loaded)
    nats = np.zeros(len(sentences))
    for answer in answers(loaded, _holes(loaded.tokenizer, form, longest, sentences)):
        nats[answer.number] += answer.nats
    return -nats


def manner(loaded: LoadedModel) -> str:
    """Says for people what the likelihood of a sentence is, of this model."""
    method = method_of(loaded, Scoring())
    return "word by word behind the first, each in a hole of its own" if isinstance(method, Targets) else method.manner


def continuations(loaded: LoadedModel, pairs: Iterable[tuple[str, str]]) -> list[Said]:
    """Returns how likely each second text is after the first, which begins a document.

    Raises:
      UserError: a continuation is longer than the model reads, or without a token; the model can continue no text.
    """
    form, longest = _form(loaded, LEFT), context_of(loaded)
    ids = [split(loaded.tokenizer, *pair) for pair in pairs]
    if form.says_end and not all(len(of.left) for of in ids):
        raise UserError(f"{loaded.origin} fills holes in a text: give prompts that are not empty")
    fitted = [_fitted(form, of, longest) for of in ids]
    questions = ((number, example) for number, of in enumerate(fitted) for example in form.ask(of))
    nats, missed = np.zeros(len(ids)), np.zeros(len(ids), int)
    for answer in answers(loaded, questions):
        nats[answer.number] -= answer.nats
        missed[answer.number] += answer.tokens - answer.best
    return [
        Said(float(n), not m, len(after.left) < len(before.left))
        for n, m, after, before in zip(nats, missed, fitted, ids, strict=True)
    ]


def split(tokenizer: Tokenizer, text: str, continuation: str) -> Ids:
    """Returns the ids of a text and of its continuation, told apart where those of both together part from the text's.

    White space at the end of the text is the continuation's, as tokenizers have it.
    """
    before, whole = tokenizer.encode_batch([text.rstrip(), text + continuation])
    common = min(len(before), len(whole))
    begun = int(np.argmin(np.append(before[:common] == whole[:common], False)))
    if begun == len(whole):
        raise UserError(
            f"{shortened(continuation)!r} after {shortened(text)!r} has no token in this model's vocabulary"
        )
    return Ids(whole[:begun], whole[begun:], _NOTHING, is_start=True)


def _fitted(form: Form, ids: Ids, longest: int) -> Ids:
    try:
        return form.fitted(ids, longest)
    except UserError as e:
        raise UserError(
            f"an answer has {len(ids.span)} tokens, and leaves no room for its question in the {longest} that a model "
            "of this context reads: leave out the example, or the task"
        ) from e


def _form(loaded: LoadedModel, given: str) -> Form:
    """Returns the form that has this side given, or else the one there is."""
    forms = forms_of(loaded)
    return next((form for form in forms if form.given == given), forms[0])


def _holes(tokenizer: Tokenizer, form: Form, longest: int, sentences: Sequence[str]) -> Iterator[tuple[int, Example]]:
    words = WholeWords().bind(tokenizer)
    for number, ids in enumerate(tokenizer.encode_batch(list(sentences))):
        edges = sorted({*(1 + np.flatnonzero(words.starts(ids)[1:])).tolist(), len(ids)})  # without the first word
        for start, end in itertools.pairwise(edges):
            fitted = form.fitted(Ids(ids[:start], ids[start:end], ids[end:], is_start=True), longest)
            yield from ((number, example) for example in form.ask(fitted))
