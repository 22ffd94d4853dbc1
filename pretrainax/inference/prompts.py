"""Converts prompts to batches: parses special tokens in the text, and adds the special tokens of training.

A decoder continues the text. Therefore a decoder's prompt begins like the documents in its training. If documents were
concatenated, it begins with the separator of the previous document. If the tokenizer of an imported model adds the BOS
token, it begins with this token. The encoder input of an encoder-decoder ends as in training.
"""

import re
from collections.abc import Sequence
from typing import Optional

import numpy as np

from pretrainax.config import Experiment, UserError
from pretrainax.data.batch import Example, HostBatch, Lengths, is_encoder_decoder
from pretrainax.data.collate import collate
from pretrainax.inference.framing import check_length, framed_prompt, max_input_length
from pretrainax.inference.holes import PLAIN, ids_between, takes_space, with_marks
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.rows import bucket
from pretrainax.tokenization.base import Tokenizer, surrogates_as_errors
from pretrainax.tokenization.tokenizer_json import special_tokenizer

_SPACE_PREFIX = "\u2581"  # prefix of the sentinels of mT5
_SENTINEL = re.compile(r"<extra_id_\d+>")
_MASK = re.compile(r"\[MASK\]|<mask>")


# --- text with special tokens ----------------------------------------------------------------------------------------


def ids_of(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Tokenizes a text with special tokens ("The <extra_id_0> walks", "a [MASK]"); returns ids int32 [n].

    Sentinels and masks are parsed as in `inference.holes`. If tokens include the space before a word, a sentinel or
    mask also replaces the space before it. [MASK] works for every tokenizer with a mask token. A text with only
    other special tokens has the same ids as in transformers and, if it is a conversation, as in training.

    Raises:
      UserError: the text contains a sentinel or a mask that the vocabulary lacks.
    """
    vocabulary = tokenizer.vocabulary
    id_of_pattern = {pattern.removeprefix(_SPACE_PREFIX): i for pattern, i in tokenizer.special_patterns.items()}
    if vocabulary.mask is not None:
        id_of_pattern[re.escape(PLAIN)] = vocabulary.mask
    patterns = sorted(id_of_pattern, key=len, reverse=True)
    matches = [*re.finditer("|".join(f"({pattern})" for pattern in patterns) or "(?!)", text)]
    special_ids = [id_of_pattern[patterns[match.lastindex - 1]] for match in matches]
    edges = [0, *(edge for match in matches for edge in match.span()), len(text)]
    parts = [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    for part in parts:
        _check_unknown_tokens(part, tokenizer)
    are_holes = [special_id in (vocabulary.mask, *vocabulary.sentinels) for special_id in special_ids]
    if special_ids and not any(are_holes):
        return _encode_with_special(text, parts, special_ids, tokenizer)
    absorbs_space = any(are_holes) and takes_space(tokenizer.spellings())
    return with_marks(ids_between(tokenizer, parts, [absorbs_space and is_hole for is_hole in are_holes]), special_ids)


def _encode_with_special(text: str, parts: list[str], special_ids: list[int], tokenizer: Tokenizer) -> np.ndarray:
    """Tokenizes a text that consists of `parts` and, between adjacent parts, special tokens other than holes."""
    try:
        library = special_tokenizer(tokenizer)
    except UserError:  # no tokenizer.json can express the tokenizer, for example a `WordTokenizer`
        return with_marks(tokenizer.encode_batch(parts), special_ids)
    with surrogates_as_errors([text]):
        return np.array(library.encode(text, add_special_tokens=False).ids, np.int32)


def _check_unknown_tokens(text: str, tokenizer: Tokenizer) -> None:
    """Raises UserError if a text contains a sentinel or mask that the vocabulary lacks, for example <extra_id_0>.

    Args:
      text: a part of a prompt that lies between special tokens of the vocabulary.
    """
    vocabulary = tokenizer.vocabulary
    sentinels = [tokenizer.special_pieces[i].removeprefix(_SPACE_PREFIX) for i in vocabulary.sentinels]
    if match := _SENTINEL.search(text):
        hint = f"its sentinels are {sentinels[0]} to {sentinels[-1]}" if sentinels else "it has no sentinels"
        raise UserError(f"the vocabulary lacks {match[0]}: {hint}")
    if match := _MASK.search(text):
        mask = vocabulary.mask
        holes = f"; write {sentinels[0]}, {sentinels[1]}, … for missing spans" if len(sentinels) > 1 else ""
        hint = f"it has no mask{holes}" if mask is None else f"its mask is written {tokenizer.special_pieces[mask]}"
        raise UserError(f"the vocabulary lacks {match[0]}: {hint}")


# --- model input -----------------------------------------------------------------------------------------------------


def read_prompt(text: str, experiment: Experiment, tokenizer: Tokenizer) -> Example:
    """Converts the text of a prompt to a model input: an example without targets.

    Raises:
      UserError: the model is an encoder, or the vocabulary lacks a special token of the prompt. An empty prompt also
        raises UserError if the model reads no special token before a text.
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
    """Collates prompts to a batch [B, T], padded on the right to a length from `rows.bucket`.

    Args:
      pad: token id for padding.
      most: maximum length in tokens, or None for no limit.
    """
    length = bucket(max(tokens_of(prompt) for prompt in prompts), most)
    return collate([[prompt] for prompt in prompts], Lengths(length, length, 1), pad)


def tokens_of(prompt: Example) -> int:
    """Returns the number of tokens in a prompt, which is the encoder input for an encoder-decoder."""
    return len(prompt["encoder_tokens" if is_encoder_decoder(prompt) else "tokens"])


def generation_limit(prompt: Example, loaded: LoadedModel) -> Optional[int]:
    """Returns the maximum number of tokens that the model can generate after a prompt, or None if there is no limit.

    The model never reads the last generated token, so the last token needs no position.

    Raises:
      UserError: the prompt is longer than the maximum input length.
    """
    limit, tokens = max_input_length(loaded), tokens_of(prompt)
    check_length(loaded, tokens, "the prompt")
    if limit is None:
        return None
    return limit if is_encoder_decoder(prompt) else limit - tokens + 1
