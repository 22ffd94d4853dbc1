"""Compiles a regular expression to a transition table over tokens; runs in a separate process (`runtime.confined`).

The automaton is from the library outlines-core (Willard and Louf 2023, arXiv 2307.09702).
"""

import base64
import zlib

import numpy as np
import outlines_core

FORBIDDEN = -1  # in the table: the token is not allowed in this state
# outlines-core 0.2.14 drops continuations of a text that already matches: for [0-9]+([.][0-9]+)?, it allows no ".5"
# after "1". With an explicit end mark in the expression, no text matches before its end.
MARK = "\0"


def moves(pattern: str, spellings: list[tuple[str, list[int]]], rows: int, separator: int, size: int) -> list:
    """Returns the number of states S, and the transition table [S, rows] int32, compressed by zlib and in base64.

    An entry of the table is the state after a token, or FORBIDDEN. State 0 is the initial state.

    Args:
      pattern: the regular expression.
      spellings: pairs of a string and the ids that decode to it. A string has one Latin-1 character per byte.
      rows: number of ids of the model.
      separator: id of the token that ends a text. It is allowed after a full match.
      size: maximum size of the table in bytes.

    Raises:
      ValueError: the expression is invalid, the tokens cannot match it, or its table is too large.
    """
    ids = {spelling.encode("latin-1"): token_ids for spelling, token_ids in spellings} | {MARK.encode(): [rows]}
    try:
        index = outlines_core.Index(f"(?:{pattern}){MARK}", outlines_core.Vocabulary(rows + 1, ids))
    except ValueError as e:
        raise ValueError(f"which no text can match: {e}") from e
    after_mark, index_of, table = index.get_final_states(), {index.get_initial_state(): 0}, []
    states = list(index_of)
    for state in states:  # the loop appends to `states`
        if (len(states) + 1) * rows * 4 > size:
            raise ValueError(f"whose table of {rows:,} tokens in each state takes more than {size:,} bytes")
        row = np.full(rows, FORBIDDEN, np.int32)
        for token in index.get_allowed_tokens(state) or ():
            following = index.get_next_state(state, token)
            if token == rows:
                row[separator] = index_of[state] if following in after_mark else row[separator]
            elif following is not None and following not in after_mark:
                if following not in index_of:
                    index_of[following] = len(index_of)
                    states.append(following)
                row[token] = index_of[following]
        table.append(row)
    return [len(table), base64.b64encode(zlib.compress(np.array(table).tobytes(), 1)).decode()]
