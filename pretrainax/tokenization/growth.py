"""Bounds how much longer a tokenizer.json of somebody else makes a text before it is split.

Its normalizer may replace each letter by a thousand, several times over, until the library tokenizers has no memory and
ends the process. The bound follows from the file; texts are not looked at.
"""

import base64
import binascii
import math

from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject

_MOST = 1000.0  # bytes of a byte; those of published files stay below 250
# Bytes of UTF-8 that a byte becomes at most: compatibility forms of Unicode (UAX 15, section 9; U+FDFA is 33 of 3), the
# others' own documentation. What has no row keeps the length or shortens it.
_OF_KIND = {"NFKC": 11.0, "NFKD": 11.0, "NFC": 3.0, "NFD": 3.0, "StripAccents": 3.0, "Lowercase": 3.0}
_OF_KIND |= {"ByteLevel": 2.0, "BertNormalizer": 12.0, "Metaspace": 3.0}


def check_growth(described: JsonObject) -> None:
    """Raises UserError where a tokenizer.json makes more than `_MOST` bytes of one: its normalizer, or its decoder."""
    for part in ("normalizer", "decoder"):
        if (growth := _growth(described.get(part))) > _MOST:
            raise UserError(
                f"the {part} of tokenizer.json makes up to {growth:,.0f} bytes of one byte of text, at most "
                f"{_MOST:,.0f} are read: replace fewer characters by long texts, or take another tokenizer"
            )


def _growth(part: object) -> float:
    """Returns how many bytes a normalizer or a decoder makes of one, at most."""
    if not isinstance(part, dict):
        return 1.0
    kind = part.get("type")
    if kind == "Sequence":
        parts = part.get("normalizers") or part.get("decoders") or ()
        return math.prod(map(_growth, parts if isinstance(parts, list) else ()))
    if kind == "Replace":
        pattern, content = part.get("pattern"), len(str(part.get("content", "")).encode(errors="replace"))
        text = pattern.get("String") if isinstance(pattern, dict) else None
        shortest = len(text.encode(errors="replace")) if isinstance(text, str) else 0  # a Regex may match nothing
        return max(1.0, content / shortest) if shortest else 1.0 + content
    if kind == "Prepend":
        return 1.0 + len(str(part.get("prepend", "")).encode(errors="replace"))
    if kind == "Precompiled":
        return _longest(str(part.get("precompiled_charsmap") or ""))
    return _OF_KIND.get(str(kind), 1.0)


def _longest(charsmap: str) -> float:
    """Returns the longest text that SentencePiece's table of characters puts in the place of one.

    It is a trie, whose bytes the first four count, and the texts, each with a zero behind it.
    """
    try:
        content = base64.b64decode(charsmap)
    except binascii.Error:
        return 1.0  # which the library refuses
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return float(max(map(len, texts.split(b"\0")), default=1)) or 1.0
