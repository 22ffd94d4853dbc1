"""Asks a model for a span in the form that it was trained in: which rows it reads, and what it is to say where.

`forms_of` looks at the family of a model and at its objective. A form gives, for the ids of a span and of its
surroundings, the rows whose log-probabilities add up to that of the span.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example
from pretrainax.data.objectives import (
    CausalLM,
    DecoderOnly,
    Denoising,
    FillInTheMiddle,
    Objective,
    PrefixLM,
    SequentialDenoising,
    SpanCorruption,
)
from pretrainax.data.objectives.prefix import end_to_end
from pretrainax.data.objectives.spans import corrupt, encoder_decoder_example
from pretrainax.inference.loaded import LoadedModel
from pretrainax.tokenization.base import Vocabulary

LEFT, BOTH = "left side", "both sides"


class Ids(NamedTuple):
    """The ids of a span and of what stands on its sides, int32 [n] each; only those of `right` may be none."""

    left: np.ndarray
    span: np.ndarray
    right: np.ndarray


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to ask for a span.

    `ask` returns rows, as data/batch.py describes them but for the axis of rows, each with `masked_positions` [n], the
    places in `tokens` where it is asked, and `targets` [n], the ids whose probabilities there count. In all rows of a
    span together they are its ids one after the other, and then those by which the model says where the span ends.
    """

    given: str  # LEFT or BOTH
    marks: int  # ids of a row at most that are neither of the span nor of its sides
    says_end: bool  # the model says where the span ends; else it is asked for a number of tokens that somebody tells
    ask: Callable[[Ids], list[Example]]

    def fitted(self, ids: Ids, longest: int) -> Ids:
        """Returns `ids` with no more of the sides than there is room for in a row of `longest`; what is near stays.

        Raises:
          UserError: a span that leaves no room for a token on each side.
        """
        room = longest - self.marks - len(ids.span)
        sides = 1 + (self.given == BOTH)
        if room < sides:
            raise UserError(
                f"a span of {len(ids.span)} tokens leaves no room for its surroundings in the {longest} tokens that "
                "the model reads: ask for shorter spans (mean_bytes)"
            )
        if self.given == LEFT:
            return Ids(ids.left[-room:], ids.span, ids.right[:0])
        right = min(len(ids.right), max(room // 2, room - len(ids.left)))
        return Ids(ids.left[-(room - right) :], ids.span, ids.right[:right])


def forms_of(loaded: LoadedModel) -> list[Form]:
    """Returns the forms in which a model can be asked for a span, of several with the same sides given the first.

    Raises:
      UserError: it was trained in none.
    """
    vocabulary, family = loaded.tokenizer.vocabulary, loaded.experiment.model.family
    if family == "encoder":
        forms = _of_encoder(loaded, vocabulary)
    else:
        objective = loaded.experiment.objective.bind(loaded.tokenizer)
        forms = (form for _, part in objective.components() for form in _of_objective(part, vocabulary))
    by_given: dict[str, Form] = {}
    for form in forms:
        by_given.setdefault(form.given, form)
    if not by_given:
        raise UserError(
            f"{loaded.origin} is a model of the family {family} trained by {type(loaded.experiment.objective).__name__}"
            ", which fills no spans: --bytes-of-spans takes decoders, encoders with a masked language model, and "
            "encoder-decoders trained to denoise"
        )
    return list(by_given.values())


def _of_encoder(loaded: LoadedModel, vocabulary: Vocabulary) -> Iterator[Form]:
    model = loaded.experiment.model
    has_head = not model.replaced_token_head or model.generator is not None
    if has_head and None not in (vocabulary.mask, vocabulary.cls, vocabulary.sep):
        yield Form(BOTH, 2, False, lambda ids: _masked(ids, vocabulary))


def _of_objective(objective: Objective, vocabulary: Vocabulary) -> Iterator[Form]:
    decoder_only = isinstance(objective, DecoderOnly)
    denoiser = objective.objective if decoder_only else objective
    laid = end_to_end if decoder_only else dict
    if isinstance(denoiser, SpanCorruption):
        yield Form(BOTH, denoiser.room + 7, True, lambda ids: [laid(_corrupted(ids, denoiser, vocabulary))])
    elif isinstance(denoiser, SequentialDenoising):
        yield Form(LEFT, denoiser.room + 2, False, lambda ids: [laid(_continued(ids, denoiser, vocabulary))])
    elif isinstance(denoiser, Denoising) and denoiser.infilling_rate:
        yield Form(BOTH, 3, True, lambda ids: [_rewritten(ids, denoiser, vocabulary)])
    elif isinstance(denoiser, FillInTheMiddle):
        suffix_first = denoiser.spm_rate == 1
        yield Form(BOTH, 4, True, lambda ids: [_in_the_middle(ids, suffix_first, vocabulary)])
        if denoiser.fim_rate < 1:
            yield Form(LEFT, 0, False, lambda ids: [_causal(ids.left, ids.span)])
    elif isinstance(denoiser, CausalLM):
        sees_prefix = isinstance(denoiser, PrefixLM)
        yield Form(LEFT, 0, False, lambda ids: [_causal(ids.left, ids.span, sees_prefix)])


# --- rows of each form ----------------------------------------------------------------------------------------------


def _row(tokens: np.ndarray, places: Sequence[int], targets: np.ndarray, **others: np.ndarray) -> Example:
    asked = {"masked_positions": np.asarray(places, np.int32), "targets": np.asarray(targets, np.int32)}
    segments, positions = np.ones(len(tokens), np.int32), np.arange(len(tokens), dtype=np.int32)
    return {"tokens": tokens, "segment_ids": segments, "positions": positions, **asked, **others}


def _joined(*parts: Sequence[Optional[int]] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def _masked(ids: Ids, vocabulary: Vocabulary) -> list[Example]:
    """Asks for one token after the other: those of the span before it are there, it and those after it are masks."""
    rows = []
    for n, target in enumerate(ids.span.tolist()):
        masks = [vocabulary.mask] * (len(ids.span) - n)
        tokens = _joined([vocabulary.cls], ids.left, ids.span[:n], masks, ids.right, [vocabulary.sep])
        place = 1 + len(ids.left) + n
        rows.append(_row(tokens, [place], np.array([target]), token_types=np.zeros(len(tokens), np.int32)))
    return rows


def _causal(before: np.ndarray, answer: np.ndarray, sees_prefix: bool = False) -> Example:
    """Asks for `answer` after `before`, which is seen from both sides where the model is a prefix LM."""
    tokens = _joined(before, answer)[:-1]
    places = np.arange(len(before) - 1, len(tokens))
    others = {"prefix_mask": (np.arange(len(tokens)) < len(before)).astype(np.int32)} if sees_prefix else {}
    return _row(tokens, places, answer, **others)


def _in_the_middle(ids: Ids, suffix_first: bool, vocabulary: Vocabulary) -> Example:
    """Asks for the middle, which ends with the end of a text."""
    before, after, between = ([i] for i in vocabulary.sentinels[:3])
    if suffix_first:
        context = _joined(before, after, ids.right, between, ids.left)
    else:
        context = _joined(before, ids.left, after, ids.right, between)
    return _causal(context, _joined(ids.span, [vocabulary.separator]))


def _corrupted(ids: Ids, objective: SpanCorruption, vocabulary: Vocabulary) -> Example:
    """Asks for what the first sentinel of a source stands for, and for the second one, which ends it.

    In training a text always ends with a span. So does this one: a second span, of which nothing is asked, stands for
    what follows.
    """
    tokens = _joined(*ids, [vocabulary.eos])
    dropped = np.zeros(len(tokens), bool)
    dropped[len(ids.left) : len(ids.left) + len(ids.span)] = dropped[-1] = True
    inputs, targets = corrupt(tokens, dropped, vocabulary)
    count = len(ids.span) + 1
    return _answering(objective.read_first(inputs), targets, slice(1, 1 + count), objective, vocabulary)


def _continued(ids: Ids, objective: SequentialDenoising, vocabulary: Vocabulary) -> Example:
    """Asks for how a text goes on."""
    inputs = objective.read_first(_joined(ids.left, [vocabulary.eos]))
    return _answering(inputs, ids.span, slice(0, len(ids.span)), objective, vocabulary)


def _rewritten(ids: Ids, objective: Denoising, vocabulary: Vocabulary) -> Example:
    """Asks for the text with the span in it, from where the span begins to its end: so it tells where the span ends."""
    bos, eos = [vocabulary.bos], [vocabulary.eos]
    inputs = _joined(bos, ids.left, [vocabulary.mask], ids.right, eos)
    targets = _joined(bos, *ids, eos)
    return _answering(inputs, targets, slice(1 + len(ids.left), len(targets)), objective, vocabulary)


def _answering(
    inputs: np.ndarray, targets: np.ndarray, asked: slice, objective: Objective, vocabulary: Vocabulary
) -> Example:
    """Returns a row of an encoder-decoder that is asked for some of its targets."""
    start = objective.decoder_start(vocabulary)
    row = encoder_decoder_example(inputs, targets, start=0 if start is None else start)  # DecoderOnly reads no start
    places = np.arange(len(targets), dtype=np.int32)[asked]
    return {**row, "masked_positions": places, "targets": targets[asked]}
