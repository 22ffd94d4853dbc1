"""Regular expressions from configs, which may be of somebody else: some take years."""

import functools
import re

from pretrainax.adapt import pattern_search
from pretrainax.runtime.confined import Confined

_WITHOUT_REPEATS = re.compile(r"(\(\?:|[\w/.|()^$-])*+")
_FEW = 8  # alternatives, which are tried in all their combinations


@functools.lru_cache(maxsize=64)
def found_in(patterns: tuple[str, ...], names: tuple[str, ...]) -> list[list[bool]]:
    """Returns for each pattern in which names it is found.

    Patterns that repeat something, or have many alternatives, are looked up in a process of their own, with a budget of
    time.

    Raises:
      ValueError: a pattern is no regular expression.
      UserError: the same, or they take too long.
    """
    if all(_WITHOUT_REPEATS.fullmatch(pattern) and pattern.count("|") <= _FEW for pattern in patterns):
        return pattern_search.search([*patterns], [*names])
    process = Confined(pattern_search.__file__, "search", seconds=5, gib=1)
    try:
        return process.call("", patterns=[*patterns], names=[*names])
    finally:
        process.close()
