"""Matches regular expressions from untrusted configs, with a time limit."""

import functools
import re

from pretrainax.adapt import pattern_search
from pretrainax.runtime.confined import Confined

_WITHOUT_REPEATS = re.compile(r"(\(\?:|[\w/.|()^$-])*+")
_FAST_ALTERNATIVES = 8  # alternatives per pattern that are always fast; matching may try all combinations


@functools.lru_cache(maxsize=64)
def match_patterns(patterns: tuple[str, ...], names: tuple[str, ...]) -> list[list[bool]]:
    """Returns one list per pattern, with a bool per name: True if the pattern matches a substring of the name.

    Patterns with repetitions or many alternatives run in a separate process with limits on time and memory.

    Raises:
      ValueError: a pattern is not a valid regular expression.
      UserError: a pattern that runs in the separate process is not valid, or matching exceeds a limit.
    """
    if all(_WITHOUT_REPEATS.fullmatch(pattern) and pattern.count("|") <= _FAST_ALTERNATIVES for pattern in patterns):
        return pattern_search.search([*patterns], [*names])
    process = Confined(pattern_search.__file__, "search", seconds=5, gib=1)
    try:
        return process.call("", patterns=[*patterns], names=[*names])
    finally:
        process.close()
