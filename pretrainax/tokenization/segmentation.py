"""Describes in readable form how a tokenizer splits a text into tokens."""

import json
from collections.abc import Iterator

from pretrainax.reporting.tables import text_table
from pretrainax.reporting.visible import visible
from pretrainax.tokenization.base import Tokenizer


def describe_segmentation(tokenizer: Tokenizer, text: str) -> str:
    """Returns a table of the tokens of a text, and a line with the number of tokens and bytes.

    The table has one line per token, with id and text. Tokens that together form one character share a line.
    """
    ids = tokenizer.encode(text).tolist()
    lines = [(" ".join(map(str, group)), _quoted(tokenizer.decode(group))) for group in _characters(tokenizer, ids)]
    size, decoded = len(text.encode()), tokenizer.decode(ids)
    ratio = f", {size / len(ids):.2f} bytes per token" if ids else ""
    result = "decoding restores the text exactly" if decoded == text else f"decoding gives {_quoted(decoded)}"
    return "\n".join(filter(None, [text_table(lines, "><"), f"{len(ids)} tokens for {size} bytes{ratio}; {result}"]))


def _characters(tokenizer: Tokenizer, ids: list[int]) -> Iterator[list[int]]:
    """Divides ids into groups that end at character boundaries, of at most four ids each.

    Four ids suffice, because a character has at most four bytes.
    """
    start = 0
    while start < len(ids):
        stops = range(start + 1, min(start + 4, len(ids)) + 1)
        stop = next((stop for stop in stops if "\ufffd" not in tokenizer.decode(ids[start:stop])), start + 1)
        yield ids[start:stop]
        start = stop


def _quoted(text: str) -> str:
    return visible(json.dumps(text, ensure_ascii=False))
