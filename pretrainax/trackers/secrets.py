"""Masks secrets in text that leaves the machine or is logged: tracked configs, model cards, error messages."""

import base64
import binascii
import collections
import math
import re

MASK = "***"
_SECRET_WORDS = {"token", "secret", "password", "passwd", "key", "apikey", "credential", "credentials", "auth"}
_ASSIGNED_NAMES = (
    r"account_?key|shared_?access_?key|shared_?access_?signature|password|passwd|pwd|client_?secret|private_?key|"
    r"api_?key|secret_?(?:access_?)?key"
)
_PATTERNS = (
    re.compile(r"(?<=://)[^/@\s'\"]+(?=@)"),  # https://user:password@host
    re.compile(r"(?<=[?&])(?:[\w-]*(?:token|secret|password|signature|key|sig|auth)[\w-]*)=[^&\s'\"]+", re.IGNORECASE),
    # Formats of the keys of hubs and clouds: Hugging Face, OpenAI, GitHub, GitLab, AWS, Slack, Google.
    re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|ASIA|xox[abprs]-|AIza|ya29\.)[\w-]{12,}"),
    re.compile(r"(?<=\bBearer )\S+", re.IGNORECASE),
    re.compile(r"\beyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*"),  # JSON web tokens (RFC 7519); eyJ is '{"' in base64
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
)
# Assignments of secrets in connection strings (Azure), environment variables (AWS) and configuration files. Only the
# value of the assignment is masked.
_ASSIGNMENT = re.compile(rf"((?:{_ASSIGNED_NAMES})[\"']?\s*[=:]\s*[\"']?)[^\s;,'\"]+", re.IGNORECASE)
_BASIC = re.compile(r"(?<=\bBasic )[A-Za-z0-9+/]{4,}={0,2}", re.IGNORECASE)
_AWS_SECRET = re.compile(r"(?<![A-Za-z0-9+/=_.-])[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=_.-])")
# Entropy above which a string counts as random, in bits per character. 40 random base64 characters have an entropy of
# 4.8 on average, and below 4.4 once in 10,000 strings. Hexadecimal digests have at most 4, paths of words at most 4.2.
_RANDOM_ENTROPY = 4.4


def masked(text: str) -> str:
    """Replaces everything in a text that looks like a secret with ***."""
    for pattern in _PATTERNS:
        text = pattern.sub(MASK, text)
    text = _ASSIGNMENT.sub(rf"\1{MASK}", text)
    text = _BASIC.sub(lambda match: MASK if _is_user_and_password(match[0]) else match[0], text)
    return _AWS_SECRET.sub(lambda match: MASK if _entropy(match[0]) > _RANDOM_ENTROPY else match[0], text)


def masked_field(path: str, value: str) -> str:
    """Masks secrets in the value of a config field, or the whole value if the field's name suggests a secret.

    Args:
      path: path of the field, such as "data.source.api_key".
    """
    words = set(path.rpartition(".")[2].lower().split("_"))
    return MASK if value and words & _SECRET_WORDS else masked(value)


def _is_user_and_password(text: str) -> bool:
    """Checks whether a text is the base64 encoding of USER:PASSWORD (HTTP Basic authorization, RFC 7617)."""
    try:
        return b":" in base64.b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error:
        return False


def _entropy(text: str) -> float:
    """Computes the Shannon entropy of a text's characters, in bits per character."""
    probabilities = [count / len(text) for count in collections.Counter(text).values()]
    return -sum(p * math.log2(p) for p in probabilities)
