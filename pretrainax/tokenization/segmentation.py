"""Describes how a tokenizer splits a text, in readable form."""

import json
from collections.abc import Iterator

from pretrainax.reporting.tables import text_table
from pretrainax.reporting.visible import visible
from pretrainax.tokenization.base import Tokenizer


def describe_segmentation(tokenizer: Tokenizer, text: str) -> str:
    """Returns one line per token, or per group of tokens that form one character, and a summary line."""
    ids = tokenizer.encode(text).tolist()
    lines = [(" ".join(map(str, group)), _quoted(tokenizer.decode(group))) for group in _characters(tokenizer, ids)]
    size, decoded = len(text.encode()), tokenizer.decode(ids)
    ratio = f", {size / len(ids):.2f} bytes per token" if ids else ""
    result = "decoding restores the text exactly" if decoded == text else f"decoding gives {_quoted(decoded)}"
    return "\n".join(filter(None, [text_table(lines, "><"), f"{len(ids)} tokens for {size} bytes{ratio}; {result}"]))


def _characters(tokenizer: Tokenizer, ids: list[int]) -> Iterator[list[int]]:
    """Yields runs of ids that end at character boundaries; a character has at most four bytes."""
    start = 0
    while start < len(ids):
        stops = range(start + 1, min(start + 4, len(ids)) + 1)
        stop = next((stop for stop in stops if "\ufffd" not in tokenizer.decode(ids[start:stop])), start + 1)
        yield ids[start:stop]
        start = stop


def _quoted(text: str) -> str:
    return visible(json.dumps(text, ensure_ascii=False))
