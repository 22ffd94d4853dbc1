"""Fills in what is missing in a text: masks for an encoder, spans for an encoder-decoder, the middle for a decoder."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Optional, get_args

import jax
import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Batch
from pretrainax.data.words import Words
from pretrainax.inference.fill_spans import find_spans
from pretrainax.inference.framing import check_length, frame_of, longest, read_example
from pretrainax.inference.holes import Holes
from pretrainax.inference.loaded import LoadedModel, check_language_model
from pretrainax.inference.rows import batches
from pretrainax.models import Outputs
from pretrainax.models.heads import HEADS

_SPAN = 16  # tokens
Order = Literal["most_certain", "left_to_right", "at_once"]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One of the likely fillings of a hole."""

    text: str  # whole words: of a mask within a word, that word
    probability: float


@dataclasses.dataclass(frozen=True)
class Filled:
    """A text whose holes are filled in."""

    text: str  # with the likeliest candidate in each hole
    holes: tuple[tuple[Candidate, ...], ...]  # of each hole in the text, likeliest first


def fill(
    loaded: LoadedModel,
    text: str,
    top: int = 5,
    order: Optional[Order] = None,
    max_new_tokens: Optional[int] = None,
) -> Filled:
    """Returns `text` with its holes filled in, and the likeliest fillings of each.

    A hole is written [MASK] for every model, or as its tokenizer writes it: <mask>, <extra_id_0>. Of an encoder it is
    one token. Of an encoder-decoder it is a span of any length, found by beam search, from left to right; of a decoder
    that was trained to fill in the middle, there is one. A candidate's probability is the model's own when it was asked
    for it; that of a span is of all its tokens, and of its end.

    Args:
      top: candidates of each hole, at most.
      order: of an encoder: most_certain fills one mask after the other, first where the model is surest, and asks again
        each time, so that the parts of a word fit; left_to_right likewise in their order; at_once asks once for all.
        None: most_certain.
      max_new_tokens: of other models: of each span at most; None: 16.

    Raises:
      UserError: a text without a hole, with one that the model was not trained to fill in, or too long; a model that
        fills in nothing; options out of range, or that do nothing here.
    """
    _check_options(loaded, top, order, max_new_tokens)
    holes = Holes(loaded.tokenizer, text)
    if loaded.model.config.family == "encoder":
        return _fill_masks(loaded, holes, top, order or "most_certain")
    found = find_spans(loaded, holes, top, max_new_tokens or _SPAN)
    candidates = [tuple(Candidate(holes.spelled(ids).strip(), p) for ids, p in hole) for hole in found]
    return Filled(holes.filled([hole[0][0] for hole in found]), tuple(candidates))


def _check_options(loaded: LoadedModel, top: int, order: Optional[Order], max_new_tokens: Optional[int]) -> None:
    vocabulary, config = loaded.tokenizer.vocabulary, loaded.model.config
    check_language_model(loaded)
    if config.generator is None and not HEADS["lm"].is_in(config):
        raise UserError(
            f"{loaded.origin} is a discriminator, which says of each token whether it was replaced and fills in none: "
            "take its generator, or embed"
        )
    if config.family == "encoder" and vocabulary.mask is None:
        raise UserError(f"the tokenizer of {loaded.origin} has no mask, so there is nothing that it could fill in")
    most = vocabulary.size - len(vocabulary.special_ids)
    if not (isinstance(top, int) and 1 <= top <= most):
        raise UserError(f"top is {top!r}, it must be a whole number from 1 to {most:,}, the tokens that are text")
    if order is not None and order not in get_args(Order):
        raise UserError(f"order is {order!r}, it must be one of {', '.join(get_args(Order))}")
    if max_new_tokens is not None and not (isinstance(max_new_tokens, int) and max_new_tokens >= 1):
        raise UserError(f"max_new_tokens is {max_new_tokens!r}, it must be a whole number from 1")
    if config.family == "encoder" and max_new_tokens is not None:
        raise UserError(
            f"max_new_tokens is {max_new_tokens}, {loaded.origin} fills each mask with one token: leave it out"
        )
    if config.family != "encoder" and order is not None:
        raise UserError(f"order is {order!r}, {loaded.origin} fills holes from left to right: leave it out")


def _fill_masks(loaded: LoadedModel, holes: Holes, top: int, order: Order) -> Filled:
    """Fills each mask with one token, all of one pass of the model or each after those that were filled before."""
    holes.check_masks()
    row, places = _masked_row(loaded, holes)
    check_length(loaded, len(row), "the text")
    candidates: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # of each hole ids and probabilities, [top]
    while len(candidates) < len(holes):
        probabilities = _probabilities(loaded, row, places)
        still = [hole for hole in range(len(holes)) if hole not in candidates]
        if order == "most_certain":
            still = [max(still, key=lambda hole: probabilities[hole].max())]
        for hole in still[:1] if order == "left_to_right" else still:
            best = np.argsort(-probabilities[hole], kind="stable")[:top]
            candidates[hole] = best, probabilities[hole, best]
            row[places[hole]] = best[0]
    words, found = Words(loaded.tokenizer), []
    for hole, place in enumerate(places):
        pairs = zip(*(x.tolist() for x in candidates[hole]), strict=True)
        found.append(tuple(Candidate(_word(words, holes, row, place, i), p) for i, p in pairs))
    return Filled(holes.filled([[int(row[place])] for place in places]), tuple(found))


def _masked_row(loaded: LoadedModel, holes: Holes) -> tuple[np.ndarray, list[int]]:
    """Returns the row that the model reads, [t] int32, and where in it the masks are."""
    (before, after), places = frame_of(loaded), []
    first, *others = (part.tolist() for part in holes.ids())
    row = [*before, *first]
    for part in others:
        places.append(len(row))
        row += [loaded.tokenizer.vocabulary.mask, *part]
    return np.array([*row, *after], np.int32), places


def _probabilities(loaded: LoadedModel, row: np.ndarray, places: Sequence[int]) -> np.ndarray:
    """Returns how likely each id is at each place, [K, V] float32; 0 for special ones, which are no text."""
    vocabulary = loaded.tokenizer.vocabulary
    example = read_example(loaded, row) | {"masked_positions": np.array(places, np.int32)}
    ((_, batch),) = batches([example], loaded.mesh, longest(loaded), vocabulary.pad)
    logits = loaded.ask(_logits, batch)[0, : len(places), : vocabulary.size]  # [B, K', rows] -> [K, V]
    probabilities = np.array(jax.nn.softmax(logits, axis=-1))
    probabilities[:, list(vocabulary.special_ids)] = 0.0
    return probabilities


def _logits(outputs: Outputs, batch: Batch) -> jax.Array:
    return outputs.heads["lm"].logits()


def _word(words: Words, holes: Holes, row: np.ndarray, place: int, i: int) -> str:
    """Returns the word that `i` is or becomes a part of, at `place` of the row."""
    row = row.copy()
    row[place] = i
    edges = np.append(np.flatnonzero(words.starts(row)), len(row))
    number = np.searchsorted(edges, place, side="right")
    text = holes.spelled(row[edges[number - 1] : edges[number]].tolist())
    return text.strip() or text
