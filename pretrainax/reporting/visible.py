"""Shows text of others on a terminal: nothing in it moves the cursor, sets colours, or turns the order of letters."""

_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_HIDDEN = (
    *range(0x80, 0xA0),  # C1: 0x9B alone begins an escape sequence
    *range(0x2028, 0x202F),  # other ends of lines; marks that turn the direction of what follows
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # surrogates, which no terminal can be sent
)
_SIGNS = _PICTURES | {code: f"<U+{code:04X}>" for code in _HIDDEN}


def visible(text: str) -> str:
    """Returns the text with a sign for each character that a terminal would obey: ESC as "␛", U+202E as "<U+202E>".

    Line breaks and tabs stay.
    """
    return text.translate(_SIGNS)
