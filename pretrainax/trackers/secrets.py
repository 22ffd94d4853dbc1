"""Masks secrets in text that leaves the machine or reaches a log: tracked configs, model cards, errors."""

import base64
import binascii
import collections
import math
import re

MASK = "***"
_WORDS = {"token", "secret", "password", "passwd", "key", "apikey", "credential", "credentials", "auth"}
_ASSIGNED = (
    r"account_?key|shared_?access_?key|shared_?access_?signature|password|passwd|pwd|client_?secret|private_?key|"
    r"api_?key|secret_?(?:access_?)?key"
)
_PATTERNS = (
    re.compile(r"(?<=://)[^/@\s'\"]+(?=@)"),  # https://user:password@host
    re.compile(r"(?<=[?&])(?:[\w-]*(?:token|secret|password|signature|key|sig|auth)[\w-]*)=[^&\s'\"]+", re.IGNORECASE),
    # Forms of the keys of hubs and clouds: Hugging Face, OpenAI, GitHub, GitLab, AWS, Slack, Google.
    re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|ASIA|xox[abprs]-|AIza|ya29\.)[\w-]{12,}"),
    re.compile(r"(?<=\bBearer )\S+", re.IGNORECASE),
    re.compile(r"\beyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*"),  # JSON web tokens (RFC 7519); eyJ is '{"' in base64
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
)
# Assignments of secrets in connection strings (Azure), environment variables (AWS) and configuration files. Only the
# value is masked.
_ASSIGNMENT = re.compile(rf"((?:{_ASSIGNED})[\"']?\s*[=:]\s*[\"']?)[^\s;,'\"]+", re.IGNORECASE)
_BASIC = re.compile(r"(?<=\bBasic )[A-Za-z0-9+/]{4,}={0,2}", re.IGNORECASE)
_AWS_SECRET = re.compile(r"(?<![A-Za-z0-9+/=_.-])[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=_.-])")
# Entropy above which a string counts as random, in bits per character. 40 random characters of base64 have 4.8 on
# average, and less than 4.4 once in 10,000. Hexadecimal digests have at most 4, and paths of words at most 4.2.
_RANDOM = 4.4


def masked(text: str) -> str:
    """Returns a text in which *** replaces everything that looks like a secret."""
    for pattern in _PATTERNS:
        text = pattern.sub(MASK, text)
    text = _ASSIGNMENT.sub(rf"\1{MASK}", text)
    text = _BASIC.sub(lambda match: MASK if _is_user_and_password(match[0]) else match[0], text)
    return _AWS_SECRET.sub(lambda match: MASK if _entropy(match[0]) > _RANDOM else match[0], text)


def masked_field(path: str, value: str) -> str:
    """Returns the value of a config field with secrets masked; masks the whole value if the field name means a secret.

    Args:
      path: path of the field, such as "data.source.api_key".
    """
    words = set(path.rpartition(".")[2].lower().split("_"))
    return MASK if value and words & _WORDS else masked(value)


def _is_user_and_password(text: str) -> bool:
    """Returns True if a text is the base64 of USER:PASSWORD (HTTP Basic authorization, RFC 7617)."""
    try:
        return b":" in base64.b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error:
        return False


def _entropy(text: str) -> float:
    """Returns the Shannon entropy of a text's characters, in bits per character."""
    shares = [count / len(text) for count in collections.Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares)
