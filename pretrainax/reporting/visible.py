"""Escapes untrusted text for terminals, so that it cannot move the cursor, set colors or reverse the reading order."""

_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_HIDDEN = (
    *range(0x80, 0xA0),  # C1: 0x9B alone begins an escape sequence
    *range(0x2028, 0x202F),  # line separators, and characters that change the direction of the text
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # surrogates, which cannot be encoded
)
_SYMBOLS = _PICTURES | {code: f"<U+{code:04X}>" for code in _HIDDEN}


def visible(text: str) -> str:
    """Replaces each terminal control character with a visible symbol: ESC with "␛", U+202E with "<U+202E>".

    Line breaks and tabs are kept.
    """
    return text.translate(_SYMBOLS)
