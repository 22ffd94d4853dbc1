"""User errors, reported in one line."""

import difflib
import typing


class UserError(Exception):
    """Invalid config or input. Commands print one line without a traceback and exit with status 2."""

    exit_code = 2


class RunFailed(UserError):
    """A run that failed without an invalid field. Commands print one line and exit with status 1."""

    exit_code = 1


def printable(text: str) -> str:
    """Returns a text as one line without control characters."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def shortened(text: str) -> str:
    """Returns a user's text for an error line; a very long one is truncated."""
    return text if len(text) <= 200 else f"{text[:100]}… ({len(text):,} characters)"


def nearest(name: str, allowed: typing.Iterable[str]) -> str:
    """Returns the end of an error line: the nearest allowed names, or all; `nearest("stpes", ["steps"])`."""
    allowed = sorted(allowed)
    close = difflib.get_close_matches(name, allowed, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"allowed: {', '.join(allowed) or 'nothing'}"
