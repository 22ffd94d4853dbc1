"""What sources that read files share: which files, their fingerprint, and cutting big ones at lines and characters."""

import concurrent.futures
import glob
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError

SHARD_BYTES = 1 << 24  # of one file in one shard
_CHUNK = 1 << 22  # bytes read at a time


class FileRange(NamedTuple):
    path: str
    start: int  # byte
    stop: int


def digest(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def find(source: Any, split: str, endings: tuple[str, ...]) -> list[str]:
    """The sorted files of a `path` or `valid_path`: a file, a folder or a glob."""
    field = "path" if split == "train" else "valid_path"
    path = os.path.expanduser(getattr(source, field))
    pattern = path
    if os.path.isdir(path):
        pattern = os.path.join(glob.escape(path), "**", "*")
    elif os.path.exists(path):
        return [path]
    found = [f for f in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(f)]
    if pattern != path:
        found = [f for f in found if f.endswith(endings)]
    if not found:
        names = f"{' or '.join(endings)} file below the folder" if pattern != path else "such file"
        raise UserError(f"config.data.source.{field} is {path!r}: no {names}")
    return found


def problems(source: Any) -> Iterator[str]:
    for field in ("path", "valid_path"):
        path = getattr(source, field)
        if path is not None and not glob.has_magic(path) and not os.path.exists(os.path.expanduser(path)):
            yield f"config.data.source.{field} is {path!r}, which does not exist"
    if not 0 < source.valid_fraction < 1:
        yield f"config.data.source.valid_fraction is {source.valid_fraction}, it must be between 0 and 1"


def fingerprint(source: Any, settings: dict, endings: tuple[str, ...]) -> str:
    """Of the settings and the whole content of the files (about 1 GB/s a core): times and sizes miss changes."""
    files = find(source, "train", endings)
    held_out = find(source, "valid", endings) if source.valid_path is not None else []
    with concurrent.futures.ThreadPoolExecutor() as threads:  # hashing lets other threads run
        hashes = list(threads.map(_hash_file, [*files, *held_out]))
    settings = {name: value for name, value in settings.items() if name not in ("path", "valid_path")}
    return digest(settings, hashes[: len(files)], hashes[len(files) :])


def _hash_file(path: str) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "blake2b").hexdigest()


def fraction(content: bytes) -> float:
    """A number in [0, 1) that depends on the content alone."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64


def _chunks(path: str, stop: Optional[int] = None) -> Iterator[bytes]:
    left = os.path.getsize(path) if stop is None else stop
    with open(path, "rb") as f:
        while left > 0 and (chunk := f.read(min(_CHUNK, left))):
            left -= len(chunk)
            yield chunk


def line_number(path: str, offset: int) -> int:
    """The line, from 1, of the byte at `offset`."""
    return 1 + sum(chunk.count(b"\n") for chunk in _chunks(path, offset))


def byte_of_character(path: str, fraction: float) -> int:
    """The byte at which character int(fraction * characters) of a UTF-8 file starts."""
    counts = [int(_character_starts(chunk).sum()) for chunk in _chunks(path)]
    wanted, before = int(fraction * sum(counts)), 0
    for i, (chunk, count) in enumerate(zip(_chunks(path), counts, strict=True)):
        if before + count > wanted:
            return i * _CHUNK + int(np.flatnonzero(_character_starts(chunk))[wanted - before])
        before += count
    return os.path.getsize(path)


def _character_starts(chunk: bytes) -> np.ndarray:
    return (np.frombuffer(chunk, np.uint8) & 0xC0) != 0x80  # all but continuation bytes


def ranges(path: str, start: int, stop: int, longest_line: int) -> Iterator[FileRange]:
    """Cuts bytes into ranges of about SHARD_BYTES, at a line's end; lines over `longest_line` bytes too (-1: never)."""
    with open(path, "rb") as f:
        while start < stop:
            f.seek(min(start + SHARD_BYTES, stop))
            if f.tell() < stop:
                f.readline(longest_line)
                while (f.peek(1)[:1] or b"a")[0] & 0xC0 == 0x80:  # inside a character
                    f.read(1)
            end = min(f.tell(), stop)
            yield FileRange(path, start, end)
            start = end
