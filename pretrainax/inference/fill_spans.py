"""Fills holes with spans of any length by beam search: with T5, BART, or a decoder trained to fill in the middle.

The training objective determines the token that ends a span: the sentinel of the next span (T5), the next token of the
given text (BART), or the end-of-text token (fill in the middle). The score of a span includes this token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example, has_prefix, is_encoder_decoder
from pretrainax.data.objectives import DecoderOnly, Denoising, FillInTheMiddle, Objective, SpanCorruption
from pretrainax.inference.beam_search import BeamSequences
from pretrainax.inference.constraints import FORBIDDEN, Automaton
from pretrainax.inference.decoding import Generator, stepping_params
from pretrainax.inference.framing import before_text, check_length, find_objective, longest
from pretrainax.inference.holes import Holes, with_marks
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.rows import batches, bucket
from pretrainax.inference.sampling import Rules
from pretrainax.sharding.arrays import put_batch

_BEAMS = 8  # minimum number of beams

Ids: TypeAlias = list[int]


class SpanPrompt(NamedTuple):
    """The model input that asks for the span in the next hole, and the id that ends this span."""

    example: Example
    end: int


Ask: TypeAlias = Callable[[Sequence[Ids]], SpanPrompt]  # a function of the ids of the spans in the previous holes


def find_spans(loaded: LoadedModel, holes: Holes, top: int, longest_span: int) -> list[list[tuple[Ids, float]]]:
    """Returns the `top` most likely spans for each hole, best first, as pairs of token ids and probability.

    Holes are filled from left to right, with the best span in each previous hole.

    Args:
      top: maximum number of spans per hole.
      longest_span: maximum number of tokens per span.

    Raises:
      UserError: the model was not trained to fill such holes, or the text is too long.
    """
    ask, spans, tokens = _layout(loaded, holes), [], sum(map(len, holes.ids()))
    while len(spans) < len(holes):
        example, end = ask([candidates[0][0] for candidates in spans])
        length = len(example["encoder_tokens" if is_encoder_decoder(example) else "tokens"])
        check_length(loaded, length, "the text", special=length - tokens)
        texts = _search(loaded, example, end, max(top, _BEAMS), longest_span + 1)
        written = zip(texts.tokens[0], texts.scores[0], texts.lengths[0], strict=True)
        spans.append([(ids[: n - 1].tolist(), float(np.exp(score))) for ids, score, n in written if n][:top])
    return spans


def _search(loaded: LoadedModel, example: Example, end: int, beams: int, limit: int) -> BeamSequences:
    """Returns the most likely continuations of a prompt: tokens that are not special, followed by the id `end`.

    Args:
      limit: maximum number of tokens of a continuation, including `end`.
    """
    vocabulary, max_length = loaded.tokenizer.vocabulary, longest(loaded)
    if max_length is not None:
        limit = min(limit, max_length - len(example["tokens"]) + 1)  # the model never reads the last generated token
    if limit < 1:
        raise UserError(f"the text leaves no room to write in the {max_length:,} tokens of {loaded.origin}: shorten it")
    rules = _spans_until(end, limit, loaded)
    ((_, batch),) = batches([example], loaded.mesh, max_length, vocabulary.pad)
    limits = np.full(len(batch["tokens"]), limit, np.int32)
    writer, params, room = loaded.cached_across_checkpoints(Generator), loaded.keep(stepping_params), bucket(limit)
    with jax.set_mesh(loaded.mesh):
        search = writer.begin_search(params, put_batch(batch, loaded.mesh), rules, 0.0, limits, beams=beams, room=room)
        search = writer.search_on(params, search, rules, 0.0, room)
    return jax.device_get(search.finished)


def _spans_until(end: int, limit: int, loaded: LoadedModel) -> Rules:
    """Returns the generation rules for one span: only tokens that are not special, and then the id `end`.

    Args:
      limit: maximum number of tokens, including `end`.
    """
    vocabulary, rows = loaded.tokenizer.vocabulary, loaded.experiment.model.vocab_size
    allowed = np.arange(rows) < vocabulary.size
    allowed[list(vocabulary.special_ids)] = False
    count = np.arange(limit, dtype=np.int32)[:, None]  # the state is the number of tokens generated so far
    moves = np.where(allowed & (count < limit - 1), count + 1, np.int32(FORBIDDEN))
    moves[:, end], allowed[end] = 0, True
    return Rules(jnp.asarray(allowed), end, (Automaton(jnp.asarray(moves)),))


# --- model inputs -----------------------------------------------------------------------------------------------------


def _layout(loaded: LoadedModel, holes: Holes) -> Ask:
    """Returns the function that builds the input for each hole, in the format of the model's training objective."""
    objective = _span_objective(loaded)
    if objective is not None:
        return _with_sentinels(loaded, holes, objective)
    if (denoising := find_objective(loaded, Denoising)) is not None:
        return _with_masks(loaded, holes, denoising)
    if (middle := find_objective(loaded, FillInTheMiddle)) is not None:
        return _with_both_sides(loaded, holes, middle)
    family = loaded.experiment.model.family.replace("_", "-")
    kinds = "FillInTheMiddle, DecoderOnly" if family == "decoder" else "SpanCorruption, Denoising"
    raise UserError(
        f"{loaded.origin} is {'a' if family == 'decoder' else 'an'} {family} trained by "
        f"{type(loaded.experiment.objective).__name__}, which fills no holes: it generates the continuation of a text; "
        f"filling holes needs config.objective {kinds}"
    )


