"""Compares the outputs of a model, and its text from greedy decoding, with the results of transformers."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

import jax
import numpy as np

from pretrainax import models
from pretrainax.config import Classify, Embed, LongRopeScaling, RandomBlocks, RotaryPositions, UserError
from pretrainax.data.batch import Example, HostBatch, Lengths, is_encoder_decoder
from pretrainax.data.collate import collate
from pretrainax.files.errors import counted
from pretrainax.inference.decoding import generate_examples
from pretrainax.inference.embed import last_hidden
from pretrainax.inference.inherited import request_of
from pretrainax.inference.language_model import LanguageModel
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.prompts import read_prompt, tokens_of
from pretrainax.inference.verification.comparison import Comparison, exact, not_compared, within
from pretrainax.inference.verification.probes import PROMPTS, probe_examples
from pretrainax.inference.verification.reference import PER_TOKEN, Arrays, Continuation, Reference
from pretrainax.inference.verification.subject import Subject
from pretrainax.reporting.units import byte_size
from pretrainax.sharding.device_memory import available_memory

NEW_TOKENS = 16
# The two libraries add float32 numbers in different orders. In tiny models with logits up to 30, the difference is at
# most 2e-4, as in the tests of all architectures. In models with larger values, it is at most this share of the largest
# value.
_ABSOLUTE, _RELATIVE = 2e-4, 2e-5
_FORBIDDEN = -9e5  # logits below this value mark positions that an answer cannot have


class _Prompt(NamedTuple):
    """A prompt, and the text that transformers generates after it."""

    example: Example
    theirs: Continuation


class _Theirs(NamedTuple):
    """The results of transformers."""

    rows: list[Arrays]  # outputs of each row without padding; [] if they depend on the padding
    batch: Optional[Arrays]  # outputs of the padded batch
    refusal: str  # the reason why there is no padded batch
    prompts: list[_Prompt]
    refusal_of_texts: str  # the reason why there is no generated text
    untaken: list[str]


def memory_problem(subject: Subject) -> Optional[str]:
    """Returns the reason why the available memory is too small for the outputs, or None if it is sufficient.

    The parameters are in memory once in transformers, and after that in PretrainAX, which needs a second copy to
    generate text.
    """
    needed, available = 4 * subject.num_params() * (2 if subject.generates else 1), available_memory()
    if available is None or needed <= available:
        return None
    return (
        f"the float32 parameters need {byte_size(needed)}, and this machine has {byte_size(available)} available: "
        "--nocheck_memory compares anyway"
    )


def compare_outputs(subject: Subject) -> Iterator[Comparison]:
    """Compares the outputs for probe rows, single and in a padded batch, and 16 greedy tokens after each prompt."""
    examples, reference = probe_examples(subject), Reference(subject)
    try:
        theirs = _run_reference(subject, reference, examples)
    except Exception as e:  # from torch, for example because an index is out of range
        yield exact("outputs", len(examples), "rows", [f"transformers does not compute them: {type(e).__name__}: {e}"])
        return
    finally:
        reference.close()
    if subject.adapter is None:
        yield exact(
            "tensors", len(jax.tree.leaves(models.abstract_params(subject.model))), "parameters", theirs.untaken
        )
    with jax.default_matmul_precision("highest"):
        loaded = subject.load()
        ours = _our_outputs(subject, loaded, _collate(subject, examples))
        if theirs.rows:
            single = [{name: x[0] for name, x in row.items()} for row in theirs.rows]
            yield from _compare_arrays(subject, "single rows", examples, ours, single)
        else:
            yield not_compared("single rows", "the random blocks of the model depend on the padded length")
        if theirs.batch is None:
            yield not_compared("padded batch", theirs.refusal)
        else:
            rows = [{name: x[i] for name, x in theirs.batch.items()} for i in range(len(examples))]
            yield from _compare_arrays(subject, "padded batch", examples, ours, rows)
        if theirs.prompts:
            yield _compare_texts(loaded, theirs.prompts)
        elif subject.generates:
            yield not_compared("greedy tokens", theirs.refusal_of_texts)


# --- transformers ----------------------------------------------------------------------------------------------------


def _run_reference(subject: Subject, reference: Reference, examples: Sequence[Example]) -> _Theirs:
    """Computes everything that transformers computes."""
    batch, refusal = None, _padding_problem(subject, examples)
    try:  # before the single rows, because transformers' BigBird stays in full attention after a short row
        batch = reference.outputs(_collate(subject, examples)) if refusal is None else None
    except ValueError as e:  # for example from a class that needs a padding id
        refusal = f"{subject.architecture} of transformers does not compute it: {e}"
    single = [] if _depends_on_padding(subject) else examples
    rows = [reference.outputs(_collate(subject, [example])) for example in single]
    prompts, refusal_of_texts = [], f"no prompt leaves room for a text within {subject.max_length} tokens"
    try:
        prompts = [*_their_texts(subject, reference)] if subject.generates else []
    except UserError as e:  # from `read_prompt`
        refusal_of_texts = str(e)
    except Exception as e:  # for example from an encoder-decoder without a start token
        refusal_of_texts = f"{subject.architecture} of transformers does not generate: {e}"
    return _Theirs(rows, batch, refusal or "", prompts, refusal_of_texts, reference.untaken)


def _their_texts(subject: Subject, reference: Reference) -> Iterator[_Prompt]:
    """Generates a text after each prompt that leaves room for it."""
    limit = subject.max_length
    banned = range(subject.tokenizer.vocabulary.size, subject.model.vocab_size)
    for text in PROMPTS:
        example = read_prompt(text, subject.experiment, subject.tokenizer)
        tokens = tokens_of(example)
        room = NEW_TOKENS if limit is None else limit if is_encoder_decoder(example) else limit - tokens + 1
        if tokens > (limit or tokens) or room < 1:
            continue
        ids = example["encoder_tokens" if is_encoder_decoder(example) else "tokens"]
        yield _Prompt(example, reference.generate(ids, min(NEW_TOKENS, room), banned))


def _padding_problem(subject: Subject, examples: Sequence[Example]) -> Optional[str]:
    """Returns the reason why transformers' outputs for rows of a padded batch differ from single rows, or None."""
    position = subject.model.position
    scaling = position.scaling if isinstance(position, RotaryPositions) else None
    if isinstance(scaling, LongRopeScaling):
        is_long = {len(example["tokens"]) > scaling.original_length for example in examples}
        if len(is_long) > 1:
            return "LongRoPE in transformers rotates short rows of a batch like its longest row"
    return None


