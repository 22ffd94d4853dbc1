"""Fills holes with spans of any length by beam search, with T5, BART, or a decoder trained to fill in the middle.

The training objective determines the token that ends a span: the sentinel of the next span (T5), the next token of the
given text (BART), or the end-of-text token (fill in the middle). The score of a span includes this end token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example, has_prefix, is_encoder_decoder
from pretrainax.data.leading_tokens import leading_token_ids
from pretrainax.data.objectives import DecoderOnly, Denoising, FillInTheMiddle, Objective, SpanCorruption
from pretrainax.inference.beam_search import BeamSequences
from pretrainax.inference.constraints import FORBIDDEN, Automaton
from pretrainax.inference.decoding import Generator, stepping_params
from pretrainax.inference.framing import (
    check_length,
    find_objective,
    max_input_length,
    objective_prompt,
)
from pretrainax.inference.holes import Holes, with_marks
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.rows import batches, bucket
from pretrainax.inference.sampling import Rules
from pretrainax.sharding.arrays import put_batch

_MIN_BEAMS = 8  # minimum number of beams

Ids: TypeAlias = list[int]


class SpanPrompt(NamedTuple):
    """The model input whose continuation is the span in the next hole, and the token id that ends this span."""

    example: Example
    end: int


Ask: TypeAlias = Callable[[Sequence[Ids]], SpanPrompt]  # builds a prompt from the token ids of the previous spans


def find_spans(loaded: LoadedModel, holes: Holes, top: int, longest_span: int) -> list[list[tuple[Ids, float]]]:
    """Finds the `top` most likely spans for each hole, best first, as pairs of token ids and probability.

    Holes are filled from left to right. When a hole is filled, the holes before it already contain
    their most likely spans.

    Args:
      top: maximum number of spans per hole.
      longest_span: maximum number of tokens per span.

    Raises:
      UserError: the model was not trained to fill these holes, or the text is too long.
    """
    build_prompt, spans, tokens = _prompt_builder(loaded, holes), [], sum(map(len, holes.ids()))
    while len(spans) < len(holes):
        example, end = build_prompt([candidates[0][0] for candidates in spans])
        length = len(example["encoder_tokens" if is_encoder_decoder(example) else "tokens"])
        check_length(loaded, length, "the text", special=length - tokens)
        sequences = _find_continuations(loaded, example, end, max(top, _MIN_BEAMS), longest_span + 1)
        beams = zip(sequences.tokens[0], sequences.scores[0], sequences.lengths[0], strict=True)
        spans.append([(ids[: n - 1].tolist(), float(np.exp(score))) for ids, score, n in beams if n][:top])
    return spans


def _find_continuations(loaded: LoadedModel, example: Example, end: int, beams: int, limit: int) -> BeamSequences:
    """Finds the most likely continuations of a prompt that end with the token id `end`, by beam search.

    Apart from `end`, a continuation contains no special tokens.

    Args:
      limit: maximum number of tokens per continuation, including `end`.
    """
    vocabulary, max_length = loaded.tokenizer.vocabulary, max_input_length(loaded)
    if max_length is not None:
        limit = min(limit, max_length - len(example["tokens"]) + 1)  # the model never reads the last generated token
    if limit < 1:
        raise UserError(f"the text leaves no room to write in the {max_length:,} tokens of {loaded.origin}: shorten it")
    rules = _span_rules(end, limit, loaded)
    ((_, batch),) = batches([example], loaded.mesh, max_length, vocabulary.pad)
    limits = np.full(len(batch["tokens"]), limit, np.int32)
    generator, params, capacity = (
        loaded.cached_across_checkpoints(Generator),
        loaded.keep(stepping_params),
        bucket(limit),
    )
    with jax.set_mesh(loaded.mesh):
        search = generator.begin_search(
            params, put_batch(batch, loaded.mesh), rules, 0.0, limits, beams=beams, room=capacity
        )
        search = generator.search_on(params, search, rules, 0.0, capacity)
    return jax.device_get(search.finished)


def _span_rules(end: int, limit: int, loaded: LoadedModel) -> Rules:
    """Returns the generation rules for a span, which consists of ordinary tokens followed by the token id `end`.

    Args:
      limit: maximum number of tokens, including `end`.
    """
    vocabulary, rows = loaded.tokenizer.vocabulary, loaded.experiment.model.vocab_size
    allowed = np.arange(rows) < vocabulary.size
    allowed[list(vocabulary.special_ids)] = False
    count = np.arange(limit, dtype=np.int32)[:, None]  # the state is the number of tokens generated so far
    moves = np.where(allowed & (count < limit - 1), count + 1, np.int32(FORBIDDEN))
    moves[:, end], allowed[end] = 0, True
    return Rules(jnp.asarray(allowed), jnp.array([end], jnp.int32), (Automaton(jnp.asarray(moves)),))


# --- model inputs -----------------------------------------------------------------------------------------------------


def _prompt_builder(loaded: LoadedModel, holes: Holes) -> Ask:
    """Returns a function that builds the model input for each hole, in the format of the training objective."""
    objective = _span_objective(loaded)
    if objective is not None:
        return _sentinel_prompts(loaded, holes, objective)
    if (denoising := find_objective(loaded, Denoising)) is not None:
        return _mask_prompts(loaded, holes, denoising)
    if (middle := find_objective(loaded, FillInTheMiddle)) is not None:
        return _middle_prompts(loaded, holes, middle)
    family = loaded.experiment.model.family.replace("_", "-")
    kinds = "FillInTheMiddle, DecoderOnly" if family == "decoder" else "SpanCorruption, Denoising"
    raise UserError(
        f"{loaded.origin} is {'a' if family == 'decoder' else 'an'} {family} trained by "
        f"{type(loaded.experiment.objective).__name__}, which fills no holes: it generates the continuation of a text; "
        f"filling holes needs config.objective {kinds}"
    )


def _span_objective(loaded: LoadedModel) -> Optional[Objective]:
    """Returns the model's span-corruption objective, bound to the tokenizer, or None if there is none."""
    components = [component for _, component in loaded.experiment.objective.components()]
    for component in components:
        inner = component.objective if isinstance(component, DecoderOnly) else component
        if isinstance(inner, SpanCorruption):
            return component.bind(loaded.tokenizer)
    return None


