"""Bounds the growth of a text by the normalizer of an untrusted tokenizer.json.

A normalizer may replace each letter by a thousand letters, repeatedly, until the library tokenizers runs out of memory
and ends the process. The bound depends only on the file, not on the text.
"""

import base64
import binascii
import math

from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject

_MAX_GROWTH = 1000.0  # bytes per byte of text; published files stay below 250
# Maximal growth in UTF-8 bytes. Unicode normalization forms: UAX 15, section 9 (U+FDFA grows from 3 to 33 bytes);
# others: their documentation. Kinds that are not listed never lengthen a text.
_GROWTH_OF_KIND = {"NFKC": 11.0, "NFKD": 11.0, "NFC": 3.0, "NFD": 3.0, "StripAccents": 3.0, "Lowercase": 3.0}
_GROWTH_OF_KIND |= {"ByteLevel": 2.0, "BertNormalizer": 12.0, "Metaspace": 3.0}


def check_growth(described: JsonObject) -> None:
    """Raises UserError if the normalizer or decoder of a tokenizer.json makes more than `_MAX_GROWTH` bytes of one."""
    for part in ("normalizer", "decoder"):
        if (growth := _growth(described.get(part))) > _MAX_GROWTH:
            raise UserError(
                f"the {part} of tokenizer.json makes up to {growth:,.0f} bytes of one byte of text, the limit "
                f"is {_MAX_GROWTH:,.0f}: use shorter replacements, or another tokenizer"
            )


def _growth(part: object) -> float:
    """Returns the maximal number of bytes that a normalizer or a decoder makes of one byte."""
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
    return _GROWTH_OF_KIND.get(str(kind), 1.0)


def _longest(charsmap: str) -> float:
    """Returns the length of the longest replacement in SentencePiece's character map, in bytes.

    The map has four bytes with the size of a trie, the trie, and the zero-terminated replacements.
    """
    try:
        content = base64.b64decode(charsmap)
    except binascii.Error:
        return 1.0  # the library rejects it
    replacements = content[4 + int.from_bytes(content[:4], "little") :]
    return float(max(map(len, replacements.split(b"\0")), default=1)) or 1.0
