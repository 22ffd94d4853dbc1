"""Searches names with regular expressions; runs in a separate process, because a search may never finish."""

import re


def search(patterns: list[str], names: list[str]) -> list[list[bool]]:
    """Returns one list per pattern, with a bool per name: True if the pattern matches a substring of the name.

    Raises:
      ValueError: a pattern is not a valid regular expression.
    """
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except (re.error, OverflowError) as e:
        raise ValueError(f"is not a regular expression ({e})") from e
    return [[bool(pattern.search(name)) for name in names] for pattern in compiled]
