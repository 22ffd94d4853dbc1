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
from pretrainax.scoring.questions import causal_example, masked_example, start_token
from pretrainax.tokenization.base import Vocabulary

LEFT, BOTH = "the left side", "both sides"


class Ids(NamedTuple):
    """The ids of a span and of what stands on its sides, int32 [n] each; only those of `right` may be none."""

    left: np.ndarray
    span: np.ndarray
    right: np.ndarray
    is_start: bool = False  # `left` begins a document


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to ask for a span.

    `ask` returns examples whose weighted targets are together the ids of the span, and where `says_end` what tells by
    the model's own word that it ends.
    """

    given: str  # LEFT or BOTH
    marks: int  # ids of a row at most that are neither of the span nor of its sides
    says_end: bool  # the model says where the span ends; else it is asked for a number of tokens that it is told
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
        right = 0 if self.given == LEFT else min(len(ids.right), max(room // 2, room - len(ids.left)))
        left = ids.left[-(room - right) :]
        return Ids(left, ids.span, ids.right[:right], ids.is_start and len(left) == len(ids.left))


def forms_of(loaded: LoadedModel) -> list[Form]:
    """Returns the forms in which a model can be asked for a span; of several with the same sides given, the first.

    Raises:
      UserError: it was trained in none.
    """
    family, objective = loaded.experiment.model.family, loaded.experiment.objective
    if family == "encoder":
        forms = _of_encoder(loaded)
    else:
        parts = objective.bind(loaded.tokenizer).components()
        forms = (form for _, part in parts for form in _of_objective(part, loaded))
    by_given: dict[str, Form] = {}
    for form in forms:
        by_given.setdefault(form.given, form)
    if not by_given:
        raise UserError(
            f"{loaded.origin}, of the family {family} and trained by {type(objective).__name__}, cannot fill a span: "
            "that takes a decoder, an encoder with a masked language model, or an encoder-decoder that denoises"
        )
    return list(by_given.values())


def _of_encoder(loaded: LoadedModel) -> Iterator[Form]:
    model, vocabulary = loaded.experiment.model, loaded.tokenizer.vocabulary
    says_tokens = not model.replaced_token_head or model.generator is not None
    if says_tokens and None not in (vocabulary.mask, vocabulary.cls, vocabulary.sep):
        yield Form(BOTH, 2, False, lambda ids: _masked(ids, vocabulary))


def _of_objective(part: Objective, loaded: LoadedModel) -> Iterator[Form]:
    vocabulary = loaded.tokenizer.vocabulary
    objective = part.objective if isinstance(part, DecoderOnly) else part
    if isinstance(objective, SpanCorruption):
        yield Form(BOTH, objective.room + 6, True, lambda ids: [_corrupted(ids, part, objective, vocabulary)])
    elif isinstance(objective, SequentialDenoising):
        yield Form(LEFT, objective.room + 1, False, lambda ids: [_continued(ids, part, objective, vocabulary)])
    elif isinstance(objective, Denoising) and objective.infilling_rate:
        yield Form(BOTH, 3, True, lambda ids: [_rewritten(ids, part, vocabulary)])
    elif isinstance(objective, FillInTheMiddle):
        yield Form(BOTH, 4, True, lambda ids: [_in_the_middle(ids, objective.spm_rate == 1, vocabulary)])
        if objective.fim_rate < 1:
            yield _causal_form(loaded)
    elif isinstance(objective, CausalLM):
        yield _causal_form(loaded, isinstance(objective, PrefixLM))


def _causal_form(loaded: LoadedModel, sees_prefix: bool = False) -> Form:
    start, separator = start_token(loaded), loaded.tokenizer.vocabulary.separator

    def ask(ids: Ids) -> list[Example]:
        # A separator stands before a document, another start before all that such a model has ever read.
        stands = start is not None and (ids.is_start or start != separator)
        return [causal_example(_joined([start] if stands else [], ids.left), ids.span, sees_prefix)]

    return Form(LEFT, 1, False, ask)


# --- examples of each form ------------------------------------------------------------------------------------------


def _joined(*parts: Sequence[Optional[int]] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def _masked(ids: Ids, vocabulary: Vocabulary) -> list[Example]:
    """Asks for one token after the other: those of the span before it are there, it and those after it are masks."""
    whole = _joined([vocabulary.cls], *ids[:3], [vocabulary.sep])
    start, end = 1 + len(ids.left), 1 + len(ids.left) + len(ids.span)
    return [masked_example(whole, place, end, vocabulary.mask) for place in range(start, end)]


def _in_the_middle(ids: Ids, suffix_first: bool, vocabulary: Vocabulary) -> Example:
    """Asks for the middle, which ends with the end of a text."""
    before, after, between = ([i] for i in vocabulary.sentinels[:3])
    if suffix_first:
        context = _joined(before, after, ids.right, between, ids.left)
    else:
        context = _joined(before, ids.left, after, ids.right, between)
    return causal_example(context, _joined(ids.span, [vocabulary.separator]))


def _corrupted(ids: Ids, part: Objective, objective: SpanCorruption, vocabulary: Vocabulary) -> Example:
    """Asks for what the first sentinel of a source stands for, and for the second one, which ends it.

    In training a text always ends with a span, so here too: a second one, of which nothing is asked, stands for what
    follows.
    """
    tokens = _joined(*ids[:3], [vocabulary.eos])
    dropped = np.zeros(len(tokens), bool)
    dropped[len(ids.left) : len(ids.left) + len(ids.span)] = dropped[-1] = True
    inputs, targets = corrupt(tokens, dropped, vocabulary)
    return _answering(objective.read_first(inputs), targets, slice(1, len(ids.span) + 2), part, vocabulary)


def _continued(ids: Ids, part: Objective, objective: SequentialDenoising, vocabulary: Vocabulary) -> Example:
    """Asks for how a text goes on."""
    inputs = objective.read_first(_joined(ids.left, [vocabulary.eos]))
    return _answering(inputs, ids.span, slice(None), part, vocabulary)


def _rewritten(ids: Ids, part: Objective, vocabulary: Vocabulary) -> Example:
    """Asks for the text with the span in it, from where the span begins to its end, which tells where the span ends."""
    bos, eos = [vocabulary.bos], [vocabulary.eos]
    inputs, targets = _joined(bos, ids.left, [vocabulary.mask], ids.right, eos), _joined(bos, *ids[:3], eos)
    return _answering(inputs, targets, slice(1 + len(ids.left), None), part, vocabulary)


def _answering(
    inputs: np.ndarray, targets: np.ndarray, asked: slice, part: Objective, vocabulary: Vocabulary
) -> Example:
    """Returns the example in which a model of two stacks, or a decoder trained like one, is asked for some targets."""
    start = part.decoder_start(vocabulary)
    example = encoder_decoder_example(inputs, targets, start=0 if start is None else start)  # a decoder reads none
    example["loss_weights"] = np.zeros(len(targets), np.float32)
    example["loss_weights"][asked] = 1
    return end_to_end(example) if isinstance(part, DecoderOnly) else example
