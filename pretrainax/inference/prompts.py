"""Turns prompts into a batch: special pieces in them into ids, with what stands before a text in training.

Of a decoder the text goes on. What it has seen before a text of its corpus stands before a prompt too: where documents
lie end to end in a row, the separator of the one before; in a model of others the begin of text that their tokenizer
puts there. What an encoder reads ends as in training.
"""

import re
from collections.abc import Sequence
from typing import Optional

import numpy as np

from pretrainax.config import Experiment, UserError
from pretrainax.data.batch import Example, HostBatch, Lengths, is_encoder_decoder
from pretrainax.data.collate import collate
from pretrainax.inference.framing import check_length, framed_prompt, longest
from pretrainax.inference.holes import PLAIN, ids_between, takes_space, with_marks
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.rows import bucket
from pretrainax.tokenization.base import Tokenizer

_SPACE_MARK = "\u2581"  # before the sentinels of mT5
_SENTINEL = re.compile(r"<extra_id_\d+>")
_MASK = re.compile(r"\[MASK\]|<mask>")


# --- text with special pieces ----------------------------------------------------------------------------------------


def ids_of(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the ids of a text, int32 [n], in which special pieces are written: "The <extra_id_0> walks", "a [MASK]".

    They are read as in a text with holes: a sentinel or a mask ([MASK] for every tokenizer that has one) takes the
    space before it, where that would be a part of the next word.

    Raises:
      UserError: the vocabulary has no such sentinel, or no mask.
    """
    vocabulary = tokenizer.vocabulary
    written = {piece.removeprefix(_SPACE_MARK): i for i, piece in tokenizer.special_pieces.items() if piece}
    if vocabulary.mask is not None:
        written[PLAIN] = vocabulary.mask
    known = "|".join(map(re.escape, sorted(written, key=len, reverse=True))) or "(?!)"
    split = re.split(f"({known})", text)
    parts, marks = split[::2], [written[piece] for piece in split[1::2]]
    for part in parts:
        _check_plain(part, tokenizer)
    blanks = [mark in (vocabulary.mask, *vocabulary.sentinels) for mark in marks]
    takes = any(blanks) and takes_space(tokenizer.spellings())
    return with_marks(ids_between(tokenizer, parts, [takes and blank for blank in blanks]), marks)


def _check_plain(text: str, tokenizer: Tokenizer) -> None:
    """Raises UserError where text has what looks like a special piece, and the vocabulary has none."""
    vocabulary = tokenizer.vocabulary
    if match := _SENTINEL.search(text):
        sentinels = [tokenizer.special_pieces[i].removeprefix(_SPACE_MARK) for i in vocabulary.sentinels]
        known = f"its sentinels are {sentinels[0]} to {sentinels[-1]}" if sentinels else "it has no sentinels"
        raise UserError(f"the vocabulary lacks {match[0]}: {known}")
    if match := _MASK.search(text):
        mask = vocabulary.mask
        known = "it has no mask" if mask is None else f"its mask is written {tokenizer.special_pieces[mask]}"
        raise UserError(f"the vocabulary lacks {match[0]}: {known}")


# --- what the model reads --------------------------------------------------------------------------------------------


def read_prompt(text: str, experiment: Experiment, tokenizer: Tokenizer) -> Example:
    """Returns what the model reads of a prompt: an example without predictions.

    Raises:
      UserError: the model is an encoder; a special piece that it does not know; nothing to read.
    """
    if experiment.model.family == "encoder":
        raise UserError(
            "the model is an encoder, which generates no text: it fills in masks (fill), gives vectors (embed) and "
            "scores texts (score)"
        )
    prompt = framed_prompt(ids_of(text, tokenizer), experiment, tokenizer)
    if not tokens_of(prompt):
        raise UserError("the prompt is empty, and the model was trained with nothing before a text: give it some words")
    return prompt


# --- the batch -------------------------------------------------------------------------------------------------------


def batch_of(prompts: Sequence[Example], pad: int, most: Optional[int]) -> HostBatch:
    """Returns a batch [B, T] of examples without predictions, padded on the right to a bucket, at most `most`."""
    lengths = bucket(max(tokens_of(prompt) for prompt in prompts), most)
    return collate([[prompt] for prompt in prompts], Lengths(lengths, lengths, 1), pad)


def tokens_of(prompt: Example) -> int:
    """Returns how many tokens a prompt has."""
    return len(prompt["encoder_tokens" if is_encoder_decoder(prompt) else "tokens"])


def room_after(prompt: Example, loaded: LoadedModel) -> Optional[int]:
    """Returns how many tokens a model may write after a prompt; None: any number.

    The last of them is never read, and so needs no place.

    Raises:
      UserError: the prompt is longer than the context.
    """
    most, tokens = longest(loaded), tokens_of(prompt)
    check_length(loaded, tokens, "the prompt")
    if most is None:
        return None
    return most if is_encoder_decoder(prompt) else most - tokens + 1
