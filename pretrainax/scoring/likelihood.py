"""Says how likely a model finds texts: `score(loaded, texts)`.

Texts become examples (`scoring.questions`), examples of about one length a batch, and a batch log-probabilities of its
targets, of which the logits are held for some tokens at a time. What a text gets does not depend on the others.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Optional, Union

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import RunFailed, UserError
from pretrainax.data.batch import Batch, Example
from pretrainax.inference.framing import longest
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.rows import batches
from pretrainax.models import Outputs
from pretrainax.scoring.questions import PseudoLikelihood, Scoring, method_of

_LOGITS = 1024  # predictions whose logits exist at a time


@dataclasses.dataclass(frozen=True)
class Score:
    """Says how likely a model finds one text: nats / tokens is the loss, nats / log(2) / bytes the bits per byte."""

    nats: float  # minus the log of the probability
    tokens: int  # that were predicted
    bytes: int  # of UTF-8, of the text that was predicted
    counted: str  # how: "left to right, …", "pseudo-log-likelihood, …", "by the targets of its objective, …"


class Answer(NamedTuple):
    """Holds what a model says of one example."""

    number: int  # whose the example is
    nats: float  # minus the log of the probability of its weighted targets
    tokens: int  # how many these are
    best: int  # how many of them are each the most likely token


def score(
    loaded: LoadedModel,
    texts: Sequence[Union[str, tuple[str, str]]],
    *,
    context: Optional[int] = None,
    stride: Optional[int] = None,
    by_word: bool = False,
    seed: Optional[int] = None,
) -> list[Score]:
    """Returns the score of each text, or of the target of each pair (source, target), which an encoder-decoder reads.

    Args:
      context: tokens that the model reads at a time; None: as many as in training; of a model of
        others, as many as it has positions.
      stride: of a decoder: tokens between the starts of two windows over a text that is longer than the context. Each
        token is predicted once, with at least `context - stride` before it. None: half the context.
      by_word: of an encoder: a word of several tokens is masked from the one that is asked for to its end.
      seed: of a model that fills holes: of the holes; None: 0.

    Raises:
      UserError: an option out of range, or one that does nothing for this model; a text too long for an encoder.
    """
    if isinstance(texts, str):
        raise UserError(f"texts is one text: give a list of them, [{texts[:20]!r}]")
    method = method_of(loaded, Scoring(context, stride, by_word, seed))
    asked = []
    for number, text in enumerate(texts):
        asked.append(method.ask(text))
        if isinstance(method, PseudoLikelihood) and asked[-1].pieces > 1:
            raise UserError(
                f"text {number} has {len(loaded.tokenizer.encode(text)):,} tokens, and this encoder takes at most "
                f"{method.longest:,} at a time: give shorter ones"
            )
    nats, tokens = np.zeros((2, len(texts)))
    questions = ((number, example) for number, about in enumerate(asked) for example in about.examples)
    for answer in answers(loaded, questions):
        nats[answer.number] += answer.nats
        tokens[answer.number] += answer.tokens
    return [
        Score(float(n), int(t), about.bytes, method.counted + (f", in {about.pieces} pieces" * (about.pieces > 1)))
        for n, t, about in zip(nats, tokens, asked, strict=True)
    ]


def answers(loaded: LoadedModel, questions: Iterable[tuple[int, Example]]) -> Iterator[Answer]:
    """Yields the answer to each example, in any order.

    Args:
      questions: examples, each with a number that tells whose it is. They are taken as they are needed.
    """
    numbers: list[int] = []  # of the examples that were taken

    def taken() -> Iterator[Example]:
        for number, example in questions:
            numbers.append(number)
            yield example

    for rows, batch in batches(taken(), loaded.mesh, longest(loaded), loaded.tokenizer.vocabulary.pad):
        weights = batch.pop("loss_weights")  # by which, in a batch, a model would be asked for its loss too
        log_probs, is_best = jax.device_get(loaded.ask(target_log_probabilities, batch))  # [B, N]
        nats = -np.where(weights > 0, log_probs.astype(np.float64) * weights, 0.0).sum(axis=1)
        if not np.isfinite(nats).all():
            raise RunFailed(
                f"{loaded.origin}: the probabilities of its tokens are not finite numbers; did the run diverge?"
            )
        best = (is_best & (weights > 0)).sum(axis=1)
        for row, of, tokens, hits in zip(rows, nats.tolist(), weights.sum(axis=1), best, strict=False):
            yield Answer(numbers[row], of, int(tokens), int(hits))


def target_log_probabilities(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probability in nats of each of `targets` [B, N], float32, and if no other token has a higher one.

    For `LoadedModel.ask`.
    """
    output = outputs.heads["lm"]

    def of_column(xs):
        features, targets = xs  # [B, D], [B]
        logits = output.replace(features=features[:, None]).logits()[:, 0]  # [B, V]
        hits = jnp.arange(logits.shape[-1])[None] == targets[:, None]
        # Not a gather, which would collect the logits of all devices along the vocabulary.
        of_target = jnp.where(hits, logits, 0.0).sum(-1)
        return of_target - jax.nn.logsumexp(logits, axis=-1), of_target == logits.max(-1)

    rows, columns = batch["targets"].shape
    together = max(min(_LOGITS // rows, columns), 1)
    # [B, N, …] -> [N, B, …]
    columns_first = jnp.swapaxes(output.features, 0, 1), batch["targets"].T
    log_probs, is_best = jax.lax.map(of_column, columns_first, batch_size=together)
    return log_probs.T, is_best.T
