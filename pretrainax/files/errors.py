"""Mistakes of a user, each told in one line."""

import difflib
import typing


class UserError(Exception):
    """A mistake in the config or the input. Main prints it as one line, without a traceback, and exits with 2."""

    exit_code = 2


class RunFailed(UserError):
    """A run that cannot go on through no mistake in a field: one line too, and exit code 1."""

    exit_code = 1


def printable(text: str) -> str:
    """Returns a text on one line, without characters that control a terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def shortened(text: str) -> str:
    """Returns what an error line has of a text that a user gave: all of it, or the beginning of a very long one."""
    return text if len(text) <= 200 else f"{text[:100]}… ({len(text):,} characters)"


def nearest(name: str, allowed: typing.Iterable[str]) -> str:
    """The end of an error line: what is allowed, nearest names first; `nearest("stpes", ["steps"])`."""
    allowed = sorted(allowed)
    close = difflib.get_close_matches(name, allowed, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"allowed: {', '.join(allowed) or 'nothing'}"
