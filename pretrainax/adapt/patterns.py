"""Regular expressions from untrusted configs, with a time budget."""

import functools
import re

from pretrainax.adapt import pattern_search
from pretrainax.runtime.confined import Confined

_WITHOUT_REPEATS = re.compile(r"(\(\?:|[\w/.|()^$-])*+")
_FEW = 8  # maximum alternatives; matching may try all combinations


@functools.lru_cache(maxsize=64)
def found_in(patterns: tuple[str, ...], names: tuple[str, ...]) -> list[list[bool]]:
    """Returns a list of booleans per pattern, True for each name that it matches.

    Patterns with repetition or many alternatives run in a confined process with a time budget.

    Raises:
      ValueError: an invalid regular expression.
      UserError: an invalid regular expression in the confined process, or an exceeded budget.
    """
    if all(_WITHOUT_REPEATS.fullmatch(pattern) and pattern.count("|") <= _FEW for pattern in patterns):
        return pattern_search.search([*patterns], [*names])
    process = Confined(pattern_search.__file__, "search", seconds=5, gib=1)
    try:
        return process.call("", patterns=[*patterns], names=[*names])
    finally:
        process.close()
