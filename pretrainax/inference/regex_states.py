"""Compiles a regular expression to a transition table over tokens, in a separate process (`runtime.confined`).

The library outlines-core computes the automaton (Willard and Louf 2023, arXiv 2307.09702).
"""

import base64
import zlib

import numpy as np
import outlines_core

FORBIDDEN = -1  # in the table: the token is not allowed in this state
# outlines-core 0.2.14 drops continuations of a text that already matches: for [0-9]+([.][0-9]+)?, it allows no ".5"
# after "1". This end-of-text character is appended to the expression, so that no text matches before its end.
MARK = "\0"


def moves(pattern: str, spellings: list[tuple[str, list[int]]], rows: int, ends: list[int], size: int) -> list:
    """Computes the transition table of a regular expression over tokens.

    An entry of the table is the state after a token, or FORBIDDEN. State 0 is the initial state.

    Args:
      pattern: the regular expression.
      spellings: pairs of a string and the token ids that decode to it. A string has one Latin-1 character per byte.
      rows: number of token ids of the model.
      ends: ids of the tokens that end a text, which are allowed after a full match.
      size: maximum size of the table in bytes.

    Returns:
      The number of states S, and the table [S, rows] int32 as base64-encoded, zlib-compressed bytes.

    Raises:
      ValueError: the expression is invalid, the tokens cannot match it, or its table is too large.
    """
    ids = {spelling.encode("latin-1"): token_ids for spelling, token_ids in spellings} | {MARK.encode(): [rows]}
    try:
        index = outlines_core.Index(f"(?:{pattern}){MARK}", outlines_core.Vocabulary(rows + 1, ids))
    except ValueError as e:
        raise ValueError(f"which no text can match: {e}") from e
    final_states, index_of, table = index.get_final_states(), {index.get_initial_state(): 0}, []
    states = list(index_of)
    for state in states:  # the loop appends to `states`
        if (len(states) + 1) * rows * 4 > size:
            raise ValueError(f"whose table of {rows:,} tokens in each state takes more than {size:,} bytes")
        transitions = np.full(rows, FORBIDDEN, np.int32)
        for token in index.get_allowed_tokens(state) or ():
            next_state = index.get_next_state(state, token)
            if token == rows:
                if next_state in final_states:
                    transitions[ends] = index_of[state]
            elif next_state is not None and next_state not in final_states:
                if next_state not in index_of:
                    index_of[next_state] = len(index_of)
                    states.append(next_state)
                transitions[token] = index_of[next_state]
        table.append(transitions)
    return [len(table), base64.b64encode(zlib.compress(np.array(table).tobytes(), 1)).decode()]