def _sentinel_prompts(loaded: LoadedModel, holes: Holes, objective: Objective) -> Ask:
    """Returns the input builder for T5, which reads `A <X> D <Y> F </s>` and generates `<X> B C <Y> E <Z> </s>`."""
    vocabulary, text_ids, sentinels = loaded.tokenizer.vocabulary, holes.ids(), holes.sentinels()
    prompt = objective_prompt(objective, with_marks(text_ids, sentinels), loaded.experiment, vocabulary)
    ends = [*vocabulary.sentinels[1 : len(sentinels) + 1], vocabulary.eos][: len(sentinels)]
    if not len(text_ids[-1]):  # no text follows the last hole, so no sentinel follows its span, as in training
        ends[-1] = vocabulary.eos

    def ask(spans: Sequence[Ids]) -> SpanPrompt:
        generated = [i for sentinel, span in zip(sentinels, spans, strict=False) for i in (sentinel, *span)]
        return SpanPrompt(_append_tokens(prompt, [*generated, sentinels[len(spans)]]), ends[len(spans)])

    return ask


def _mask_prompts(loaded: LoadedModel, holes: Holes, objective: Denoising) -> Ask:
    """Returns the input builder for BART, which reads `<s> A _ D _ F </s>` and generates `<s> A B C D E F </s>`."""
    vocabulary, text_ids = loaded.tokenizer.vocabulary, holes.ids()
    holes.check_masks()
    if not all(map(len, text_ids[1:-1])):
        raise UserError(f"two holes of the text stand side by side, {loaded.origin} fills them as one: leave one out")
    marked_ids = with_marks(text_ids, [vocabulary.mask] * len(holes))
    prompt = objective_prompt(objective, marked_ids, loaded.experiment, vocabulary)

    def ask(spans: Sequence[Ids]) -> SpanPrompt:
        generated = [i for ids, span in zip(text_ids, spans, strict=False) for i in (*ids.tolist(), *span)]
        before, after = (text_ids[len(spans) + n].tolist() for n in (0, 1))
        end = after[0] if after else vocabulary.eos
        return SpanPrompt(_append_tokens(prompt, [vocabulary.bos, *generated, *before]), end)

    return ask


def _middle_prompts(loaded: LoadedModel, holes: Holes, objective: FillInTheMiddle) -> Ask:
    """Returns the input builder for fill-in-the-middle decoders.

    They read `<PRE> A <SUF> D <MID>`, or `<PRE> <SUF> D <MID> A` if training used only this format, and generate
    `B C <eot>`.
    """
    vocabulary = loaded.tokenizer.vocabulary
    holes.sentinels()  # raises UserError if the holes do not match the sentinels of training
    if len(holes) > 1:
        raise UserError(f"the text has {len(holes)} holes, {loaded.origin} fills one hole between two texts: leave one")
    start = leading_token_ids(loaded.experiment, vocabulary, is_needed=False)
    tokens = np.concatenate([start, objective.context(*holes.ids(), vocabulary)]).astype(np.int32)
    return lambda _: SpanPrompt(objective.prompt(tokens, vocabulary), vocabulary.separator)


def _append_tokens(prompt: Example, ids: Sequence[int]) -> Example:
    """Appends token ids to the decoder input of a prompt, as text that the decoder has already generated."""
    tokens = np.append(prompt["tokens"], np.array(ids, np.int32))
    example = prompt | {
        "tokens": tokens,
        "segment_ids": np.ones(len(tokens), np.int32),
        "positions": np.arange(len(tokens), dtype=np.int32),
    }
    if has_prefix(prompt):
        example["prefix_mask"] = np.append(prompt["prefix_mask"], np.zeros(len(ids), np.int32))
    return example
