"""Converts a span to examples in the training format of a model, whose weighted targets predict the span.

`span_formats` returns the formats that a model supports, which depend on its family and its training objective. A
format builds examples from the token ids of a span and of its context. The sum of the log-probabilities of the weighted
targets is the log-probability of the span.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example
from pretrainax.data.framing import special_token_frame
from pretrainax.data.leading_tokens import leading_token_ids
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
from pretrainax.data.sources import NoSource
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.scoring_examples import causal_example, masked_example
from pretrainax.tasks import WritingTask
from pretrainax.tokenization.base import Vocabulary
from pretrainax.tokenization.frames import SpecialTokenFrame

LEFT, BOTH = "the left side", "both sides"


class Ids(NamedTuple):
    """The token ids of a span and of its left and right context, int32 [n] each.

    `left` has at least one id. `right` may be empty, and `span` if the tokenizer drops all of its characters.
    """

    left: np.ndarray
    span: np.ndarray
    right: np.ndarray
    is_start: bool = False  # True if `left` is the start of a document


@dataclasses.dataclass(frozen=True)
class SpanFormat:
    """A format in which a model predicts a span.

    `examples_for` builds the examples of a span. The targets with weight 1 are the token ids of the span, followed by
    the tokens that end the span if `predicts_end` is True. `longest` is the length in tokens of the longest span in
    training; None means unknown or unlimited.
    """

    given: str  # context that the model reads: LEFT or BOTH
    num_special_tokens: int  # maximum number of token ids in an input in addition to the span and its context
    predicts_end: bool  # True: the model predicts the end of the span; False: the model is given the number of tokens
    examples_for: Callable[[Ids], list[Example]]
    longest: Optional[int] = None

    def fitted(self, ids: Ids, longest: int) -> Ids:
        """Truncates the context in `ids` so that an input has at most `longest` token ids.

        The result has the part of the context that is closest to the span.

        Raises:
          UserError: `longest` is too small for the span and one token of each context that the format reads.
        """
        capacity = longest - self.num_special_tokens - len(ids.span)
        num_contexts = 1 + (self.given == BOTH)
        if capacity < num_contexts:
            raise UserError(
                f"a span of {len(ids.span)} tokens leaves no room for its context in the {longest} tokens that the "
                "model reads: use shorter spans (mean_bytes)"
            )
        right = 0 if self.given == LEFT else min(len(ids.right), max(capacity // 2, capacity - len(ids.left)))
        left = ids.left[-(capacity - right) :]
        return Ids(left, ids.span, ids.right[:right], ids.is_start and len(left) == len(ids.left))


def span_formats(loaded: LoadedModel) -> list[SpanFormat]:
    """Returns the formats in which a model can predict a span: at most one for each context, LEFT or BOTH.

    If a model supports several formats with the same context, only the first one is returned.

    Raises:
      UserError: the model supports no format.
    """
    family, objective = loaded.experiment.model.family, loaded.experiment.objective
    if family == "encoder":
        forms = _encoder_forms(loaded)
    else:
        components = objective.bind(loaded.tokenizer).components()
        forms = (form for _, component in components for form in _objective_forms(component, loaded))
    by_given: dict[str, SpanFormat] = {}
    for form in forms:
        by_given.setdefault(form.given, form)
    if not by_given:
        raise UserError(
            f"{loaded.origin}, of the family {family} and trained by {type(objective).__name__}, cannot fill a span: "
            "use a decoder, an encoder with a masked language model, or an encoder-decoder with a denoising objective"
        )
    return list(by_given.values())


def _encoder_forms(loaded: LoadedModel) -> Iterator[SpanFormat]:
    model, vocabulary = loaded.experiment.model, loaded.tokenizer.vocabulary
    predicts_tokens = not model.replaced_token_head or model.generator is not None
    has_frame = vocabulary.frame is not None or None not in (vocabulary.cls, vocabulary.sep)
    if predicts_tokens and vocabulary.mask is not None and has_frame:
        frame = special_token_frame(model.family, vocabulary)
        yield SpanFormat(BOTH, frame.count(1), False, lambda ids: _masked_examples(ids, frame, vocabulary))


def _objective_forms(component: Objective, loaded: LoadedModel) -> Iterator[SpanFormat]:
    vocabulary = loaded.tokenizer.vocabulary
    objective = component.objective if isinstance(component, DecoderOnly) else component
    is_decoder = loaded.experiment.model.family == "decoder"
    if isinstance(objective, SpanCorruption):
        yield SpanFormat(
            BOTH,
            objective.mode_tokens + 6,
            True,
            lambda ids: [_span_corruption_example(ids, component, objective, vocabulary)],
            _longest_span(loaded),
        )
    elif isinstance(objective, SequentialDenoising):
        yield SpanFormat(
            LEFT,
            objective.mode_tokens + 1,
            False,
            lambda ids: [_continuation_example(ids, component, objective, vocabulary)],
        )
    elif isinstance(objective, Denoising) and objective.infilling_rate:
        yield SpanFormat(BOTH, 3, True, lambda ids: [_denoising_example(ids, component, vocabulary)])
    elif isinstance(objective, FillInTheMiddle):
        yield SpanFormat(BOTH, 4, True, lambda ids: [_fill_in_middle_example(ids, objective, vocabulary)])
        if objective.fim_rate < 1:
            yield _causal_form(loaded)
    elif isinstance(objective, CausalLM) or isinstance(objective, WritingTask) and is_decoder:
        yield _causal_form(loaded, isinstance(objective, PrefixLM))


def _longest_span(loaded: LoadedModel) -> Optional[int]:
    """Returns the length in tokens of the longest span that the denoisers of a run predict; None for imported models.

    The corruption removes a fixed number of tokens from a sequence, for example 10 of 64 tokens. A model that was
    trained on such sequences (T5) has never predicted a longer span.
    """
    data = loaded.experiment.data
    if isinstance(data.source, NoSource):
        return None
    denoisers = [part for _, part in loaded.experiment.objective.components() if isinstance(part, SpanCorruption)]
    counts = [denoiser.noise(data.sequence_length) for denoiser in denoisers]
    return max((noise.tokens - noise.spans + 1 for noise in counts), default=None)  # each other span has one token


def _causal_form(loaded: LoadedModel, sees_prefix: bool = False) -> SpanFormat:
    experiment, vocabulary = loaded.experiment, loaded.tokenizer.vocabulary

    def examples_for(ids: Ids) -> list[Example]:
        before = leading_token_ids(experiment, vocabulary, is_needed=not len(ids.left))
        # In training, a separator precedes each document, but a BOS token precedes each sequence.
        has_start = ids.is_start or before != [vocabulary.separator]
        return [causal_example(_concatenate(before if has_start else [], ids.left), ids.span, sees_prefix)]

    return SpanFormat(LEFT, len(leading_token_ids(experiment, vocabulary, is_needed=True)), False, examples_for)


# --- examples of each form ------------------------------------------------------------------------------------------


def _concatenate(*arrays: Sequence[Optional[int]] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(array, np.int32) for array in arrays])


def _masked_examples(ids: Ids, frame: SpecialTokenFrame, vocabulary: Vocabulary) -> list[Example]:
    """Builds one example per token of the span; each example predicts its token.

    The predicted token and all later tokens of the span are masked. All other tokens are visible.
    """
    row, start = frame.wrap([_concatenate(*ids[:3])])[0], len(frame.single.before) + len(ids.left)
    end = start + len(ids.span)
    return [masked_example(row, position, end, vocabulary.mask) for position in range(start, end)]


def _fill_in_middle_example(ids: Ids, objective: FillInTheMiddle, vocabulary: Vocabulary) -> Example:
    """Builds a fill-in-the-middle example: it predicts the span, followed by the vocabulary's separator token."""
    context = objective.context(ids.left, ids.right, vocabulary)
    return causal_example(context, _concatenate(ids.span, [vocabulary.separator]))


