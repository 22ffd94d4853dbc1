"""Matches regular expressions from untrusted configs, with a time limit."""

import functools
import re

from pretrainax.adapt import pattern_search
from pretrainax.runtime.confined import Confined

_WITHOUT_REPEATS = re.compile(r"(\(\?:|[\w/.|()^$-])*+")
_FEW = 8  # maximum number of alternatives that is fast in any case; matching may try all combinations


@functools.lru_cache(maxsize=64)
def found_in(patterns: tuple[str, ...], names: tuple[str, ...]) -> list[list[bool]]:
    """Returns, for each pattern, a list with a bool per name, True if the pattern matches a part of the name.

    Patterns with repetition or many alternatives run in a separate process with limits on time and memory.

    Raises:
      ValueError: a pattern is not a valid regular expression.
      UserError: the separate process found a pattern that is not valid, or exceeded a limit.
    """
    if all(_WITHOUT_REPEATS.fullmatch(pattern) and pattern.count("|") <= _FEW for pattern in patterns):
        return pattern_search.search([*patterns], [*names])
    process = Confined(pattern_search.__file__, "search", seconds=5, gib=1)
    try:
        return process.call("", patterns=[*patterns], names=[*names])
    finally:
        process.close()
