"""Constrains the next token with automata over tokens, whose transition tables are stored on the device.

A constrained string may begin or end within a token. Therefore each automaton is first built over bytes, and then
converted to an automaton over tokens, using the bytes of each token.
"""

import base64
import os
import zlib
from collections.abc import Collection, Sequence
from typing import NamedTuple, Union

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import UserError
from pretrainax.files.errors import shortened
from pretrainax.files.extras import missing, needs
from pretrainax.inference.prompts import ids_of
from pretrainax.runtime.confined import Confined
from pretrainax.tokenization.base import Tokenizer

FORBIDDEN = -1  # in a transition table: the token is not allowed in this state
_REGEX_STATES = os.path.join(os.path.dirname(__file__), "regex_states.py")
# Limits on time and memory for compiling a regular expression. Published JSON schemas need a few seconds and about 100
# states.
_MAX_SECONDS, _MAX_GIB = 60.0, 6.0
_MAX_TABLE_BYTES = 1 << 29  # maximum table size on the device: about 1,000 states with 128,256 tokens


class Automaton(NamedTuple):
    """A transition table of S states over the V token ids of the model; the initial state is 0."""

    moves: jax.Array  # [S, V] int32: the next state; FORBIDDEN: the token is not allowed in the state

    def step(self, states: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the states [B] reached from `states` [B] by the tokens `tokens` [B], which must be allowed."""
        return self.moves[states, tokens]


def allowed_next(automaton: Automaton, states: jax.Array) -> jax.Array:
    """Returns a bool mask [B, V] of the tokens that are allowed in each state of `states` [B]."""
    return automaton.moves[states] != FORBIDDEN


def allowed_ids(
    allowed: Sequence[Union[int, str]],
    banned: Sequence[Union[int, str]],
    tokenizer: Tokenizer,
    rows: int,
    ends: Sequence[int],
) -> np.ndarray:
    """Returns a bool mask [rows] of the token ids that a model may generate.

    The mask is False for embedding rows after the vocabulary, which are padding.

    Args:
      allowed: token ids, or strings whose tokens are all allowed; () allows all ids. The end tokens are always allowed.
      banned: token ids, or strings of one token.
      rows: number of embedding rows of the model, with padding.
      ends: ids that end a text.

    Raises:
      UserError: an id is outside the vocabulary, a banned string has several tokens, or no id remains.
    """
    vocabulary = tokenizer.vocabulary
    mask = np.zeros(rows, bool)
    mask[: vocabulary.size] = not allowed
    for token in allowed:
        mask[_option_ids("allowed_tokens", token, tokenizer)] = True
    if allowed:
        mask[list(ends)] = True
    mask &= ~mask_of("banned_tokens", banned, tokenizer, rows)
    if not mask.any():
        raise UserError("banned_tokens leaves no token to generate: ban fewer tokens, or allow more in allowed_tokens")
    return mask


def mask_of(option: str, tokens: Sequence[Union[int, str]], tokenizer: Tokenizer, rows: int) -> np.ndarray:
    """Returns a bool mask [rows], True for the token ids or strings of one token of the named option."""
    mask = np.zeros(rows, bool)
    for token in tokens:
        ids = _option_ids(option, token, tokenizer)
        if len(ids) > 1:
            raise UserError(f"{option} has {token!r}, which is {len(ids)} tokens: give it to banned_strings")
        mask[ids] = True
    return mask


def _option_ids(option: str, token: Union[int, str], tokenizer: Tokenizer) -> list[int]:
    size = tokenizer.vocabulary.size
    if isinstance(token, str):
        return ids_of(token, tokenizer).tolist()
    if token >= size:
        raise UserError(f"{option} has {token}, the vocabulary has ids from 0 to {size - 1}")
    return [token]


def without_strings(
    banned: Sequence[str], spellings: Sequence[bytes], special: Collection[int], rows: int
) -> Automaton:
    """Builds the automaton that forbids the `banned` strings, however they are split into tokens.

    Args:
      spellings: bytes of each token id, from `Tokenizer.spellings`.
      special: ids of special tokens.
      rows: V, number of embedding rows of the model. Ids after the vocabulary are forbidden.
    """
    automaton = _completing(banned, spellings, rows)
    # A special token separates the text before and after it.
    return Automaton(automaton.moves.at[:, jnp.array(sorted(special), jnp.int32)].set(0))


def stopping(
    stops: Sequence[str], tokenizer: Tokenizer, rows: int, ends: Sequence[int], is_continuation: bool
) -> Automaton:
    """Builds the automaton whose forbidden moves complete one of the `stops` strings in a decoded text.

    Unlike in `without_strings`, special tokens count as text, with the spelling of the decoded text (<|im_end|>).

    Args:
      is_continuation: whether the text is decoded after a prompt. If False, decoding drops the space that a tokenizer
        adds before a text.
    """
    spellings = list(tokenizer.spellings())
    for i, piece in tokenizer.special_pieces.items():
        spellings[i] = b"" if i in ends else piece.encode()
    automaton = _completing(stops, spellings, rows)
    if is_continuation or not tokenizer.text_table.adds_space:
        return automaton
    first = _completing(stops, [spelling.removeprefix(b" ") for spelling in spellings], rows)
    moves = jnp.concatenate([first.moves[:1], automaton.moves])  # a new state 0, for the first token
    return Automaton(jnp.where(moves == FORBIDDEN, FORBIDDEN, moves + 1))


def _completing(strings: Sequence[str], spellings: Sequence[bytes], rows: int) -> Automaton:
    """Builds the automaton that forbids completing a string; ids after the vocabulary are forbidden."""
    moves = over_tokens(_byte_automaton([string.encode() for string in strings]), spellings)
    padding = np.full((len(moves), rows - len(spellings)), FORBIDDEN, np.int32)
    return Automaton(jnp.asarray(np.concatenate([moves, padding], axis=1)))


def matching(
    pattern: str, spellings: Sequence[bytes], special: Collection[int], rows: int, ends: Sequence[int]
) -> Automaton:
    """Builds the automaton that allows only text that fully matches a regular expression.

    The automaton allows the end tokens only after a full match. It never allows other special tokens. The module
    `regex_states` computes the automaton in a separate process with limits on time and memory.

    Args:
      spellings, special, rows: as in `without_strings`.
      ends: ids that end a text.

    Raises:
      UserError: the expression is invalid, the tokens cannot match it, it exceeds a limit, the vocabulary has no end
        token, or the library outlines-core is not installed.
    """
    if absent := missing(["outlines_core"]):
        raise UserError(needs("regex", absent, "regex"))
    if not ends:
        raise UserError("regex needs a vocabulary with an end token, and this vocabulary has none: leave regex out")
    ids: dict[str, list[int]] = {}
    for i, spelling in enumerate(spellings):
        if spelling and i not in special and b"\0" not in spelling:
            ids.setdefault(spelling.decode("latin-1"), []).append(i)
    process = Confined(_REGEX_STATES, "moves", seconds=_MAX_SECONDS, gib=_MAX_GIB)
    try:
        num_states, compressed_table = process.call(
            f"regex is {shortened(pattern)!r},",
            pattern=pattern,
            spellings=[*ids.items()],
            rows=rows,
            ends=[*ends],
            size=_MAX_TABLE_BYTES,
        )
    finally:
        process.close()
    table = zlib.decompress(base64.b64decode(compressed_table), bufsize=num_states * rows * 4)
    return Automaton(jnp.asarray(np.frombuffer(table, np.int32).reshape(num_states, rows)))


def over_tokens(table: np.ndarray, spellings: Sequence[bytes]) -> np.ndarray:
    """Converts a transition table over bytes [S, 256] to a transition table over tokens, int32 [S, V].

    A token is FORBIDDEN in a state if any of its bytes leads to FORBIDDEN.

    Args:
      spellings: bytes of each of the V tokens.
    """
    table = np.concatenate([table, np.full((1, 256), FORBIDDEN, np.int32)])  # the last row has index -1, FORBIDDEN
    lengths = np.array([len(spelling) for spelling in spellings])
    moves = np.repeat(np.arange(len(table) - 1, dtype=np.int32)[:, None], len(spellings), axis=1)
    for position in range(lengths.max(initial=0)):
        token_ids = np.flatnonzero(lengths > position)
        byte = np.array([spellings[i][position] for i in token_ids.tolist()])
        moves[:, token_ids] = table[moves[:, token_ids], byte]
    return moves


def _byte_automaton(banned: Sequence[bytes]) -> np.ndarray:
    """Builds the Aho-Corasick automaton (1975) over bytes, [S, 256], which forbids the `banned` strings.

    A state represents the longest suffix of the text so far that is a proper prefix of a banned string. The byte that
    completes a banned string leads to FORBIDDEN.
    """
    states = sorted({string[:n] for string in banned for n in range(len(string))}, key=len)  # b"" is state 0
    index = {state: i for i, state in enumerate(states)}
    table = np.zeros((len(states), 256), np.int32)
    for state in states:
        for byte in range(256):
            string = state + bytes([byte])
            suffixes = (string[n:] for n in range(len(string) + 1))
            is_banned = any(string.endswith(banned_string) for banned_string in banned)
            table[index[state], byte] = FORBIDDEN if is_banned else index[next(s for s in suffixes if s in index)]
    return table
