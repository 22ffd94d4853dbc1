"""Computes log-likelihoods of sentences and of continuations, in the training format of the model.

Sentences: the score is the log-likelihood for decoders, and the pseudo-log-likelihood for encoders
(`scoring.likelihood`). A denoising model predicts each word separately, as a removed span of the sentence. The first
word is not predicted, because in training there is always text before a removed span.

Continuations of a text: these are spans of `scoring.span_forms` without right context. A decoder predicts the
continuation. An encoder predicts one token at a time, with this token and the rest of the continuation masked, so the
number of masks reveals the number of tokens. A denoising model predicts a removed span at the end of the text, and the
end of the span.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example
from pretrainax.data.objectives.masking_units import WholeWords
from pretrainax.files.errors import shortened
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.likelihood import score, score_examples
from pretrainax.scoring.scoring_examples import (
    LeftToRight,
    PseudoLikelihood,
    Scoring,
    Targets,
    context_length,
    method_of,
)
from pretrainax.scoring.span_forms import BOTH, LEFT, Ids, SpanFormat, span_formats
from pretrainax.tokenization.base import Tokenizer

_EMPTY = np.zeros(0, np.int32)


class ContinuationScore(NamedTuple):
    """The log-likelihood of a continuation, given the text before it."""

    log_likelihood: float  # in nats
    is_best: bool  # True if each token is the model's most likely token, given the preceding tokens


def sentence_log_likelihoods(loaded: LoadedModel, sentences: Sequence[str]) -> np.ndarray:
    """Computes the log-likelihood in nats of each of S sentences, float64 [S].

    Encoders and denoising models have another score instead of the log-likelihood; see the module docstring.
    """
    if not isinstance(method_of(loaded, Scoring()), Targets):
        return np.array([-result.nats for result in score(loaded, sentences)])
    form, longest = _select_form(loaded, BOTH), context_length(loaded)
    nats = np.zeros(len(sentences))
    for example_score in score_examples(loaded, _removed_word_examples(loaded.tokenizer, form, longest, sentences)):
        nats[example_score.number] += example_score.nats
    return -nats


def sentence_check(loaded: LoadedModel) -> Callable[[str], bool]:
    """Returns a function that checks if a sentence fits into the context, so that the model scores it in one piece."""
    method = method_of(loaded, Scoring())
    if isinstance(method, PseudoLikelihood):
        longest = method.max_input_length
    elif isinstance(method, LeftToRight):
        longest = method.context + 1 - len(method.start)  # the model does not read the last token
    else:
        longest = context_length(loaded) - _select_form(loaded, BOTH).num_special_tokens - 1
    return lambda sentence: len(loaded.tokenizer.encode(sentence)) <= longest


def sentence_score_name(loaded: LoadedModel) -> str:
    """Returns a description, for users, of how a model scores sentences."""
    method = method_of(loaded, Scoring())
    return "word by word after the first, each in a separate hole" if isinstance(method, Targets) else method.manner


def continuations(loaded: LoadedModel, pairs: Iterable[tuple[str, str]]) -> list[ContinuationScore]:
    """Computes the log-likelihood of each continuation, given the text before it.

    Args:
      pairs: pairs (text, continuation); the text is the start of a document. The start of a text that does not fit
        into the context is omitted; see `continuation_check`.

    Raises:
      UserError: a continuation exceeds the model's input length or has no token, or the model cannot score
        continuations.
    """
    form, longest = _select_form(loaded, LEFT), context_length(loaded)
    ids = [split(loaded.tokenizer, *pair) for pair in pairs]
    if form.predicts_end and not all(len(pair_ids.left) for pair_ids in ids):
        raise UserError(f"{loaded.origin} fills holes in a text: give prompts that are not empty")
    numbered_examples = (
        (number, example)
        for number, pair_ids in enumerate(ids)
        for example in form.examples_for(form.fitted(pair_ids, longest))
    )
    nats, num_missed = np.zeros(len(ids)), np.zeros(len(ids), int)
    for example_score in score_examples(loaded, numbered_examples):
        nats[example_score.number] -= example_score.nats
        num_missed[example_score.number] += example_score.tokens - example_score.best
    return [ContinuationScore(float(n), not m) for n, m in zip(nats, num_missed, strict=True)]


def continuation_check(loaded: LoadedModel) -> Callable[[str, str], bool]:
    """Returns a function that checks if a text and its continuation fit into the context, so that none is truncated."""
    form, longest = _select_form(loaded, LEFT), context_length(loaded)

    def fits(text: str, continuation: str) -> bool:
        ids = split(loaded.tokenizer, text, continuation)
        # `SpanFormat.fitted` reserves a token for each context that the format reads.
        return max(len(ids.left), 1 + (form.given == BOTH)) + len(ids.span) + form.num_special_tokens <= longest

    return fits


def split(tokenizer: Tokenizer, text: str, continuation: str) -> Ids:
    """Tokenizes a text together with its continuation, and splits the token ids into text and continuation.

    The continuation begins at the first id that differs from the ids of the text alone. White space at the end of the
    text belongs to the continuation, as in common tokenizers.

    Raises:
      UserError: the continuation has no token.
    """
    text_ids, all_ids = tokenizer.encode_batch([text.rstrip(), text + continuation])
    common_length = min(len(text_ids), len(all_ids))
    start = int(np.argmin(np.append(text_ids[:common_length] == all_ids[:common_length], False)))
    if start == len(all_ids):
        raise UserError(
            f"{shortened(continuation)!r} after {shortened(text)!r} has no token in this model's vocabulary"
        )
    return Ids(all_ids[:start], all_ids[start:], _EMPTY, is_start=True)


def _select_form(loaded: LoadedModel, given: str) -> SpanFormat:
    """Selects the model's span format with the context `given` (LEFT or BOTH).

    If no format has this context, selects the model's first format.
    """
    forms = span_formats(loaded)
    return next((form for form in forms if form.given == given), forms[0])


def _removed_word_examples(
    tokenizer: Tokenizer, form: SpanFormat, longest: int, sentences: Sequence[str]
) -> Iterator[tuple[int, Example]]:
    words = WholeWords().bind(tokenizer)
    for number, ids in enumerate(tokenizer.encode_batch(list(sentences))):
        boundaries = sorted({*(1 + np.flatnonzero(words.starts(ids)[1:])).tolist(), len(ids)})  # not the first word
        for start, end in itertools.pairwise(boundaries):
            truncated_ids = form.fitted(Ids(ids[:start], ids[start:end], ids[end:], is_start=True), longest)
            yield from ((number, example) for example in form.examples_for(truncated_ids))
