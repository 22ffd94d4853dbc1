"""Formats a text's segmentation into tokens as a readable table."""

import json
from collections.abc import Iterator

from pretrainax.files.errors import counted
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.visible import visible
from pretrainax.tokenization.base import Tokenizer


def describe_segmentation(tokenizer: Tokenizer, text: str) -> str:
    """Formats the tokens of a text as a table, followed by a line with the number of tokens and bytes.

    Each line has the id and the text of one token. Tokens that together form a single character share a line.
    """
    ids = tokenizer.encode(text).tolist()
    lines = [
        (" ".join(map(str, group)), _quote(tokenizer.decode(group))) for group in _group_by_character(tokenizer, ids)
    ]
    size, decoded = len(text.encode()), tokenizer.decode(ids)
    ratio = f", {size / len(ids):.2f} bytes per token" if ids else ""
    result = "decoding restores the text exactly" if decoded == text else f"decoding gives {_quote(decoded)}"
    sizes = f"{counted(len(ids), 'token')} for {counted(size, 'byte')}{ratio}; {result}"
    return "\n".join(filter(None, [text_table(lines, "><"), sizes]))


def _group_by_character(tokenizer: Tokenizer, ids: list[int]) -> Iterator[list[int]]:
    """Yields groups of one to four consecutive ids that end at character boundaries.

    Four ids suffice, because a character has at most four UTF-8 bytes.
    """
    start = 0
    while start < len(ids):
        stops = range(start + 1, min(start + 4, len(ids)) + 1)
        stop = next((stop for stop in stops if "\ufffd" not in tokenizer.decode(ids[start:stop])), start + 1)
        yield ids[start:stop]
        start = stop


def _quote(text: str) -> str:
    return visible(json.dumps(text, ensure_ascii=False))
