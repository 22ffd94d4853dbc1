"""Makes tables of a regular expression over tokens, in a process of its own (`runtime.confined`); by outlines-core
(Willard and Louf 2023, arXiv 2307.09702).
"""

import base64
import zlib

import numpy as np
import outlines_core

FORBIDDEN = -1
# outlines-core 0.2.14 leaves out what goes on after a text that matches already, "1" -> "1.5" of [0-9]+([.][0-9]+)?:
# with a mark of its own for the end no text matches before that.
MARK = "\0"


def moves(pattern: str, spellings: list[tuple[str, list[int]]], rows: int, separator: int, size: int) -> list:
    """Returns the states that each token leads to, [S, rows] int32: S, and the table as zlib's bytes in base64.

    Args:
      spellings: what ids write, a character for each byte (Latin-1), with the ids.
      separator: the id of the end of a text.
      size: bytes of the table, at most.

    Raises:
      ValueError: no regular expression, none that these tokens can match, or one with a larger table.
    """
    ids = {spelling.encode("latin-1"): of_spelling for spelling, of_spelling in spellings} | {MARK.encode(): [rows]}
    try:
        index = outlines_core.Index(f"(?:{pattern}){MARK}", outlines_core.Vocabulary(rows + 1, ids))
    except ValueError as e:
        raise ValueError(f"which no text can match: {e}") from e
    after_mark, number, table = index.get_final_states(), {index.get_initial_state(): 0}, []
    states = list(number)
    for state in states:  # which grows
        if (len(states) + 1) * rows * 4 > size:
            raise ValueError(f"whose table of {rows:,} tokens in each state takes more than {size:,} bytes")
        row = np.full(rows, FORBIDDEN, np.int32)
        for token in index.get_allowed_tokens(state) or ():
            after = index.get_next_state(state, token)
            if token == rows:
                row[separator] = number[state] if after in after_mark else row[separator]
            elif after is not None and after not in after_mark:
                if after not in number:
                    number[after] = len(number)
                    states.append(after)
                row[token] = number[after]
        table.append(row)
    return [len(table), base64.b64encode(zlib.compress(np.array(table).tobytes(), 1)).decode()]
