"""Converts a span to examples in the training format of a model: model inputs, and targets that predict the span.

`forms_of` returns the formats of a model, which depend on its family and its training objective. A form creates
examples from the ids of a span and the ids of its context. The sum of the log-probabilities of the weighted targets is
the log-probability of the span.
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
from pretrainax.data.objectives.prefix import to_decoder_example
from pretrainax.data.objectives.spans import corrupt, encoder_decoder_example
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.scoring_examples import causal_example, masked_example, start_token
from pretrainax.tokenization.base import Vocabulary

LEFT, BOTH = "the left side", "both sides"


class Ids(NamedTuple):
    """The token ids of a span and of its left and right context, int32 [n] each.

    `left` and `span` have at least one id; `right` may be empty.
    """

    left: np.ndarray
    span: np.ndarray
    right: np.ndarray
    is_start: bool = False  # True if a document begins with `left`


@dataclasses.dataclass(frozen=True)
class Form:
    """A format in which a model predicts a span.

    `examples_for` returns examples. The targets with weight 1 are the ids of the span, followed by the token that ends
    the span if `predicts_end` is True.
    """

    given: str  # context that the model reads: LEFT or BOTH
    marks: int  # maximum number of ids in a row in addition to the span and its context
    predicts_end: bool  # True: the model predicts the end of the span; False: it gets the number of tokens
    examples_for: Callable[[Ids], list[Example]]

    def fitted(self, ids: Ids, longest: int) -> Ids:
        """Returns `ids` with the context truncated so that a row has at most `longest` ids.

        The context next to the span remains.

        Raises:
          UserError: the span leaves no room for one token of context on each side that the form reads.
        """
        room = longest - self.marks - len(ids.span)
        sides = 1 + (self.given == BOTH)
        if room < sides:
            raise UserError(
                f"a span of {len(ids.span)} tokens leaves no room for its context in the {longest} tokens that the "
                "model reads: use shorter spans (mean_bytes)"
            )
        right = 0 if self.given == LEFT else min(len(ids.right), max(room // 2, room - len(ids.left)))
        left = ids.left[-(room - right) :]
        return Ids(left, ids.span, ids.right[:right], ids.is_start and len(left) == len(ids.left))


def forms_of(loaded: LoadedModel) -> list[Form]:
    """Returns the forms in which a model can predict a span, at most one for each value of `given`.

    If a model supports several forms with the same context, the first one is used.

    Raises:
      UserError: the model supports no form.
    """
    family, objective = loaded.experiment.model.family, loaded.experiment.objective
    if family == "encoder":
        forms = _encoder_forms(loaded)
    else:
        parts = objective.bind(loaded.tokenizer).components()
        forms = (form for _, part in parts for form in _objective_forms(part, loaded))
    by_given: dict[str, Form] = {}
    for form in forms:
        by_given.setdefault(form.given, form)
    if not by_given:
        raise UserError(
            f"{loaded.origin}, of the family {family} and trained by {type(objective).__name__}, cannot fill a span: "
            "use a decoder, an encoder with a masked language model, or an encoder-decoder with a denoising objective"
        )
    return list(by_given.values())


def _encoder_forms(loaded: LoadedModel) -> Iterator[Form]:
    model, vocabulary = loaded.experiment.model, loaded.tokenizer.vocabulary
    predicts_tokens = not model.replaced_token_head or model.generator is not None
    if predicts_tokens and None not in (vocabulary.mask, vocabulary.cls, vocabulary.sep):
        yield Form(BOTH, 2, False, lambda ids: _masked(ids, vocabulary))


def _objective_forms(part: Objective, loaded: LoadedModel) -> Iterator[Form]:
    vocabulary = loaded.tokenizer.vocabulary
    objective = part.objective if isinstance(part, DecoderOnly) else part
    if isinstance(objective, SpanCorruption):
        yield Form(
            BOTH, objective.mode_tokens + 6, True, lambda ids: [_span_corruption(ids, part, objective, vocabulary)]
        )
    elif isinstance(objective, SequentialDenoising):
        yield Form(
            LEFT, objective.mode_tokens + 1, False, lambda ids: [_continuation(ids, part, objective, vocabulary)]
        )
    elif isinstance(objective, Denoising) and objective.infilling_rate:
        yield Form(BOTH, 3, True, lambda ids: [_denoising(ids, part, vocabulary)])
    elif isinstance(objective, FillInTheMiddle):
        yield Form(BOTH, 4, True, lambda ids: [_fill_in_middle(ids, objective.spm_rate == 1, vocabulary)])
        if objective.fim_rate < 1:
            yield _causal_form(loaded)
    elif isinstance(objective, CausalLM):
        yield _causal_form(loaded, isinstance(objective, PrefixLM))


def _causal_form(loaded: LoadedModel, sees_prefix: bool = False) -> Form:
    start, separator = start_token(loaded), loaded.tokenizer.vocabulary.separator

    def examples_for(ids: Ids) -> list[Example]:
        # In training, a separator is before each document, but a BOS token is before each row.
        has_start = start is not None and (ids.is_start or start != separator)
        return [causal_example(_joined([start] if has_start else [], ids.left), ids.span, sees_prefix)]

    return Form(LEFT, 1, False, examples_for)


# --- examples of each form ------------------------------------------------------------------------------------------


def _joined(*parts: Sequence[Optional[int]] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def _masked(ids: Ids, vocabulary: Vocabulary) -> list[Example]:
    """Returns an example for each token of the span, which predicts this token.

    The input has masks for the predicted token and all later tokens of the span. All other tokens are visible.
    """
    whole = _joined([vocabulary.cls], *ids[:3], [vocabulary.sep])
    start, end = 1 + len(ids.left), 1 + len(ids.left) + len(ids.span)
    return [masked_example(whole, position, end, vocabulary.mask) for position in range(start, end)]


def _fill_in_middle(ids: Ids, suffix_first: bool, vocabulary: Vocabulary) -> Example:
    """Returns an example that predicts the span between the two contexts, and the end-of-text token after it.

    Args:
      suffix_first: True if the right context is before the left context in the input, as in training.
    """
    before, after, between = ([i] for i in vocabulary.sentinels[:3])
    if suffix_first:
        context = _joined(before, after, ids.right, between, ids.left)
    else:
        context = _joined(before, ids.left, after, ids.right, between)
    return causal_example(context, _joined(ids.span, [vocabulary.separator]))


def _span_corruption(ids: Ids, part: Objective, objective: SpanCorruption, vocabulary: Vocabulary) -> Example:
    """Returns an example that predicts the span at the first sentinel, and the second sentinel, which ends the span.

    In training, a text always ends with a removed span. Therefore the EOS token is also removed here, as a second span
    whose tokens have weight 0.
    """
    tokens = _joined(*ids[:3], [vocabulary.eos])
    is_removed = np.zeros(len(tokens), bool)
    is_removed[len(ids.left) : len(ids.left) + len(ids.span)] = is_removed[-1] = True
    inputs, targets = corrupt(tokens, is_removed, vocabulary)
    return _weighted(objective.read_first(inputs), targets, slice(1, len(ids.span) + 2), part, vocabulary)


def _continuation(ids: Ids, part: Objective, objective: SequentialDenoising, vocabulary: Vocabulary) -> Example:
    """Returns an example of sequential denoising: it predicts the span as the continuation of the left context."""
    inputs = objective.read_first(_joined(ids.left, [vocabulary.eos]))
    return _weighted(inputs, ids.span, slice(None), part, vocabulary)


def _denoising(ids: Ids, part: Objective, vocabulary: Vocabulary) -> Example:
    """Returns an example that predicts the text from the start of the span to EOS.

    The text after the span marks the end of the span.
    """
    bos, eos = [vocabulary.bos], [vocabulary.eos]
    inputs, targets = _joined(bos, ids.left, [vocabulary.mask], ids.right, eos), _joined(bos, *ids[:3], eos)
    return _weighted(inputs, targets, slice(1 + len(ids.left), None), part, vocabulary)


def _weighted(
    inputs: np.ndarray, targets: np.ndarray, weighted: slice, part: Objective, vocabulary: Vocabulary
) -> Example:
    """Returns an encoder-decoder example with weight 1 for the targets in `weighted`, and weight 0 for the rest.

    For the objective `DecoderOnly`, the example is converted to a decoder example.

    Args:
      inputs, targets: ids that the encoder reads, and ids that the decoder predicts.
      part: the training objective.
    """
    start = part.decoder_start(vocabulary)
    example = encoder_decoder_example(inputs, targets, start=0 if start is None else start)  # DecoderOnly drops start
    example["loss_weights"] = np.zeros(len(targets), np.float32)
    example["loss_weights"][weighted] = 1
    return to_decoder_example(example) if isinstance(part, DecoderOnly) else example
