"""Says which tokens may come next: automata over tokens, as tables on the device.

An automaton is written down over bytes, as strings do not end where tokens do, and becomes one over tokens by what each
of them writes.
"""

import base64
import importlib.util
import os
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Union

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import UserError
from pretrainax.files.errors import shortened
from pretrainax.inference.prompts import ids_of
from pretrainax.runtime.confined import Confined
from pretrainax.tokenization.base import Tokenizer, Vocabulary

FORBIDDEN = -1
_REGEX_STATES = os.path.join(os.path.dirname(__file__), "regex_states.py")
# Budgets of a regular expression: those of published JSON schemas take seconds and 100 states.
_SECONDS, _GIB = 60.0, 6.0
_LARGEST = 1 << 29  # bytes of its table on the device: 1,000 states of 128,256 tokens


class Automaton(NamedTuple):
    """Tells in each of S states what a token of V leads to. The first state is 0."""

    moves: jax.Array  # [S, V] int32; FORBIDDEN: the token may not come here

    def step(self, states: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the states [B] after tokens [B], which are not forbidden."""
        return self.moves[states, tokens]


def allowed_next(automaton: Automaton, states: jax.Array) -> jax.Array:
    """Returns which tokens may come in states [B], [B, V] bool."""
    return automaton.moves[states] != FORBIDDEN


def allowed_ids(
    allowed: Sequence[Union[int, str]], banned: Sequence[Union[int, str]], tokenizer: Tokenizer, rows: int
) -> np.ndarray:
    """Returns which ids of a model may be said at all, [rows] bool: none past the vocabulary.

    Args:
      allowed: ids, or text of which all tokens are; () allows all, otherwise the end of a text is added.
      banned: ids, or text that is one token.

    Raises:
      UserError: an id that there is not, text of several tokens, nothing left.
    """
    vocabulary = tokenizer.vocabulary
    mask = np.zeros(rows, bool)
    mask[: vocabulary.size] = not allowed
    for token in allowed:
        mask[_tokens("allowed_tokens", token, tokenizer)] = True
    if allowed and vocabulary.separator is not None:
        mask[vocabulary.separator] = True
    for token in banned:
        ids = _tokens("banned_tokens", token, tokenizer)
        if len(ids) > 1:
            raise UserError(f"banned_tokens has {token!r}, which is {len(ids)} tokens: give it to banned_strings")
        mask[ids] = False
    if not mask.any():
        raise UserError("banned_tokens leaves nothing that may be said: ban fewer, or allow more in allowed_tokens")
    return mask


def _tokens(option: str, token: Union[int, str], tokenizer: Tokenizer) -> list[int]:
    size = tokenizer.vocabulary.size
    if isinstance(token, str):
        return ids_of(token, tokenizer).tolist()
    if token >= size:
        raise UserError(f"{option} has {token}, the vocabulary has ids from 0 to {size - 1}")
    return [token]


def without_strings(banned: Sequence[str], spellings: Sequence[bytes], vocabulary: Vocabulary, rows: int) -> Automaton:
    """Returns the automaton of texts in which none of the `banned` strings is written, however tokens meet in it.

    Args:
      spellings: what each id writes, as `Tokenizer.spellings` says.
      rows: V, ids of the model, of which those past the vocabulary are forbidden.
    """
    moves = over_tokens(_without([text.encode() for text in banned]), spellings)
    moves[:, list(vocabulary.special_ids)] = 0  # a special piece parts what is before it from what follows
    padding = np.full((len(moves), rows - len(spellings)), FORBIDDEN, np.int32)
    return Automaton(jnp.asarray(np.concatenate([moves, padding], axis=1)))


def matching(pattern: str, spellings: Sequence[bytes], vocabulary: Vocabulary, rows: int) -> Automaton:
    """Returns the automaton of texts that match a regular expression as a whole, of which the end is told by the end of
    the text; made by `regex_states` in a process of its own, with budgets of time and memory.

    Args:
      spellings, rows: as `without_strings` has them. Special pieces are part of no match.

    Raises:
      UserError: no regular expression, none that these tokens can match, or one that exceeds a budget; the library is
        not installed.
    """
    if importlib.util.find_spec("outlines_core") is None:
        raise UserError("regex needs the library outlines-core: pip install 'pretrainax[regex]'")
    if vocabulary.separator is None:
        raise UserError("regex needs a vocabulary with an end of text, and this one has none: leave it out")
    ids: dict[str, list[int]] = {}
    for i, spelling in enumerate(spellings):
        if spelling and i not in vocabulary.special_ids and b"\0" not in spelling:
            ids.setdefault(spelling.decode("latin-1"), []).append(i)
    process = Confined(_REGEX_STATES, "moves", seconds=_SECONDS, gib=_GIB)
    try:
        states, packed = process.call(
            f"regex is {shortened(pattern)!r},",
            pattern=pattern,
            spellings=[*ids.items()],
            rows=rows,
            separator=vocabulary.separator,
            size=_LARGEST,
        )
    finally:
        process.close()
    table = zlib.decompress(base64.b64decode(packed), bufsize=states * rows * 4)
    return Automaton(jnp.asarray(np.frombuffer(table, np.int32).reshape(states, rows)))


def over_tokens(table: np.ndarray, spellings: Sequence[bytes]) -> np.ndarray:
    """Returns the moves [S, V] of tokens that write `spellings`, of a table [S, 256] of bytes. None leads away from
    FORBIDDEN."""
    table = np.concatenate([table, np.full((1, 256), FORBIDDEN, np.int32)])  # the last row, -1, is that of FORBIDDEN
    lengths = np.array([len(spelling) for spelling in spellings])
    moves = np.repeat(np.arange(len(table) - 1, dtype=np.int32)[:, None], len(spellings), axis=1)
    for place in range(lengths.max(initial=0)):
        reach = np.flatnonzero(lengths > place)
        byte = np.array([spellings[i][place] for i in reach.tolist()])
        moves[:, reach] = table[moves[:, reach], byte]
    return moves


def _without(banned: Sequence[bytes]) -> np.ndarray:
    """Returns the automaton over bytes of Aho and Corasick (1975), [S, 256]; the ends of the strings are FORBIDDEN.

    A state is the longest end of the text so far that some string begins with.
    """
    states = sorted({text[:n] for text in banned for n in range(len(text))}, key=len)  # b"" is the first
    number = {state: i for i, state in enumerate(states)}
    table = np.zeros((len(states), 256), np.int32)
    for state in states:
        for byte in range(256):
            text = state + bytes([byte])
            ends = (text[n:] for n in range(len(text) + 1))
            is_banned = any(text.endswith(other) for other in banned)
            table[number[state], byte] = FORBIDDEN if is_banned else number[next(e for e in ends if e in number)]
    return table
