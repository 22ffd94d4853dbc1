"""Defines the errors that commands print as one line, and helpers to format their messages."""

import difflib
import operator
import typing


class UserError(Exception):
    """Raised for an invalid config or input. Commands print its message as one line and exit with status 2."""

    exit_code = 2


class RunFailed(UserError):
    """Raised if a run with a valid config fails. Commands print its message as one line and exit with status 1."""

    exit_code = 1


class Diverged(RunFailed):
    """Raised if a run ends because its loss, its gradients or its outputs are not finite, or because its loss rises."""


def printable(text: str) -> str:
    """Converts a string to one line: whitespace becomes single spaces, other unprintable characters become U+FFFD."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def shortened(text: str) -> str:
    """Shortens user input for an error message: truncates strings of more than 200 characters to 100 characters."""
    return text if len(text) <= 200 else f"{text[:100]}… ({len(text):,} characters)"


def counted(number: typing.SupportsIndex, noun: str) -> str:
    """Formats a number with its noun, singular or plural: "1 step", "2,000 batches"."""
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{operator.index(number):,} {noun}{'' if number == 1 else ending}"


def nearest(name: str, allowed: typing.Iterable[str]) -> str:
    """Formats a hint for an unknown name: the most similar allowed names, or all allowed names if none is similar.

    The hint is the end of an error message: `nearest("stpes", ["steps"])` is "did you mean 'steps'?".
    """
    allowed = sorted(allowed)
    similar = difflib.get_close_matches(name, allowed, n=3, cutoff=0.6)
    if similar:
        return f"did you mean {' or '.join(map(repr, similar))}?"
    return f"allowed: {', '.join(allowed) or 'nothing'}"