def _depends_on_padding(subject: Subject) -> bool:
    """Returns True if the outputs for a row depend on its padded length, as with the random blocks of BigBird."""
    return isinstance(subject.model.sparse_attention, RandomBlocks)


# --- PretrainAX ------------------------------------------------------------------------------------------------------


def _collate(subject: Subject, examples: Sequence[Example]) -> HostBatch:
    """Collates rows to a batch that is as long as its longest row."""
    inputs = max(tokens_of(example) for example in examples)
    targets = max(len(example["tokens"]) for example in examples)
    pad = subject.tokenizer.vocabulary.pad
    return collate([[example] for example in examples], Lengths(inputs, inputs, targets), pad or 0)


def _our_outputs(subject: Subject, loaded: LoadedModel, batch: HostBatch) -> Arrays:
    """Computes the outputs for a batch, by the same names as in transformers."""
    if isinstance(subject.model.head, Embed):
        return {"hidden states": np.asarray(loaded.run(last_hidden, batch))}
    outputs = loaded(batch)
    arrays = {"pair logits": outputs.heads["pair"]} if "pair" in outputs.heads else {}
    heads = {"classify": "logits", "tag": "logits", "extract": "span logits", "replaced": "logits"}
    arrays |= {heads[name]: head.logits for name, head in outputs.heads.items() if name in heads}
    if "lm" in outputs.heads:
        arrays["logits"] = outputs.heads["lm"].logits()
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


