"""Implements a data source that reads plain text files."""

import codecs
import collections
import dataclasses
import os
from collections.abc import Iterator
from typing import ClassVar, Optional

from pretrainax.config import Experiment, UserError
from pretrainax.data import files
from pretrainax.data.line_ends import normalize_line_ends
from pretrainax.data.sources.base import Source

_LONGEST_LINE = 1 << 20  # bytes; longer lines may be cut


@dataclasses.dataclass
class TextFiles(Source):
    """Reads UTF-8 text with one document per file. Files of more than 16 MB are cut into documents of about 16 MB.

    Files are cut at line ends, or inside a line if it has more than 1 MB. `path` is a file, a folder (all .txt files in
    it and its subfolders, plain, .gz, .xz or .zst) or a glob. A compressed file is one shard. Byte-order marks and the
    carriage returns of Windows line ends are removed and counted.

    Without `valid_path`, the last `valid_fraction` of the characters of each file is used for validation. To find where
    they start, compressed files are read two more times.
    """

    path: str  # a file, a folder or a glob
    valid_path: Optional[str] = None  # files for validation; None: a fraction of `path`
    valid_fraction: float = 0.1  # fraction of each file's characters, at its end, for validation without valid_path

    endings: ClassVar[tuple[str, ...]] = files.with_archives(".txt")  # file name endings to read if `path` is a folder

    @property
    def holds_out(self) -> bool:
        return self.valid_path is None

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from files.path_problems(self)
        yield from files.fraction_problems(self)

    def fingerprint(self) -> str:
        return files.fingerprint(self, files.settings_of(self), self.endings)

    def shards(self, split: str) -> list[files.FileShard]:
        return self._shards("train", split) if self.valid_path is None else self._shards(split, None)

    def all_shards(self) -> list[files.FileShard]:
        return self._shards("train", None) if self.valid_path is None else super().all_shards()

    def _shards(self, path_split: str, selected: Optional[str]) -> list[files.FileShard]:
        """Returns the shards of files.

        Args:
          path_split: "train" for the files of `path`, "valid" for the files of `valid_path`.
          selected: part of each file, "train" or "valid"; None: the whole file.
        """
        shards = []
        for file in files.find_files(self, path_split, self.endings):
            if files.is_archive(file):
                shards.append(files.FileShard(file, 0, None, selected))
            else:
                start, stop = self._range(file, selected)
                stop = os.path.getsize(file) if stop is None else stop
                shards += files.ranges(file, start, stop, _LONGEST_LINE)
        return shards

    def read(self, shard: files.FileShard, skipped: collections.Counter) -> Iterator[str]:
        path, start, stop, split = shard
        if split is not None:
            start, stop = self._range(path, split)
        for offset, content in files.pieces(path, start, stop, _LONGEST_LINE):
            try:
                yield normalize_line_ends(content.decode("utf-8"), skipped)
            except UnicodeDecodeError as e:
                if offset == 0 and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise UserError(f"{path} is UTF-16, not UTF-8: convert it with iconv -f UTF-16 -t UTF-8") from e
                line = files.line_number(path, offset + e.start)
                raise UserError(f"{path}:{line}: byte 0x{content[e.start]:02x} is not UTF-8 ({e.reason})") from e

    def _range(self, file: str, split: Optional[str]) -> tuple[int, Optional[int]]:
        """Returns the byte range (start, stop) of a split in a file; a `stop` of None means the end of the file.

        For a compressed file, the range refers to the decompressed content. If `split` is None, the range is the whole
        file.
        """
        if split is None:
            return 0, None
        boundary = files.byte_of_character(file, 1 - self.valid_fraction)
        return (0, boundary) if split == "train" else (boundary, None)
