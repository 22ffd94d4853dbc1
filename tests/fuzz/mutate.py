"""Damages files slightly: a seed selects the changed bytes, or the changed values of a JSON document."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

_DEEP = 10_000  # levels of nesting
_VALUES: tuple[str, ...] = (  # replacements of a JSON value: huge, negative, of a wrong type, invalid JSON
    *("-1", "0", "1", "2147483648", "9223372036854775808", "-9223372036854775809", "1" + "0" * 40, "1" + "0" * 5000),
    *("1e308", "-1e308", "1e999", "0.5", "NaN", "-Infinity", "null", "true", "false", "[]", "{}", '""', '"\\ud800"'),
    *('"\\u0000"', '"../../etc/passwd"', '"/dev/zero"', '"__import__"', '"a\\u001b[2Jb"', "[null]", '{"": null}'),
    *('["x", 1, {"y": []}]', '"' + "x" * 20_000 + '"', '{"type": "TextFiles"}', '{"type": 3}', '{"type": "Choice"}'),
    *("[" * _DEEP + "]" * _DEEP, '{"a":' * _DEEP + "1" + "}" * _DEEP, "[" * _DEEP),
)
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
_NOT_UTF8 = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\xef\xbb\xbf")


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Makes up to four changes: bit flips, cuts, insertions, swapped or repeated blocks, numbers, invalid UTF-8."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        change = rng.randrange(9)
        if change == 0 and content:
            i = rng.randrange(len(content))
            content = content[:i] + bytes([content[i] ^ 1 << rng.randrange(8)]) + content[i + 1 :]
        elif change == 1:
            content = content[:a]
        elif change == 2:
            content = content[:a] + rng.randbytes(rng.choice((1, 2, 8, 300))) + content[a:]
        elif change == 3:  # swaps two neighbouring blocks
            middle = rng.randint(a, b)
            content = content[:a] + content[middle:b] + content[a:middle] + content[b:]
        elif change == 4:
            content = content[:a] + content[a:b] * 2 + content[b:]
        elif change == 5:
            content = content[:a] + content[min(b, a + 16) :]
        elif change == 6:
            width = rng.choice((1, 2, 4, 8))
            number = (rng.choice(_NUMBERS) & ((1 << 8 * width) - 1)).to_bytes(width, "little")
            content = content[:a] + number + content[a + width :]
        elif change == 7:
            content = content[:a] + rng.choice(_NOT_UTF8) + content[a:]
        else:
            content = re.sub(rb"[0-9]+", lambda _: rng.choice((b"-1", b"0", b"9" * 30)), content[a:], count=1)
    return content


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    """Changes one to three values, keys or items of a JSON document; in 40 % of the calls, bytes instead."""
    if rng.random() < 0.4:
        return mutate_bytes(content, rng)
    document, marks = json.loads(content), {}
    for _ in range(rng.choice((1, 1, 2, 3))):
        holders = [x for x in _walk(document) if x]
        if not holders:
            break
        # most documents have one big table: in half of the cases, this prefers a smaller one
        holder = min(rng.sample(holders, min(3, len(holders))), key=len) if rng.random() < 0.5 else rng.choice(holders)
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        change = rng.randrange(8)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, dict):
            holder[rng.choice(("", "type", "x" * 300, "\u0000", key + "x"))] = holder[key]
        elif change == 2 and isinstance(holder, dict):
            mark = f"\u00a7{len(marks)}\u00a7"
            marks[f'"{mark}"'] = f"{json.dumps(holder[key])}, {json.dumps(key)}: {rng.choice(_VALUES)}"
            holder[key] = mark
        elif change == 3 and isinstance(holder, list):
            holder.insert(key, holder[key])
        else:
            mark = f"\u00a7{len(marks)}\u00a7"
            marks[f'"{mark}"'] = rng.choice(_VALUES)
            holder[key] = mark
    text = json.dumps(document, ensure_ascii=False)
    for mark, value in reversed(marks.items()):
        text = text.replace(mark, value)
    return text.encode("utf-8", "surrogatepass")


def _walk(document: Any) -> list:
    """Returns all lists and objects of a document."""
    found, ahead = [], [document]
    while ahead:
        node = ahead.pop()
        if isinstance(node, (list, dict)):
            found.append(node)
            ahead += node.values() if isinstance(node, dict) else node
    return found


def mutate_lines(content: bytes, rng: random.Random) -> bytes:
    """Changes one line of a JSON Lines file."""
    lines = content.splitlines(keepends=True)
    i = rng.randrange(len(lines))
    lines[i] = mutate_json(lines[i], rng) + b"\n" * rng.randrange(2)
    return b"".join(lines)


def mutate_header(content: bytes, rng: random.Random) -> bytes:
    """Changes the JSON header of a safetensors file and its length."""
    length = int.from_bytes(content[:8], "little")
    header = mutate_json(content[8 : 8 + length], rng)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def within(unpack: Callable[[bytes], bytes], pack: Callable[[bytes], bytes], mutate: Callable) -> Callable:
    """Returns a mutation of an archive: half of the calls change its content, the others its bytes."""

    def mutate_archive(content: bytes, rng: random.Random) -> bytes:
        return mutate_bytes(content, rng) if rng.random() < 0.5 else pack(mutate(unpack(content), rng))

    return mutate_archive
