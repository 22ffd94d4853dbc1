"""Finds the files of data sources, computes their fingerprints, opens archives, and splits large files at line ends."""

import codecs
import collections
import concurrent.futures
import contextlib
import functools
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional, Union, cast

import numpy as np

from pretrainax.config import Choice, UserError, to_json
from pretrainax.files.extras import import_extra
from pretrainax.files.paths import is_url
from pretrainax.files.regular_files import check_regular
from pretrainax.storage.places import local_path

SHARD_BYTES = 1 << 24  # bytes of a file per shard
ARCHIVES = {".gz": "gzip", ".xz": "xz", ".zst": "zstandard"}  # file extension -> compression format
STANDARD_INPUT = "-"  # as a path: standard input, read once from start to end
MAX_RECORD_BYTES = 1 << 29  # default limit for one record
_CHUNK = 1 << 22  # bytes read at a time


class FileShard(NamedTuple):
    """Describes a shard: a range of a file, or a range of a dataset's split."""

    path_or_split: str  # path of the file, or name of the split
    start: int  # first byte, row or record
    stop: Optional[int]  # byte, row or record after the last; None: the end of the file, for archives
    split: Optional[str] = None  # "train" or "valid": only the documents of this split; None: all documents


def digest(*parts: Any) -> str:
    """Computes a hash (BLAKE2b, 128 bits, hexadecimal) of values that JSON can represent."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def find_files(source: Any, split: str, endings: tuple[str, ...]) -> list[str]:
    """Returns the sorted paths of the files in `source.path` (split "train") or `source.valid_path` (other splits).

    The field may be a file, a folder or a glob. A folder selects all files in it and its subfolders whose name ends in
    one of `endings`, in lower or upper case. If some files of a folder or glob are also in `source.valid_path`, they
    are not training files. A file that a glob or links to folders reach by several paths is returned once.

    Raises:
      UserError: no file matches the field, or it is a folder and there are no `endings`.
    """
    field = "path" if split == "train" else "valid_path"
    path = local_path(os.path.expanduser(getattr(source, field)))
    pattern = path
    if os.path.isdir(path):
        if not endings:
            raise UserError(f"{source.config_path}.{field} is the folder {path!r}, it must be a file or a glob")
        pattern = os.path.join(glob.escape(path), "**", "*")
    elif os.path.exists(path):
        return [path]
    real_folder = functools.cache(os.path.realpath)
    found = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)), reverse=True)
    matches = sorted({(real_folder(os.path.dirname(f)), os.path.basename(f)): f for f in found}.values())
    if pattern != path:
        matches = [f for f in matches if f.lower().endswith(endings)]
    if not matches:
        expected_endings = " or ".join(ending for ending in endings if not is_archive(ending))
        names = f"{expected_endings} file below the folder{_hint(path, found)}" if pattern != path else "such file"
        raise UserError(f"{source.config_path}.{field} is {path!r}: no {names}")
    if split != "train" or source.valid_path is None:
        return matches
    held_out = {os.path.realpath(file) for file in find_files(source, "valid", endings)}
    return [file for file in matches if os.path.realpath(file) not in held_out] or matches


def _hint(folder: str, found: Sequence[str]) -> str:
    """Suggests how to read a folder whose files `found` have other endings than a source expects."""
    if reader := Choice.reader_of(folder):
        return f"; {reader}(path={folder!r}) reads its files"
    endings = collections.Counter(os.path.splitext(file)[1] for file in found).most_common(1)
    return f"; to read other files, set a glob: {os.path.join(folder, '**', f'*{endings[0][0]}')!r}" if endings else ""


def path_problems(source: Any) -> Iterator[str]:
    """Yields an error line if a source's `path` or `valid_path` does not exist or requires another source class."""
    for field in ("path", "valid_path"):
        path = getattr(source, field)
        if path is not None and is_url(path):
            continue  # `find_files` reports objects that the store lacks
        if path is not None and not glob.has_magic(path) and not os.path.exists(os.path.expanduser(path)):
            yield f"{source.config_path}.{field} is {path!r}, which does not exist"
        elif path is not None and (reader := _other_reader(source, os.path.expanduser(path))):
            yield (
                f"{source.config_path}.{field} is {path!r}, which is for {reader}: set {source.config_path} to "
                f"{reader}({field}={path!r})"
            )


