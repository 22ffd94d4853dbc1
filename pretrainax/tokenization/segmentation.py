"""Shows how a tokenizer splits a text, for people to read."""

import json
from collections.abc import Iterator

from pretrainax.reporting.tables import text_table
from pretrainax.reporting.visible import visible
from pretrainax.tokenization.base import Tokenizer


def describe_segmentation(tokenizer: Tokenizer, text: str) -> str:
    """Writes a line for each token, or for those that make one character together, and one about all of them."""
    ids = tokenizer.encode(text).tolist()
    lines = [(" ".join(map(str, group)), _quoted(tokenizer.decode(group))) for group in _characters(tokenizer, ids)]
    size, back = len(text.encode()), tokenizer.decode(ids)
    ratio = f", {size / len(ids):.2f} a token" if ids else ""
    exact = "the text comes back exactly" if back == text else f"what comes back is {_quoted(back)}"
    return "\n".join(filter(None, [text_table(lines, "><"), f"{len(ids)} tokens of {size} bytes{ratio}; {exact}"]))


def _characters(tokenizer: Tokenizer, ids: list[int]) -> Iterator[list[int]]:
    """Yields runs of ids of which none ends within a character; there are four bytes to a character at most."""
    start = 0
    while start < len(ids):
        stops = range(start + 1, min(start + 4, len(ids)) + 1)
        stop = next((stop for stop in stops if "\ufffd" not in tokenizer.decode(ids[start:stop])), start + 1)
        yield ids[start:stop]
        start = stop


def _quoted(text: str) -> str:
    return visible(json.dumps(text, ensure_ascii=False))
