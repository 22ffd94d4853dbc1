"""Banned strings never occur across tokens; the reference tries all sequences of a few tokens."""

import importlib.util
import itertools
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.inference.constraints import allowed_next, matching, over_tokens, stopping, without_strings

PIECES = [b"", b"a", b"ab", b"b", b"ba", b"c", b"\xc3", b"\xa9", b"abcab"]
SPECIAL, ROWS = 0, 11


@pytest.mark.parametrize("banned", [["abb"], ["aa", "bab"], ["é", "cab"], ["ababa", "bac"], ["a"]])
def test_no_text_has_a_banned_string_and_every_other_text_is_allowed(banned):
    automaton = without_strings(banned, PIECES, {SPECIAL}, ROWS)
    for tokens in itertools.product(range(len(PIECES)), repeat=3):
        state, is_allowed = 0, True
        for token in tokens:
            is_allowed = is_allowed and bool(np.asarray(automaton.moves)[state, token] >= 0)
            state = int(automaton.moves[state, token]) if is_allowed else 0
        written = b"|".join(b"".join(PIECES[i] for i in part) for part in _parted(tokens))
        assert is_allowed == (not any(text.encode() in written for text in banned)), (tokens, written)


def _parted(tokens):
    """Returns the sequences of tokens between special tokens."""
    return [list(run) for is_special, run in itertools.groupby(tokens, lambda i: i == SPECIAL) if not is_special]


@pytest.mark.parametrize("is_continuation", [False, True])
@pytest.mark.parametrize("stop", [" ", " a", "b a"])
def test_a_text_stops_where_its_decoded_text_has_a_stop_string(stop, is_continuation):
    """Decoding drops the space before a text, but not before a continuation."""
    pieces = [b"", b" a", b"b", b" "]
    spelled = {"spellings": lambda: pieces, "special_pieces": {}, "text_table": SimpleNamespace(adds_space=True)}
    moves = np.asarray(stopping([stop], SimpleNamespace(**spelled), 4, [0], is_continuation).moves)
    for tokens in itertools.product(range(1, 4), repeat=3):
        state = 0
        for count, token in enumerate(tokens, 1):
            text = b"".join(pieces[i] for i in tokens[:count]).decode()
            state = moves[state, token]
            assert (state < 0) == (stop in (text if is_continuation else text.removeprefix(" "))), text
            if state < 0:
                break


def test_ids_past_the_vocabulary_are_forbidden_in_every_state():
    automaton = without_strings(["ab"], PIECES, {SPECIAL}, ROWS)
    states = jnp.arange(len(automaton.moves))
    assert not allowed_next(automaton, states)[:, len(PIECES) :].any()
    assert automaton.moves.shape[1] == ROWS


def test_tokens_follow_the_bytes_that_they_write():
    table = np.full((3, 256), -1, np.int32)
    table[0, ord("a")], table[1, ord("b")], table[2, ord("a")] = 1, 2, 1  # (ab)*
    moves = over_tokens(table, [b"a", b"ab", b"aba", b"b", b"", b"abcab"])
    np.testing.assert_array_equal(moves, [[1, 2, 1, -1, 0, -1], [-1, -1, -1, 2, 1, -1], [1, 2, 1, -1, 2, -1]])


needs_outlines = pytest.mark.skipif(not importlib.util.find_spec("outlines_core"), reason="extra regex")


@needs_outlines
@pytest.mark.parametrize("pattern", ["(ab)*c?", "a(bc)?", "a|a[^c]*c", "é+|b.", "abc{1,2}"])
def test_texts_that_end_are_those_that_match(pattern):
    """A text of two tokens ends if it matches, and continues if a longer text may match."""
    automaton = matching(pattern, PIECES, {SPECIAL}, ROWS, [SPECIAL])
    moves = np.asarray(automaton.moves)
    for tokens in itertools.product(range(1, len(PIECES)), repeat=2):
        state = 0
        for token in tokens:
            state = moves[state, token] if state >= 0 else -1
        written = b"".join(PIECES[i] for i in tokens).decode("utf-8", "replace")
        matches = "\ufffd" not in written and re.fullmatch(pattern, written)
        assert (state >= 0 and moves[state, SPECIAL] >= 0) == bool(matches), (tokens, written)


@needs_outlines
@pytest.mark.parametrize("pattern", ["(a", "zz", "[0-9]"])
def test_what_no_text_can_match_is_one_line(pattern):
    with pytest.raises(UserError, match="regex is .*, which no text can match: ") as caught:
        matching(pattern, PIECES, {SPECIAL}, ROWS, [SPECIAL])
    assert "\n" not in str(caught.value)