def _other_reader(source: Any, path: str) -> Optional[str]:
    """Returns the name of the source class that a file requires, or None if that is the class of `source`.

    The class is determined from the file's name or its first line. If neither is conclusive, returns None.
    """
    if not os.path.isfile(path):
        return None
    class_name, by_name = type(source).__name__, Choice.reader_of(path)
    if class_name == "TextFiles" and by_name is None and begins_with_json(path):
        return "JsonLines"
    if class_name == "JsonLines" and by_name == "TextFiles":  # the content may still be JSON lines
        return None if begins_with_json(path) else by_name
    return None if by_name in (class_name, "TextFiles") else by_name


def begins_with_json(path: str) -> bool:
    """Returns True if the first line of a file is a JSON object, or False if it is not or the file cannot be read."""
    with contextlib.suppress(ValueError, RecursionError, OSError, *BROKEN_ARCHIVE), _open(path) as f:
        return isinstance(json.loads(f.readline(1 << 20).decode("utf-8-sig")), dict)
    return False


def fraction_problems(source: Any) -> Iterator[str]:
    """Yields an error line if a source's `valid_fraction` is not between 0 and 1."""
    if not 0 < source.valid_fraction < 1:
        yield f"{source.config_path}.valid_fraction is {source.valid_fraction}, it must be between 0 and 1"


def settings_of(source: Any) -> dict[str, Any]:
    """Returns the fields that determine a source's text, by name.

    Fields added in later versions of PretrainAX are omitted if they have their default value, so that corpora prepared
    by earlier versions stay valid.
    """
    settings = to_json(source)
    for name, default in (("max_record_bytes", MAX_RECORD_BYTES), ("encoding", "utf-8")):
        if settings.get(name) == default:
            del settings[name]
    return settings


def fingerprint(source: Any, settings: dict, endings: tuple[str, ...]) -> str:
    """Computes a hash of a source's settings and of the content of its files (about 1 GB/s per core).

    Content is hashed because file sizes and modification times do not reveal every change.
    """
    files = find_files(source, "train", endings)
    held_out = find_files(source, "valid", endings) if source.valid_path is not None else []
    hashes = hashes_of([*files, *held_out])
    settings = {name: value for name, value in settings.items() if name not in ("path", "valid_path")}
    return digest(settings, hashes[: len(files)], hashes[len(files) :])


def hashes_of(paths: list[str]) -> list[str]:
    """Hashes the content of each file, using several threads; returns the hashes in the order of `paths`."""
    with concurrent.futures.ThreadPoolExecutor() as threads:  # hashing releases the GIL
        return list(threads.map(_hash_file, paths))


def _hash_file(path: str) -> str:
    check_regular(path)
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "blake2b").hexdigest()


