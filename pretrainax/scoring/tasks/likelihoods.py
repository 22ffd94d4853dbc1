"""Computes likelihoods of sentences and of continuations, in the training format of the model.

Sentences: decoders give log-likelihoods, and encoders give pseudo-log-likelihoods (`scoring.likelihood`). A denoising
model predicts each word separately, in a hole of the sentence. The first word is not predicted, because in training a
hole always has text before it.

Continuations of a text: a form of `scoring.span_forms` without text on the right. A decoder predicts the continuation.
An encoder predicts one token at a time, with masks for this token and the rest of the continuation, so it knows the
number of tokens. A denoising model predicts the content of a hole at the end of the text, and the end of the hole.
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
from pretrainax.scoring.likelihood import score, score_examples
from pretrainax.scoring.scoring_examples import Scoring, Targets, context_length, method_of
from pretrainax.scoring.span_forms import BOTH, LEFT, Form, Ids, forms_of
from pretrainax.tokenization.base import Tokenizer

_EMPTY = np.zeros(0, np.int32)


class ContinuationScore(NamedTuple):
    """The likelihood of a continuation, given the text before it."""

    log_likelihood: float  # in nats
    is_best: bool  # True if each token is the most likely token after the tokens before it
    is_cut: bool  # True if the text before the continuation was truncated


def sentence_log_likelihoods(loaded: LoadedModel, sentences: Sequence[str]) -> np.ndarray:
    """Returns the log-likelihood of each of S sentences in nats, float64 [S].

    For encoders and denoising models, it is the substitute that the docstring of this module describes.
    """
    if not isinstance(method_of(loaded, Scoring()), Targets):
        return np.array([-result.nats for result in score(loaded, sentences)])
    form, longest = _form(loaded, BOTH), context_length(loaded)
    nats = np.zeros(len(sentences))
    for answer in score_examples(loaded, _holes(loaded.tokenizer, form, longest, sentences)):
        nats[answer.number] += answer.nats
    return -nats


def sentence_score_name(loaded: LoadedModel) -> str:
    """Returns a description, for users, of how this model scores sentences."""
    method = method_of(loaded, Scoring())
    return "word by word after the first, each in a separate hole" if isinstance(method, Targets) else method.manner


def continuations(loaded: LoadedModel, pairs: Iterable[tuple[str, str]]) -> list[ContinuationScore]:
    """Returns the likelihood of each continuation, given its text.

    Args:
      pairs: a text, which begins a document, and its continuation.

    Raises:
      UserError: a continuation is longer than the model reads or has no token, or the model cannot score continuations.
    """
    form, longest = _form(loaded, LEFT), context_length(loaded)
    ids = [split(loaded.tokenizer, *pair) for pair in pairs]
    if form.predicts_end and not all(len(pair_ids.left) for pair_ids in ids):
        raise UserError(f"{loaded.origin} fills holes in a text: give prompts that are not empty")
    fitted = [_fitted(form, pair_ids, longest) for pair_ids in ids]
    questions = ((number, example) for number, pair_ids in enumerate(fitted) for example in form.examples_for(pair_ids))
    nats, missed = np.zeros(len(ids)), np.zeros(len(ids), int)
    for answer in score_examples(loaded, questions):
        nats[answer.number] -= answer.nats
        missed[answer.number] += answer.tokens - answer.best
    return [
        ContinuationScore(float(n), not m, len(after.left) < len(before.left))
        for n, m, after, before in zip(nats, missed, fitted, ids, strict=True)
    ]


def split(tokenizer: Tokenizer, text: str, continuation: str) -> Ids:
    """Returns the ids of a text and the ids of its continuation.

    The text and the continuation are tokenized together. The continuation begins at the first id that differs from the
    ids of the text alone. White space at the end of the text belongs to the continuation, as in common tokenizers.

    Raises:
      UserError: the continuation has no token.
    """
    before, whole = tokenizer.encode_batch([text.rstrip(), text + continuation])
    common = min(len(before), len(whole))
    start = int(np.argmin(np.append(before[:common] == whole[:common], False)))
    if start == len(whole):
        raise UserError(
            f"{shortened(continuation)!r} after {shortened(text)!r} has no token in this model's vocabulary"
        )
    return Ids(whole[:start], whole[start:], _EMPTY, is_start=True)


def _fitted(form: Form, ids: Ids, longest: int) -> Ids:
    try:
        return form.fitted(ids, longest)
    except UserError as e:
        raise UserError(
            f"an answer has {len(ids.span)} tokens, and leaves no room for its question in the {longest} tokens that "
            "the model reads: leave out the example or the task"
        ) from e


def _form(loaded: LoadedModel, given: str) -> Form:
    """Returns the model's form with the context `given` (LEFT or BOTH), or its first form if there is none."""
    forms = forms_of(loaded)
    return next((form for form in forms if form.given == given), forms[0])


def _holes(tokenizer: Tokenizer, form: Form, longest: int, sentences: Sequence[str]) -> Iterator[tuple[int, Example]]:
    words = WholeWords().bind(tokenizer)
    for number, ids in enumerate(tokenizer.encode_batch(list(sentences))):
        edges = sorted({*(1 + np.flatnonzero(words.starts(ids)[1:])).tolist(), len(ids)})  # not the first word
        for start, end in itertools.pairwise(edges):
            fitted = form.fitted(Ids(ids[:start], ids[start:end], ids[end:], is_start=True), longest)
            yield from ((number, example) for example in form.examples_for(fitted))
