"""Searches names with regular expressions, in a confined process (`runtime.confined`): some patterns take years."""

import re


def search(patterns: list[str], names: list[str]) -> list[list[bool]]:
    """Returns a list of booleans per pattern, True for each name that it matches; ValueError for an invalid pattern."""
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except (re.error, OverflowError) as e:
        raise ValueError(f"is not a regular expression ({e})") from e
    return [[bool(pattern.search(name)) for name in names] for pattern in compiled]