def _span_objective(loaded: LoadedModel) -> Optional[Objective]:
    """Returns the model's objective with span corruption, bound to the tokenizer; None if there is none."""
    parts = [part for _, part in loaded.experiment.objective.components()]
    for part in parts:
        inner = part.objective if isinstance(part, DecoderOnly) else part
        if isinstance(inner, SpanCorruption):
            return part.bind(loaded.tokenizer)
    return None


def _with_sentinels(loaded: LoadedModel, holes: Holes, objective: Objective) -> Ask:
    """Builds inputs for T5, which reads `A <X> D <Y> F </s>` and generates `<X> B C <Y> E <Z> </s>`."""
    vocabulary, parts, marks = loaded.tokenizer.vocabulary, holes.ids(), holes.sentinels()
    prompt = objective.prompt(with_marks(parts, marks), vocabulary)
    ends = [*vocabulary.sentinels[1 : len(marks) + 1], vocabulary.eos][: len(marks)]
    if not len(parts[-1]):  # no text follows the last hole, and in training no sentinel follows its span
        ends[-1] = vocabulary.eos

    def ask(spans: Sequence[Ids]) -> SpanPrompt:
        written = [i for mark, span in zip(marks, spans, strict=False) for i in (mark, *span)]
        return SpanPrompt(_continued(prompt, [*written, marks[len(spans)]]), ends[len(spans)])

    return ask


def _with_masks(loaded: LoadedModel, holes: Holes, objective: Denoising) -> Ask:
    """Builds inputs for BART, which reads `<s> A _ D _ F </s>` and generates `<s> A B C D E F </s>`."""
    vocabulary, parts = loaded.tokenizer.vocabulary, holes.ids()
    holes.check_masks()
    if not all(map(len, parts[1:-1])):
        raise UserError(f"two holes of the text stand side by side, {loaded.origin} fills them as one: leave one out")
    prompt = objective.prompt(with_marks(parts, [vocabulary.mask] * len(holes)), vocabulary)

    def ask(spans: Sequence[Ids]) -> SpanPrompt:
        written = [i for part, span in zip(parts, spans, strict=False) for i in (*part.tolist(), *span)]
        before, after = (parts[len(spans) + n].tolist() for n in (0, 1))
        end = after[0] if after else vocabulary.eos
        return SpanPrompt(_continued(prompt, [vocabulary.bos, *written, *before]), end)

    return ask


def _with_both_sides(loaded: LoadedModel, holes: Holes, objective: FillInTheMiddle) -> Ask:
    """Builds the input for fill-in-the-middle decoders, which read `<PRE> A <SUF> D <MID>` and generate `B C <eot>`."""
    vocabulary = loaded.tokenizer.vocabulary
    holes.sentinels()  # raises UserError if the holes do not match the sentinels of training
    if len(holes) > 1:
        raise UserError(f"the text has {len(holes)} holes, {loaded.origin} fills one hole between two texts: leave one")
    (before, after), (first, second, third) = holes.ids(), vocabulary.sentinels[:3]
    start = before_text(loaded.experiment, vocabulary, is_needed=False)
    tokens = np.concatenate([start, [first], before, [second], after, [third]]).astype(np.int32)
    return lambda _: SpanPrompt(objective.prompt(tokens, vocabulary), vocabulary.separator)


def _continued(prompt: Example, ids: Sequence[int]) -> Example:
    """Returns a prompt with `ids` appended to the tokens of the decoder, as the text generated so far."""
    tokens = np.append(prompt["tokens"], np.array(ids, np.int32))
    example = prompt | {
        "tokens": tokens,
        "segment_ids": np.ones(len(tokens), np.int32),
        "positions": np.arange(len(tokens), dtype=np.int32),
    }
    if has_prefix(prompt):
        example["prefix_mask"] = np.append(prompt["prefix_mask"], np.zeros(len(ids), np.int32))
    return example
