"""Fills holes with text of any length, by beam search: the spans of T5 and BART, the middle of a decoder.

A span is over where the training says so: at the sentinel of the next one (T5), at the token that the text goes on with
(BART), at the end of text (the middle of a decoder). That token is a part of what is likely or not.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example, has_prefix, is_encoder_decoder
from pretrainax.data.objectives import DecoderOnly, Denoising, FillInTheMiddle, Objective, SpanCorruption
from pretrainax.inference.beam_search import Texts
from pretrainax.inference.constraints import FORBIDDEN, Automaton
from pretrainax.inference.decoding import Writer, stepping_params
from pretrainax.inference.framing import before_text, check_length, longest, trained_by
from pretrainax.inference.holes import Holes, with_marks
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.rows import batches, bucket
from pretrainax.inference.sampling import Rules
from pretrainax.sharding.arrays import put_batch

_BEAMS = 8  # at least

Ids: TypeAlias = list[int]


class Question(NamedTuple):
    """Holds what a model reads to fill the next hole, and the id at which that is full."""

    example: Example
    end: int


Ask: TypeAlias = Callable[[Sequence[Ids]], Question]  # told what is in the holes before


def find_spans(loaded: LoadedModel, holes: Holes, top: int, longest_span: int) -> list[list[tuple[Ids, float]]]:
    """Returns for each hole the likeliest texts, as ids, with their probabilities, best first.

    One hole after the other, from left to right, each with the best text in those before it.

    Raises:
      UserError: a model that was not trained to fill holes, or not such ones; a text that is too long.
    """
    ask, found, tokens = _layout(loaded, holes), [], sum(map(len, holes.ids()))
    while len(found) < len(holes):
        example, end = ask([candidates[0][0] for candidates in found])
        read = len(example["encoder_tokens" if is_encoder_decoder(example) else "tokens"])
        check_length(loaded, read, "the text", special=read - tokens)
        texts = _search(loaded, example, end, max(top, _BEAMS), longest_span + 1)
        written = zip(texts.tokens[0], texts.scores[0], texts.lengths[0], strict=True)
        found.append([(ids[: n - 1].tolist(), float(np.exp(score))) for ids, score, n in written if n][:top])
    return found


def _search(loaded: LoadedModel, example: Example, end: int, beams: int, limit: int) -> Texts:
    """Returns the likeliest continuations of an example: ordinary tokens and then `end`, at most `limit` together."""
    vocabulary, most = loaded.tokenizer.vocabulary, longest(loaded)
    if most is not None:
        limit = min(limit, most - len(example["tokens"]) + 1)  # the last token is never read
    if limit < 1:
        raise UserError(f"the text leaves no room to write in the {most:,} tokens of {loaded.origin}: shorten it")
    rules = _spans_until(end, limit, loaded)
    ((_, batch),) = batches([example], loaded.mesh, most, vocabulary.pad)
    limits = np.full(len(batch["tokens"]), limit, np.int32)
    writer, params, room = loaded.keep_compiled(Writer), loaded.keep(stepping_params), bucket(limit)
    with jax.set_mesh(loaded.mesh):
        search = writer.begin_search(params, put_batch(batch, loaded.mesh), rules, 0.0, limits, beams=beams, room=room)
        search = writer.search_on(params, search, rules, 0.0, room)
    return jax.device_get(search.finished)


def _spans_until(end: int, limit: int, loaded: LoadedModel) -> Rules:
    """Returns the rules of texts of ordinary tokens, and of `end` as the last of at most `limit`."""
    vocabulary, rows = loaded.tokenizer.vocabulary, loaded.experiment.model.vocab_size
    allowed = np.arange(rows) < vocabulary.size
    allowed[list(vocabulary.special_ids)] = False
    count = np.arange(limit, dtype=np.int32)[:, None]  # of the tokens so far
    moves = np.where(allowed & (count < limit - 1), count + 1, np.int32(FORBIDDEN))
    moves[:, end], allowed[end] = 0, True
    return Rules(jnp.asarray(allowed), end, (Automaton(jnp.asarray(moves)),))


# --- what is read -----------------------------------------------------------------------------------------------------


def _layout(loaded: LoadedModel, holes: Holes) -> Ask:
    """Returns how this model is asked, by what it was trained for."""
    objective = _of_spans(loaded)
    if objective is not None:
        return _with_sentinels(loaded, holes, objective)
    if (denoising := trained_by(loaded, Denoising)) is not None:
        return _with_masks(loaded, holes, denoising)
    if (middle := trained_by(loaded, FillInTheMiddle)) is not None:
        return _with_both_sides(loaded, holes, middle)
    family = loaded.experiment.model.family.replace("_", "-")
    kinds = "FillInTheMiddle, DecoderOnly" if family == "decoder" else "SpanCorruption, Denoising"
    raise UserError(
        f"{loaded.origin} is {'a' if family == 'decoder' else 'an'} {family} trained by "
        f"{type(loaded.experiment.objective).__name__}, which fills no holes: it generates what follows a text; "
        f"config.objective of one that fills holes is {kinds}"
    )


def _of_spans(loaded: LoadedModel) -> Optional[Objective]:
    """Returns the objective that takes out spans and has a sentinel for each, bound to the tokenizer; None without."""
    parts = [part for _, part in loaded.experiment.objective.components()]
    for part in parts:
        inner = part.objective if isinstance(part, DecoderOnly) else part
        if isinstance(inner, SpanCorruption):
            return part.bind(loaded.tokenizer)
    return None


def _with_sentinels(loaded: LoadedModel, holes: Holes, objective: Objective) -> Ask:
    """Asks as T5 is trained: `A <X> D <Y> F </s>` is read, `<X> B C <Y> E <Z> </s>` written."""
    vocabulary, parts, marks = loaded.tokenizer.vocabulary, holes.ids(), holes.sentinels()
    prompt = objective.prompt(with_marks(parts, marks), vocabulary)
    ends = [*vocabulary.sentinels[1 : len(marks) + 1], vocabulary.eos][: len(marks)]
    if not len(parts[-1]):  # no text follows that would need another sentinel
        ends[-1] = vocabulary.eos

    def ask(spans: Sequence[Ids]) -> Question:
        said = [i for mark, span in zip(marks, spans, strict=False) for i in (mark, *span)]
        return Question(_going_on(prompt, [*said, marks[len(spans)]]), ends[len(spans)])

    return ask


def _with_masks(loaded: LoadedModel, holes: Holes, objective: Denoising) -> Ask:
    """Asks as BART is trained: `<s> A _ D _ F </s>` is read, `<s> A B C D E F </s>` written."""
    vocabulary, parts = loaded.tokenizer.vocabulary, holes.ids()
    holes.check_masks()
    if not all(map(len, parts[1:-1])):
        raise UserError(f"two holes of the text stand side by side, {loaded.origin} fills both as one: leave one out")
    prompt = objective.prompt(with_marks(parts, [vocabulary.mask] * len(holes)), vocabulary)

    def ask(spans: Sequence[Ids]) -> Question:
        said = [i for part, span in zip(parts, spans, strict=False) for i in (*part.tolist(), *span)]
        here, after = (parts[len(spans) + n].tolist() for n in (0, 1))
        end = after[0] if after else vocabulary.eos
        return Question(_going_on(prompt, [vocabulary.bos, *said, *here]), end)

    return ask


def _with_both_sides(loaded: LoadedModel, holes: Holes, objective: FillInTheMiddle) -> Ask:
    """Asks as decoders are trained to fill in the middle: `<PRE> A <SUF> D <MID>` is read, `B C <eot>` written."""
    vocabulary = loaded.tokenizer.vocabulary
    holes.sentinels()  # raises where they are not those of the training
    if len(holes) > 1:
        raise UserError(f"the text has {len(holes)} holes, {loaded.origin} fills one between two sides: leave one")
    (before, after), (first, second, third) = holes.ids(), vocabulary.sentinels[:3]
    start = before_text(loaded.experiment, vocabulary, is_needed=False)
    read = np.concatenate([start, [first], before, [second], after, [third]]).astype(np.int32)
    return lambda _: Question(objective.prompt(read, vocabulary), vocabulary.separator)


def _going_on(prompt: Example, ids: Sequence[int]) -> Example:
    """Returns a prompt whose decoder has written `ids` already."""
    tokens = np.append(prompt["tokens"], np.array(ids, np.int32))
    example = prompt | {
        "tokens": tokens,
        "segment_ids": np.ones(len(tokens), np.int32),
        "positions": np.arange(len(tokens), dtype=np.int32),
    }
    if has_prefix(prompt):
        example["prefix_mask"] = np.append(prompt["prefix_mask"], np.zeros(len(ids), np.int32))
    return example
