"""Computes the log-likelihood of documents: `score(loaded, texts)`.

`scoring.scoring_examples` converts documents to examples. Examples of similar length are batched, and the model
computes the log-probabilities of the targets of a batch. To save memory, logits are computed for a few tokens at a
time. A document's score does not depend on the other documents.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Optional, Union

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import Diverged, UserError
from pretrainax.data.batch import Batch, Example
from pretrainax.inference.framing import checked_texts, max_input_length
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.rows import batches
from pretrainax.models import Outputs
from pretrainax.scoring.scoring_examples import PseudoLikelihood, Scoring, method_of

_MAX_PREDICTIONS = 1024  # number of predictions whose logits are in memory at the same time


@dataclasses.dataclass(frozen=True)
class Score:
    """The score of a text: nats / tokens is the loss, and nats / log(2) / bytes is the number of bits per byte."""

    nats: float  # negative log-probability of the predicted tokens
    tokens: int  # number of predicted tokens
    bytes: int  # UTF-8 bytes of the predicted text
    method: str  # scoring method: "left to right, …", "pseudo-log-likelihood, …", "by the targets of its objective, …"


class ExampleScore(NamedTuple):
    """The score of a single example."""

    number: int  # index of the text that the example belongs to
    nats: float  # negative log-probability of the weighted targets
    tokens: int  # number of weighted targets
    best: int  # number of weighted targets that are the model's most likely token
    target_nats: np.ndarray  # negative log-probability of each weighted target, float64 [tokens]


def score(
    loaded: LoadedModel,
    texts: Sequence[Union[str, tuple[str, str]]],
    *,
    context: Optional[int] = None,
    stride: Optional[int] = None,
    by_word: bool = False,
    seed: Optional[int] = None,
) -> list[Score]:
    """Computes the score of each text; for a pair (source, target), scores the target given the source.

    Pairs require an encoder-decoder.

    Args:
      context: number of tokens that the model reads at a time. The default is the sequence length of training or, for
        an imported model, its maximum input length.
      stride: for decoders: number of tokens between the starts of consecutive windows over a text that is longer than
        the context. Each token is predicted once, with at least `context - stride` tokens before it. The default is
        half the context.
      by_word: for encoders: whether to also mask the subsequent tokens of the same word.
      seed: for denoising models: seed of the corruption. The default is 0.

    Raises:
      UserError: an option is out of range or has no effect on this model, or a text is too long for an encoder.
    """
    texts = checked_texts(texts, pairs=True)
    method = method_of(loaded, Scoring(context, stride, by_word, seed))
    scorings = []
    for number, text in enumerate(texts):
        scorings.append(method.examples_for(text))
        if isinstance(method, PseudoLikelihood) and scorings[-1].pieces > 1:
            raise UserError(
                f"text {number} has {len(loaded.tokenizer.encode(text)):,} tokens, and this encoder takes at most "
                f"{method.max_input_length:,} at a time: give shorter texts"
            )
    nats, tokens = np.zeros((2, len(texts)))
    numbered_examples = ((number, example) for number, scoring in enumerate(scorings) for example in scoring.examples)
    for example_score in score_examples(loaded, numbered_examples):
        nats[example_score.number] += example_score.nats
        tokens[example_score.number] += example_score.tokens
    return [
        Score(
            float(n),
            int(t),
            scoring.bytes,
            method.description + (f", in {scoring.pieces} pieces" * (scoring.pieces > 1)),
        )
        for n, t, scoring in zip(nats, tokens, scorings, strict=True)
    ]


def score_examples(loaded: LoadedModel, questions: Iterable[tuple[int, Example]]) -> Iterator[ExampleScore]:
    """Computes the score of each example; yields the scores in any order, each with the index of its text.

    Args:
      questions: pairs (text index, example); consumed lazily.
    """
    text_indices: list[int] = []  # text index of each example consumed so far

    def examples() -> Iterator[Example]:
        for number, example in questions:
            text_indices.append(number)
            yield example

    for rows, batch in batches(examples(), loaded.mesh, max_input_length(loaded), loaded.tokenizer.vocabulary.pad):
        weights = batch.pop("loss_weights")  # with weights in the batch, the model would also compute the loss
        log_probs, is_best = jax.device_get(loaded.compute(target_log_probabilities, batch))  # [B, N]
        target_nats = -np.where(weights > 0, log_probs.astype(np.float64) * weights, 0.0)  # [B, N]
        nats = target_nats.sum(axis=1)
        if not np.isfinite(nats).all():
            raise Diverged(
                f"{loaded.origin}: the probabilities of its tokens are not finite numbers; did the run diverge?"
            )
        best = (is_best & (weights > 0)).sum(axis=1)
        for i, row in enumerate(rows):
            of_targets = target_nats[i][weights[i] > 0]
            yield ExampleScore(text_indices[row], float(nats[i]), int(weights[i].sum()), int(best[i]), of_targets)


def target_log_probabilities(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Computes the log-probability of each target, and whether the target is the most likely token.

    Pass this function to `LoadedModel.compute`.

    Returns:
      Log-probabilities in nats, float32 [B, N], and a bool array [B, N]: True if no token is more likely than the
      target.
    """
    output = outputs.heads["lm"]

    def column_scores(xs):
        features, targets = xs  # [B, D], [B]
        logits = output.replace(features=features[:, None]).logits()[:, 0]  # [B, V]
        is_target = jnp.arange(logits.shape[-1])[None] == targets[:, None]
        # A gather would collect the logits from all devices along the vocabulary axis.
        target_logits = jnp.where(is_target, logits, 0.0).sum(-1)
        return target_logits - jax.nn.logsumexp(logits, axis=-1), target_logits == logits.max(-1)

    rows, columns = batch["targets"].shape
    batch_size = max(min(_MAX_PREDICTIONS // rows, columns), 1)
    # [B, N, …] -> [N, B, …]
    columns_first = jnp.swapaxes(output.features, 0, 1), batch["targets"].T
    log_probs, is_best = jax.lax.map(column_scores, columns_first, batch_size=batch_size)
    return log_probs.T, is_best.T
