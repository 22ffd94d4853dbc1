"""Plain text."""

import codecs
import collections
import dataclasses
import os
from collections.abc import Iterator
from typing import ClassVar, Optional

from pretrainax.config import Experiment, UserError
from pretrainax.data import files
from pretrainax.data.line_ends import plain
from pretrainax.data.sources.base import Source

_LONGEST_LINE = 1 << 20  # a longer one is cut


@dataclasses.dataclass
class TextFiles(Source):
    """UTF-8 text, one document a file (a file of over 16 MB: one document for each 16 MB, cut at a line's end).

    `path` is a file, a folder (every .txt, plain, .gz, .xz or .zst, below it) or a glob. Without `valid_path`, the
    last `valid_fraction` of the characters of each file are for validation; to find them, the content of an archive
    is read twice more. An archive is one shard. Byte-order marks and the carriage returns of Windows' line ends are
    taken off and counted.
    """

    path: str  # a file, a folder or a glob
    valid_path: Optional[str] = None  # files for validation; None: a share of `path`
    valid_fraction: float = 0.1  # of the characters of each file, its end, where there is no valid_path

    endings: ClassVar[tuple[str, ...]] = files.with_archives(".txt")  # of the files that a folder is searched for

    @property
    def holds_out(self) -> bool:
        return self.valid_path is None

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from files.path_problems(self)
        yield from files.fraction_problems(self)

    def fingerprint(self) -> str:
        return files.fingerprint(self, files.settings_of(self), self.endings)

    def shards(self, split: str) -> list[files.Part]:
        wanted = None if self.valid_path is not None else split
        shards = []
        for file in files.find(self, "train" if wanted else split, self.endings):
            if files.is_archive(file):
                shards.append(files.Part(file, 0, None, wanted))
            else:
                start, stop = self._range(file, wanted)
                shards += files.ranges(file, start, stop or os.path.getsize(file), _LONGEST_LINE)
        return shards

    def read(self, shard: files.Part, skipped: collections.Counter) -> Iterator[str]:
        path, start, stop, split = shard
        if split is not None:
            start, stop = self._range(path, split)
        for offset, content in files.pieces(path, start, stop, _LONGEST_LINE):
            try:
                yield plain(content.decode("utf-8"), skipped)
            except UnicodeDecodeError as e:
                if offset == 0 and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise UserError(f"{path} is UTF-16, not UTF-8: iconv -f UTF-16 -t UTF-8 makes it readable") from e
                line = files.line_number(path, offset + e.start)
                raise UserError(f"{path}:{line}: byte 0x{content[e.start]:02x} is not UTF-8 ({e.reason})") from e

    def _range(self, file: str, split: Optional[str]) -> tuple[int, Optional[int]]:
        """Returns the bytes (start, stop) of a split; stop is None where that is the file's end."""
        if split is None:
            return 0, None
        boundary = files.byte_of_character(file, 1 - self.valid_fraction)
        return (0, boundary) if split == "train" else (boundary, None)
