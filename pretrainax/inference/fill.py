"""Fills holes in a text: single masks with an encoder, spans with an encoder-decoder, one span with a decoder."""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Literal, Optional, get_args

import jax
import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Batch
from pretrainax.data.words import Words
from pretrainax.inference.fill_spans import find_spans
from pretrainax.inference.framing import check_length, frame_of, max_input_length, read_example
from pretrainax.inference.holes import Holes
from pretrainax.inference.loaded import LoadedModel, check_language_model
from pretrainax.inference.rows import batches
from pretrainax.models import Outputs
from pretrainax.models.heads import HEADS

_DEFAULT_SPAN = 16  # default maximum number of tokens per span
Order = Literal["most_certain", "left_to_right", "at_once"]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A candidate for a hole, with its probability."""

    text: str  # the complete word, even if the mask is only a part of it
    probability: float


@dataclasses.dataclass(frozen=True)
class Filled:
    """A text with filled holes, and the most likely candidates for each hole."""

    text: str  # the complete text, with the most likely candidate in each hole
    holes: tuple[tuple[Candidate, ...], ...]  # candidates of each hole, most likely first


def fill(
    loaded: LoadedModel,
    text: str,
    top: int = 5,
    order: Optional[Order] = None,
    max_new_tokens: Optional[int] = None,
) -> Filled:
    """Fills the holes in `text`; returns the filled text and the most likely candidates for each hole.

    A hole is written as [MASK] for any model, or as the tokenizer's mask or a sentinel (<extra_id_0>). An encoder fills
    each hole with one token. An encoder-decoder fills holes from left to right with spans of any length, by beam
    search. A decoder that was trained to fill in the middle fills one hole. The probability of a candidate is
    conditional on the holes that are already filled. The probability of a span covers all its tokens and the end token.

    Args:
      top: maximum number of candidates per hole.
      order: the fill order for encoders. "most_certain" fills the mask with the most certain prediction in each forward
        pass, so that the tokens of a word are consistent. "left_to_right" also fills one mask per pass. "at_once" fills
        all masks after one forward pass. If None, "most_certain" is used.
      max_new_tokens: for encoder-decoders and decoders, the maximum number of tokens per span. If None, it is 16.

    Raises:
      UserError: the text has no hole, an unsupported hole, or too many tokens; the model cannot fill holes; an option
        is out of range or has no effect on this model.
    """
    if not isinstance(text, str):
        raise UserError(f"text is {text!r:.80}, it must be a string: fill takes one text at a time")
    _check_options(loaded, top, order, max_new_tokens)
    top = int(top)  # also a NumPy number
    holes = Holes(loaded.tokenizer, text)
    if loaded.model.config.family == "encoder":
        return _fill_masks(loaded, holes, top, order or "most_certain")
    spans = find_spans(loaded, holes, top, int(max_new_tokens or _DEFAULT_SPAN))
    candidates = [tuple(Candidate(holes.spelled(ids).strip(), p) for ids, p in hole) for hole in spans]
    return Filled(holes.filled([hole[0][0] for hole in spans]), tuple(candidates))


def _check_options(loaded: LoadedModel, top: int, order: Optional[Order], max_new_tokens: Optional[int]) -> None:
    """Raises UserError if the model cannot fill holes, or an option is invalid or has no effect on this model."""
    vocabulary, config = loaded.tokenizer.vocabulary, loaded.model.config
    check_language_model(loaded)
    if config.generator is None and not HEADS["lm"].is_in(config):
        raise UserError(
            f"{loaded.origin} is a discriminator, which detects replaced tokens and cannot fill in: "
            "take its generator, or embed"
        )
    if config.family == "encoder" and vocabulary.mask is None:
        raise UserError(f"the tokenizer of {loaded.origin} has no mask token, so the model cannot fill in")
    text_tokens = vocabulary.size - len(vocabulary.special_ids)
    if not (isinstance(top, numbers.Integral) and 1 <= top <= text_tokens):
        raise UserError(
            f"top is {top!r}, it must be a whole number from 1 to {text_tokens:,}, the number of text tokens"
        )
    if order is not None and order not in get_args(Order):
        raise UserError(f"order is {order!r}, it must be one of {', '.join(get_args(Order))}")
    if max_new_tokens is not None and not (isinstance(max_new_tokens, numbers.Integral) and max_new_tokens >= 1):
        raise UserError(f"max_new_tokens is {max_new_tokens!r}, it must be a whole number from 1")
    if config.family == "encoder" and max_new_tokens is not None:
        raise UserError(
            f"max_new_tokens is {max_new_tokens}, {loaded.origin} fills each mask with one token: leave it out"
        )
    if config.family != "encoder" and order is not None:
        raise UserError(f"order is {order!r}, {loaded.origin} fills holes from left to right: leave it out")


def _fill_masks(loaded: LoadedModel, holes: Holes, top: int, order: Order) -> Filled:
    """Fills each mask in a text with one token predicted by an encoder, in the given order."""
    holes.check_masks()
    row, positions = _masked_row(loaded, holes)
    check_length(loaded, len(row), "the text")
    candidates: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # hole -> ids and probabilities, [top] each
    while len(candidates) < len(holes):
        probabilities = _probabilities(loaded, row, positions)
        remaining = [hole for hole in range(len(holes)) if hole not in candidates]
        if order == "most_certain":
            remaining = [max(remaining, key=lambda hole: probabilities[hole].max())]
        for hole in remaining[:1] if order == "left_to_right" else remaining:
            best = np.argsort(-probabilities[hole], kind="stable")[:top]
            candidates[hole] = best, probabilities[hole, best]
            row[positions[hole]] = best[0]
    words, candidates_by_hole = Words(loaded.tokenizer), []
    for hole, position in enumerate(positions):
        pairs = zip(*(x.tolist() for x in candidates[hole]), strict=True)
        candidates_by_hole.append(tuple(Candidate(_complete_word(words, holes, row, position, i), p) for i, p in pairs))
    return Filled(holes.filled([[int(row[position])] for position in positions]), tuple(candidates_by_hole))


def _masked_row(loaded: LoadedModel, holes: Holes) -> tuple[np.ndarray, list[int]]:
    """Returns the encoder input for a text, int32 [t], and the positions of its masks."""
    (before, after), positions = frame_of(loaded), []
    first, *rest = (ids.tolist() for ids in holes.ids())
    row = [*before, *first]
    for ids in rest:
        positions.append(len(row))
        row += [loaded.tokenizer.vocabulary.mask, *ids]
    return np.array([*row, *after], np.int32), positions


def _probabilities(loaded: LoadedModel, row: np.ndarray, positions: Sequence[int]) -> np.ndarray:
    """Computes the probability of each token id at each of K positions, float32 [K, V]; special tokens get 0."""
    vocabulary = loaded.tokenizer.vocabulary
    example = read_example(loaded, row) | {"masked_positions": np.array(positions, np.int32)}
    ((_, batch),) = batches([example], loaded.mesh, max_input_length(loaded), vocabulary.pad)
    logits = loaded.compute(_logits, batch)[0, : len(positions)]  # [B, K', rows] -> [K, rows]
    # The loss and transformers normalize over all rows, also over those without a token.
    probabilities = np.array(jax.nn.softmax(logits, axis=-1))[:, : vocabulary.size]
    probabilities[:, list(vocabulary.special_ids)] = 0.0
    return probabilities


def _logits(outputs: Outputs, batch: Batch) -> jax.Array:
    return outputs.heads["lm"].logits()


def _complete_word(words: Words, holes: Holes, row: np.ndarray, position: int, token_id: int) -> str:
    """Returns the complete word around `position` after replacing the token there with `token_id`."""
    row = row.copy()
    row[position] = token_id
    word_edges = np.append(np.flatnonzero(words.starts(row)), len(row))
    number = np.searchsorted(word_edges, position, side="right")
    text = holes.spelled(row[word_edges[number - 1] : word_edges[number]].tolist())
    return text.strip() or text