def _span_corruption_example(
    ids: Ids, component: Objective, objective: SpanCorruption, vocabulary: Vocabulary
) -> Example:
    """Builds a span-corruption example: it predicts the span, and the second sentinel, which ends the span.

    In training, a text always ends with a removed span. Therefore the EOS token is also removed here, as a second span
    with weight 0.
    """
    tokens = _concatenate(*ids[:3], [vocabulary.eos])
    is_removed = np.zeros(len(tokens), bool)
    is_removed[len(ids.left) : len(ids.left) + len(ids.span)] = is_removed[-1] = True
    inputs, targets = corrupt(tokens, is_removed, vocabulary)
    return _weighted_example(
        objective.prepend_mode(inputs), targets, slice(1, len(ids.span) + 2), component, vocabulary
    )


def _continuation_example(
    ids: Ids, component: Objective, objective: SequentialDenoising, vocabulary: Vocabulary
) -> Example:
    """Builds an example of sequential denoising: it predicts the span as the continuation of the left context."""
    inputs = objective.prepend_mode(_concatenate(ids.left, [vocabulary.eos]))
    return _weighted_example(inputs, ids.span, slice(None), component, vocabulary)


def _denoising_example(ids: Ids, component: Objective, vocabulary: Vocabulary) -> Example:
    """Builds a denoising example (BART): it predicts the text from the start of the span to EOS.

    The predicted right context marks the end of the span.
    """
    bos, eos = [vocabulary.bos], [vocabulary.eos]
    inputs, targets = _concatenate(bos, ids.left, [vocabulary.mask], ids.right, eos), _concatenate(bos, *ids[:3], eos)
    return _weighted_example(inputs, targets, slice(1 + len(ids.left), None), component, vocabulary)


def _weighted_example(
    inputs: np.ndarray, targets: np.ndarray, weighted: slice, component: Objective, vocabulary: Vocabulary
) -> Example:
    """Builds an encoder-decoder example with weight 1 for the targets in `weighted`, and weight 0 for all others.

    For the objective `DecoderOnly`, the example is converted to a decoder example.

    Args:
      inputs, targets: token ids that the encoder reads, and token ids that the decoder predicts.
      component: the training objective, or the component of a mixture of objectives.
    """
    start = component.decoder_start(vocabulary)
    example = encoder_decoder_example(inputs, targets, start=0 if start is None else start)  # DecoderOnly drops start
    example["loss_weights"] = np.zeros(len(targets), np.float32)
    example["loss_weights"][weighted] = 1
    return to_decoder_example(example) if isinstance(component, DecoderOnly) else example