def _length(subject: Subject, example: Example) -> int:
    """Returns the number of tokens for which a row has outputs."""
    # For a model with an encoder, the hidden states of an embedding head are the encoder's hidden states.
    reads_encoder = isinstance(subject.model.head, Embed)
    return tokens_of(example) if reads_encoder else len(example["tokens"])


# --- comparison ------------------------------------------------------------------------------------------------------


def _compare_arrays(
    subject: Subject, what: str, examples: Sequence[Example], ours: Arrays, theirs: Sequence[Arrays]
) -> Iterator[Comparison]:
    """Compares each output of all rows, without padding.

    Args:
      ours: the outputs for the batch in PretrainAX.
      theirs: the outputs for each row in transformers.
    """
    lengths = [_length(subject, example) for example in examples]
    if unknown := sorted({*theirs[0]} ^ {*ours}):
        yield not_compared(f"{what}, {', '.join(unknown)}", "only one of the two models has this output")
    for name in sorted({*theirs[0]} & {*ours}):
        per_token = name in PER_TOKEN and ours[name].ndim > 1 and not isinstance(subject.model.head, Classify)
        found, largest = [], 0.0
        for number, length in enumerate(lengths):
            a, b = (x[:length] if per_token else x for x in (ours[name][number], theirs[number][name]))
            if a.shape != b.shape:
                found.append((np.inf, f"row {number}: shape {a.shape}, in transformers {b.shape}"))
                continue
            is_allowed = np.maximum(a, b) > _FORBIDDEN
            a, b = (np.where(is_allowed, x, 0.0) for x in (a, b))
            difference, largest = float(np.abs(a - b).max(initial=0.0)), max(largest, float(np.abs(b).max(initial=0.0)))
            found.append((np.inf if np.isnan(difference) else difference, f"row {number}: {difference:.2e}"))
        found.sort(reverse=True)
        count = f"{counted(len(lengths), 'row')}" + f", {counted(sum(lengths), 'token')}" * per_token
        limit = max(_ABSOLUTE, _RELATIVE * largest)
        reason = f"float32 rounding of values up to {largest:.3g}"
        yield within(f"{name}, {what}", count, found[0][0], limit, reason, [line for _, line in found])


def _compare_texts(loaded: LanguageModel, prompts: Sequence[_Prompt]) -> Comparison:
    """Compares text from greedy decoding.

    If the two ids have equal scores within the limit of logits, this is a tie, and both ids are correct.
    """
    what, found, count = "greedy tokens", [], 0
    try:
        options = {"temperature": 0.0, "num_beams": 1, "num_return": 1}
        sizes = [len(prompt.theirs.scores) for prompt in prompts]
        sampling = request_of(loaded, options | {"max_new_tokens": max(sizes)}).sampling
        texts = generate_examples(loaded, [prompt.example for prompt in prompts], sampling)
    except UserError as e:
        return not_compared(what, str(e))
    for number, (text, prompt, size) in enumerate(zip(texts, prompts, sizes, strict=True)):
        ours, theirs = [*text.ids][:size], prompt.theirs.ids
        count += len(theirs)
        if (first := _first_difference(ours, prompt.theirs)) is not None:
            sides = f"{ours[first : first + 6]} in PretrainAX, {theirs[first : first + 6]} in transformers"
            found.append(f"prompt {number + 1}, from token {first}: {sides}")
    return exact(what, count, f"tokens of {len(prompts)} texts", found)


def _first_difference(ours: Sequence[int], theirs: Continuation) -> Optional[int]:
    """Returns the index of the first token that differs and is not a tie, or None."""
    for i, (a, b) in enumerate(zip(ours, theirs.ids, strict=False)):
        if a != b:
            scores = theirs.scores[i]
            limit = 2 * max(_ABSOLUTE, _RELATIVE * float(np.abs(scores[np.isfinite(scores)]).max(initial=0.0)))
            return None if scores[b] - scores[a] <= limit else i
    return None if len(ours) == len(theirs.ids) else min(len(ours), len(theirs.ids))
