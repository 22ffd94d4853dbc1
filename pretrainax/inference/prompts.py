"""Converts prompts to batches: parses special tokens in the text, and adds the special tokens of training.

A decoder continues the text. Therefore its prompt starts like the documents in its training: with the separator of the
previous document if documents were concatenated, or with the BOS token that the tokenizer of an imported model adds.
The input of an encoder ends as in training.
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

_SPACE_MARK = "\u2581"  # prefix of the sentinels of mT5
_SENTINEL = re.compile(r"<extra_id_\d+>")
_MASK = re.compile(r"\[MASK\]|<mask>")


# --- text with special tokens ----------------------------------------------------------------------------------------


def ids_of(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the ids, int32 [n], of a text with special tokens such as "The <extra_id_0> walks" or "a [MASK]".

    Sentinels and masks are parsed in the same way as in `inference.holes`: if the tokenizer joins the space before a
    word to the word, they also replace the space before them. [MASK] works for every tokenizer with a mask token.

    Raises:
      UserError: the vocabulary lacks the sentinel or the mask.
    """
    vocabulary = tokenizer.vocabulary
    written = {piece.removeprefix(_SPACE_MARK): i for i, piece in tokenizer.special_pieces.items() if piece}
    if vocabulary.mask is not None:
        written[PLAIN] = vocabulary.mask
    pattern = "|".join(map(re.escape, sorted(written, key=len, reverse=True))) or "(?!)"
    pieces = re.split(f"({pattern})", text)
    parts, marks = pieces[::2], [written[piece] for piece in pieces[1::2]]
    for part in parts:
        _check_plain(part, tokenizer)
    are_holes = [mark in (vocabulary.mask, *vocabulary.sentinels) for mark in marks]
    absorbs_space = any(are_holes) and takes_space(tokenizer.spellings())
    return with_marks(ids_between(tokenizer, parts, [absorbs_space and is_hole for is_hole in are_holes]), marks)


def _check_plain(text: str, tokenizer: Tokenizer) -> None:
    """Raises UserError if a text contains a sentinel or mask, such as <extra_id_0>, which the vocabulary lacks.

    Args:
      text: a part of a prompt between special tokens of the vocabulary.
    """
    vocabulary = tokenizer.vocabulary
    if match := _SENTINEL.search(text):
        sentinels = [tokenizer.special_pieces[i].removeprefix(_SPACE_MARK) for i in vocabulary.sentinels]
        known = f"its sentinels are {sentinels[0]} to {sentinels[-1]}" if sentinels else "it has no sentinels"
        raise UserError(f"the vocabulary lacks {match[0]}: {known}")
    if match := _MASK.search(text):
        mask = vocabulary.mask
        known = "it has no mask" if mask is None else f"its mask is written {tokenizer.special_pieces[mask]}"
        raise UserError(f"the vocabulary lacks {match[0]}: {known}")


# --- model input -----------------------------------------------------------------------------------------------------


def read_prompt(text: str, experiment: Experiment, tokenizer: Tokenizer) -> Example:
    """Returns the model input for a prompt: an example without targets.

    Raises:
      UserError: the model is an encoder, the vocabulary lacks a special token, or the prompt is empty.
    """
    if experiment.model.family == "encoder":
        raise UserError(
            "the model is an encoder, which generates no text: it supports fill (masks), embed (vectors) and score "
            "(likelihoods)"
        )
    prompt = framed_prompt(ids_of(text, tokenizer), experiment, tokenizer)
    if not tokens_of(prompt):
        raise UserError("the prompt is empty, and the model was trained with nothing before a text: write a prompt")
    return prompt


# --- the batch -------------------------------------------------------------------------------------------------------


def batch_of(prompts: Sequence[Example], pad: int, most: Optional[int]) -> HostBatch:
    """Returns a batch [B, T] of prompts, padded on the right to a common length, as computed by `bucket`.

    Args:
      pad: id of padding.
      most: maximum length in tokens; None: no limit.
    """
    lengths = bucket(max(tokens_of(prompt) for prompt in prompts), most)
    return collate([[prompt] for prompt in prompts], Lengths(lengths, lengths, 1), pad)


def tokens_of(prompt: Example) -> int:
    """Returns the number of tokens of a prompt; for an encoder-decoder, of the input of its encoder."""
    return len(prompt["encoder_tokens" if is_encoder_decoder(prompt) else "tokens"])


def generation_limit(prompt: Example, loaded: LoadedModel) -> Optional[int]:
    """Returns the maximum number of tokens that the model can generate after a prompt; None: no limit.

    The model never reads the last generated token, so this token needs no position.

    Raises:
      UserError: the prompt is longer than the maximum input length.
    """
    limit, tokens = longest(loaded), tokens_of(prompt)
    check_length(loaded, tokens, "the prompt")
    if limit is None:
        return None
    return limit if is_encoder_decoder(prompt) else limit - tokens + 1
