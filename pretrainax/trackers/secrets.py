"""Masks what may be secret in what is sent to trackers: passwords in URLs, fields that are named after keys."""

import re

MASK = "***"
_WORDS = {"token", "secret", "password", "passwd", "key", "apikey", "credential", "credentials", "auth"}
_PATTERNS = (
    re.compile(r"(?<=://)[^/@\s'\"]+(?=@)"),  # https://user:password@host
    re.compile(r"(?<=[?&])(?:[\w-]*(?:token|secret|password|signature|key|sig|auth)[\w-]*)=[^&\s'\"]+", re.IGNORECASE),
    # The forms in which hubs and clouds hand out keys: Hugging Face, OpenAI, GitHub, GitLab, AWS, Slack, Google.
    re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|ASIA|xox[abprs]-|AIza)[\w-]{12,}"),
    re.compile(r"(?<=\bBearer )\S+", re.IGNORECASE),
)


def masked(text: str) -> str:
    """Returns a text in which what looks like a secret is ***; all else stays."""
    for pattern in _PATTERNS:
        text = pattern.sub(MASK, text)
    return text


def masked_field(path: str, value: str) -> str:
    """Returns the text of a field as it may be shown: nothing of one whose name says that it is a secret.

    path: of the field, "data.source.api_key".
    """
    words = set(path.rpartition(".")[2].lower().split("_"))
    return MASK if value and words & _WORDS else masked(value)
