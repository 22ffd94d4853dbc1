"""Limits how much the normalizer or decoder of an untrusted tokenizer.json can lengthen a text.

A normalizer may replace each letter by a thousand letters, repeatedly, until the library tokenizers runs out of memory
and the process ends. The check depends only on the file, not on the text.
"""

import base64
import binascii
import math

from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject

_MAX_GROWTH = 1000.0  # output bytes per byte of text; in published files, the maximum is below 250
# Kind of a normalizer or decoder -> maximum output bytes per byte of UTF-8 text. Sources: UAX 15, section 9, for the
# Unicode normalization forms (U+FDFA grows from 3 to 33 bytes), and the documentation of the other kinds. Kinds that
# are not listed never lengthen a text.
_GROWTH_OF_KIND = {"NFKC": 11.0, "NFKD": 11.0, "NFC": 3.0, "NFD": 3.0, "StripAccents": 3.0, "Lowercase": 3.0}
_GROWTH_OF_KIND |= {"ByteLevel": 2.0, "BertNormalizer": 12.0, "Metaspace": 3.0}


def check_growth(described: JsonObject) -> None:
    """Raises UserError if the normalizer or decoder of a tokenizer.json may return over `_MAX_GROWTH` bytes per byte.

    Args:
      described: the content of the tokenizer.json.
    """
    for part in ("normalizer", "decoder"):
        if (growth := _growth(described.get(part))) > _MAX_GROWTH:
            raise UserError(
                f"the {part} of tokenizer.json makes up to {growth:,.0f} bytes of one byte of text, the limit "
                f"is {_MAX_GROWTH:,.0f}: use shorter replacements, or another tokenizer"
            )


def _growth(part: object) -> float:
    """Returns the maximum number of output bytes per byte of text, for a normalizer or decoder of a tokenizer.json."""
    if not isinstance(part, dict):
        return 1.0
    kind = part.get("type")
    if kind == "Sequence":
        parts = part.get("normalizers") or part.get("decoders") or ()
        return math.prod(map(_growth, parts if isinstance(parts, list) else ()))
    if kind == "Replace":
        pattern, content = part.get("pattern"), len(str(part.get("content", "")).encode(errors="replace"))
        text = pattern.get("String") if isinstance(pattern, dict) else None
        shortest = len(text.encode(errors="replace")) if isinstance(text, str) else 0  # a Regex may match ""
        return max(1.0, content / shortest) if shortest else 1.0 + content
    if kind == "Prepend":
        return 1.0 + len(str(part.get("prepend", "")).encode(errors="replace"))
    if kind == "Precompiled":
        return _longest(str(part.get("precompiled_charsmap") or ""))
    return _GROWTH_OF_KIND.get(str(kind), 1.0)


def _longest(charsmap: str) -> float:
    """Returns the length in bytes of the longest replacement in a character map of SentencePiece (base64).

    A character map has four bytes with the size of a trie, then the trie, then the zero-terminated replacements.
    """
    try:
        content = base64.b64decode(charsmap)
    except binascii.Error:
        return 1.0  # the library raises an error for this map
    replacements = content[4 + int.from_bytes(content[:4], "little") :]
    return float(max(map(len, replacements.split(b"\0")), default=1)) or 1.0
