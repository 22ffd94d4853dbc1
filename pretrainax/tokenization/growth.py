"""Limits the factor by which an untrusted tokenizer.json's normalizer or decoder can lengthen a text.

A malicious normalizer may replace each letter by a thousand letters, repeatedly, until the `tokenizers` library runs
out of memory and the process ends. The check depends only on the file, not on the text.
"""

import base64
import binascii
import math

from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject

_MAX_GROWTH = 1000.0  # output bytes per byte of text; published files stay below 250
# Kind of a normalizer or decoder -> maximum output bytes per byte of UTF-8 text. Sources: UAX 15, section 9, for the
# Unicode normalization forms (U+FDFA grows from 3 to 33 bytes), and the documentation of the other kinds. Kinds that
# are not listed here never lengthen a text.
_GROWTH_OF_KIND = {"NFKC": 11.0, "NFKD": 11.0, "NFC": 3.0, "NFD": 3.0, "StripAccents": 3.0, "Lowercase": 3.0}
_GROWTH_OF_KIND |= {"ByteLevel": 2.0, "BertNormalizer": 12.0, "Metaspace": 3.0}


def check_growth(described: JsonObject) -> None:
    """Raises UserError if the normalizer or decoder may output more than `_MAX_GROWTH` bytes per byte of text.

    Args:
      described: the parsed tokenizer.json.
    """
    for component in ("normalizer", "decoder"):
        if (growth := _max_growth(described.get(component))) > _MAX_GROWTH:
            raise UserError(
                f"the {component} of tokenizer.json makes up to {growth:,.0f} bytes of one byte of text, the limit "
                f"is {_MAX_GROWTH:,.0f}: use shorter replacements, or another tokenizer"
            )


def _max_growth(component: object) -> float:
    """Returns an upper bound on the bytes that a tokenizer.json's normalizer or decoder outputs per byte of text."""
    if not isinstance(component, dict):
        return 1.0
    kind = component.get("type")
    if kind == "Sequence":
        components = component.get("normalizers") or component.get("decoders") or ()
        return math.prod(map(_max_growth, components if isinstance(components, list) else ()))
    if kind == "Replace":
        pattern, content = component.get("pattern"), len(str(component.get("content", "")).encode(errors="replace"))
        match = pattern.get("String") if isinstance(pattern, dict) else None
        shortest_match = (
            len(match.encode(errors="replace")) if isinstance(match, str) else 0
        )  # a Regex may match the empty string
        return max(1.0, content / shortest_match) if shortest_match else 1.0 + content
    if kind == "Prepend":
        return 1.0 + len(str(component.get("prepend", "")).encode(errors="replace"))
    if kind == "Precompiled":
        return _longest_replacement(str(component.get("precompiled_charsmap") or ""))
    return _GROWTH_OF_KIND.get(str(kind), 1.0)


def _longest_replacement(charsmap: str) -> float:
    """Returns the length in bytes of the longest replacement in a base64-encoded SentencePiece character map.

    A character map consists of the size of a trie (four bytes), the trie itself, and the zero-terminated replacements.
    """
    try:
        content = base64.b64decode(charsmap)
    except binascii.Error:
        return 1.0  # the library itself raises an error for this map
    replacements = content[4 + int.from_bytes(content[:4], "little") :]
    return float(max(map(len, replacements.split(b"\0")), default=1)) or 1.0
