"""Looks regular expressions up in names, in a process of its own (`runtime.confined`): some take years."""

import re


def search(patterns: list[str], names: list[str]) -> list[list[bool]]:
    """Returns for each pattern in which names it is found; raises ValueError for one that is no regular expression."""
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except (re.error, OverflowError) as e:
        raise ValueError(f"is no regular expression ({e})") from e
    return [[bool(pattern.search(name)) for name in names] for pattern in compiled]