def fraction(content: bytes) -> float:
    """Returns a pseudo-random number in [0, 1) that depends only on `content`."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64


# --- archives ------------------------------------------------------------------------------------------------------


class _BrokenArchive(Exception):
    pass


BROKEN_ARCHIVE = (_BrokenArchive, EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


def is_archive(path: str) -> bool:
    """Returns True if a file name has the extension of a compressed file, for example .gz."""
    return path.lower().endswith(tuple(ARCHIVES))


def with_archives(*endings: str) -> tuple[str, ...]:
    """Returns each ending alone and with each extension of compressed files: ".txt" -> (".txt", ".txt.gz", ...)."""
    return tuple(ending + archive for ending in endings for archive in ("", *ARCHIVES))


Stream = Union[io.BufferedReader, gzip.GzipFile, lzma.LZMAFile]  # the type that `open_decompressed` yields


@contextlib.contextmanager
def open_decompressed(path: str) -> Iterator[Stream]:
    """Opens a file for reading bytes, decompressing it if it is an archive.

    Raises:
      UserError: the archive is damaged. The message contains the path and the line.
    """
    try:
        with _open(path) as f:
            yield f
    except BROKEN_ARCHIVE as e:
        kind = ARCHIVES[os.path.splitext(path)[1]]
        raise UserError(f"{path}:{_broken_line(path)}: the {kind} file is broken here ({e})") from e


def _open(path: str) -> Stream:
    """Returns a byte stream of a file, decompressed if the file is an archive; "-" is standard input."""
    if path == STANDARD_INPUT:
        return cast(io.BufferedReader, sys.stdin.buffer)
    check_regular(path)
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rb")
    if path.lower().endswith(".xz"):
        return lzma.open(path, "rb")
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_Generated(_zstandard_frames(path)), 1 << 20)
    return open(path, "rb")


def _broken_line(path: str) -> int:
    """Returns the 1-based number of the line at which an archive is damaged."""
    line = 1
    with contextlib.suppress(*BROKEN_ARCHIVE), _open(path) as f:
        while chunk := f.read1(1 << 16):  # `read` would discard the bytes before the damage
            line += chunk.count(b"\n")
    return line


class _Generated(io.RawIOBase):
    """A file whose content an iterator generates, in chunks of any size."""

    def __init__(self, content: Iterator[bytes]):
        self._content, self._unread = content, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unread:
            content = next(self._content, None)
            if content is None:
                return 0
            self._unread = memoryview(content)
        size = min(len(buffer), len(self._unread))
        buffer[:size], self._unread = self._unread[:size], self._unread[size:]
        return size


def _zstandard_frames(path: str) -> Iterator[bytes]:
    """Yields the decompressed content of all frames in a zstandard file.

    The reader in the `zstandard` package does not detect truncated files.
    """
    zstandard = import_extra("zstandard", "data", f"{path} is compressed and")
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # supports zstd --long=31
    frame, unused = None, b""
    with open(path, "rb") as f:
        while compressed := unused or f.read(1 << 9):  # small, because the content may be 30,000 times as large
            frame = frame or decompressor.decompressobj()
            try:
                yield frame.decompress(compressed)
            except zstandard.ZstdError as e:
                raise _BrokenArchive(e) from e
            unused = frame.unused_data
            frame = None if frame.eof else frame
    if frame is not None:
        raise _BrokenArchive("the file ends inside a frame")


# --- encodings -----------------------------------------------------------------------------------------------------

_MARKS = {  # byte-order mark -> encoding; the mark of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8",
}


def is_utf8_encoding(encoding: str) -> bool:
    """Returns True if an encoding is UTF-8, with or without a byte-order mark."""
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


@contextlib.contextmanager
def open_as_utf8(path: str, encoding: str, advice: str) -> Iterator[Stream]:
    """Opens a file like `open_decompressed`, and converts its text from `encoding` to UTF-8.

    A byte that the encoding does not define becomes a byte that is not UTF-8, so that it makes only its own record
    invalid.

    Args:
      advice: the end of error messages about a wrong encoding.

    Raises:
      UserError: the file is damaged, begins with the byte-order mark of another encoding, or ends inside a character.
    """
    encoding = codecs.lookup(encoding).name
    with open_decompressed(path) as f:
        start = f.peek(4) if hasattr(f, "peek") else b""  # standard input may be any stream
        mark = next((name for mark, name in _MARKS.items() if start.startswith(mark)), "")
        if mark and not encoding.startswith(mark):
            raise UserError(f"{path} begins with the byte-order mark of {mark.upper()}; {advice}")
        try:
            yield f if is_utf8_encoding(encoding) else io.BufferedReader(_Generated(_utf8_chunks(f, encoding)))
        except UnicodeError as e:  # such as half a character of UTF-16
            raise UserError(f"{path}: {e}; {advice}") from e


def _utf8_chunks(f: Stream, encoding: str) -> Iterator[bytes]:
    decoder, is_end = codecs.getincrementaldecoder(encoding)("surrogateescape"), False
    while not is_end:
        is_end = not (chunk := f.read(1 << 16))
        yield decoder.decode(chunk, is_end).encode("utf-8", "surrogatepass")


# --- lines and characters ------------------------------------------------------------------------------------------


def _chunks(path: str, stop: int = sys.maxsize) -> Iterator[bytes]:
    """Yields the content of a file up to byte `stop`, in chunks, decompressing it if it is an archive."""
    with open_decompressed(path) as f:
        while stop > 0 and (chunk := f.read(min(_CHUNK, stop))):
            stop -= len(chunk)
            yield chunk


def line_number(path: str, offset: int) -> int:
    """Returns the 1-based number of the line that contains the byte at `offset` in the decompressed content."""
    return 1 + sum(chunk.count(b"\n") for chunk in _chunks(path, offset))


def byte_of_character(path: str, fraction: float) -> int:
    """Returns the byte offset of character number int(fraction * characters) in a UTF-8 file."""
    remaining, offset = int(fraction * sum(int(_character_starts(chunk).sum()) for chunk in _chunks(path))), 0
    for chunk in _chunks(path):
        starts = np.flatnonzero(_character_starts(chunk))
        if len(starts) > remaining:
            return offset + int(starts[remaining])
        remaining, offset = remaining - len(starts), offset + len(chunk)
    return offset


def _character_starts(chunk: bytes) -> np.ndarray:
    return (np.frombuffer(chunk, np.uint8) & 0xC0) != 0x80  # all bytes except continuation bytes


def ranges(path: str, start: int, stop: int, longest_line: int) -> Iterator[FileShard]:
    """Yields shards of about SHARD_BYTES that cover the bytes from `start` to `stop` of a file, cut at line ends.

    A line that continues for more than `longest_line` bytes after SHARD_BYTES is cut between two characters; if
    `longest_line` is -1, no line is cut.
    """
    with open(path, "rb") as f:
        while start < stop:
            f.seek(min(start + SHARD_BYTES, stop))
            if f.tell() < stop and longest_line < 0:
                skip_line(f)
            elif f.tell() < stop:
                _rest_of_line(f, longest_line)
            end = min(f.tell(), stop)
            yield FileShard(path, start, end)
            start = end


def pieces(path: str, start: int, stop: Optional[int], longest_line: int) -> Iterator[tuple[int, bytes]]:
    """Yields the offset and the content of each piece of a file, cut as in `ranges`; decompresses archives.

    Offsets are in bytes of the decompressed content. If `stop` is None, reads to the end of the file.
    """
    stop = sys.maxsize if stop is None else stop
    with open_decompressed(path) as f:
        _skip(f, start)
        while piece := f.read(min(SHARD_BYTES, stop - start)):
            remaining = stop - start - len(piece)
            if remaining:
                piece += _rest_of_line(f, min(longest_line, remaining))
            yield start, piece
            start += len(piece)


def _skip(f: Stream, count: int) -> None:
    """Moves a stream from its start to byte `count`, reading through the bytes if the stream cannot seek."""
    if f.seekable():
        f.seek(count)
        return
    while count and (chunk := f.read(min(_CHUNK, count))):
        count -= len(chunk)


def skip_line(f: Stream) -> None:
    """Moves a stream to the end of the current line, reading in chunks so that a long line is never held in memory."""
    while (chunk := f.readline(_CHUNK)) and not chunk.endswith(b"\n"):
        pass


def _rest_of_line(f: Stream, longest_line: int) -> bytes:
    """Reads the rest of the current line, up to about `longest_line` bytes, or without limit if it is -1.

    A longer line is cut between two characters.
    """
    rest = f.readline(longest_line)
    while (f.peek(1)[:1] or b"a")[0] & 0xC0 == 0x80:  # inside a character
        rest += f.read(1)
    return rest
