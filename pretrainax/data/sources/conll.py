"""Implements a data source that reads files of CoNLL shared tasks and of Universal Dependencies."""

import codecs
import collections
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal, Optional

from pretrainax.config import Experiment
from pretrainax.data import files, line_ends
from pretrainax.data.sources.base import Document, Source, WordError
from pretrainax.data.sources.records import EncodedFiles

_Lines = list[tuple[int, bytes]]  # lines of a sentence: (line number in the file, from 1; content)


@dataclasses.dataclass
class ConllFiles(EncodedFiles, Source):
    """Reads sentences from files with one word and its tags per line, plain or compressed (.gz, .xz, .zst).

    A blank line separates two sentences. The fields of a record are "tokens" (the words of a sentence), "tags", "lines"
    (the line numbers of the words) and "text" (the words, joined by spaces). `path` is a file, a folder (all .conll,
    .conllu, .iob, .iob2 and .bio files in it and its subfolders) or a glob. Lines that begin with -DOCSTART- are
    skipped. To read the parts of speech of CoNLL-U:

        ConllFiles(path='en-train.conllu', conllu=True, separator='tab', word_column=1, tag_column=3)
    """

    word_column: int = 0  # index of the column with the words, from 0; -1: the last column
    tag_column: int = -1  # index of the column with the tags, from 0; -1: the last column
    separator: Literal["whitespace", "tab"] = "whitespace"  # between columns; with tabs, words may contain spaces
    conllu: bool = False  # skips comments (#), multiword tokens (1-2) and empty nodes (3.1)

    endings: ClassVar[tuple[str, ...]] = files.with_archives(".conll", ".conllu", ".iob", ".iob2", ".bio")
    broken: ClassVar[str] = "broken sentences"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.word_column == self.tag_column:
            yield f"{self.config_path}.word_column and tag_column are both {self.word_column}, they must differ"

    def fingerprint(self) -> str:
        settings = files.settings_of(self)
        if self.separator == "whitespace":
            settings["ascii"] = True  # earlier versions split words at no-break spaces, too
        return files.fingerprint(self, settings, self.endings)

    def _shard_ranges(self, file: str) -> Iterator[tuple[int, Optional[int]]]:
        yield 0, None  # one shard: the files are small

    def read(self, shard: files.FileShard, skipped: collections.Counter) -> Iterator[Document]:
        sentences = self._sentences(shard, skipped)
        return self.documents(
            sentences, self._parse, lambda line: f"{shard.path_or_split}:{line}", shard.split, skipped
        )

    def _sentences(self, shard: files.FileShard, skipped: collections.Counter) -> Iterator[tuple[int, _Lines]]:
        """Yields (number of the first line, lines) for each sentence in a file."""
        lines: _Lines = []
        with self.open_file(shard.path_or_split) as f:
            for number, line in enumerate(f, start=1):
                if number == 1 and line.startswith(codecs.BOM_UTF8):
                    skipped[line_ends.MARKS] += shard.split != "valid"  # counted in one split only
                    line = line[len(codecs.BOM_UTF8) :]
                if line.strip():
                    if not self._is_skipped(line):
                        lines.append((number, line))
                elif lines:
                    yield lines[0][0], lines
                    lines = []
        if lines:
            yield lines[0][0], lines

    def _is_skipped(self, line: bytes) -> bool:
        if line.startswith(b"-DOCSTART-"):
            return True
        return self.conllu and (line.startswith(b"#") or not line.split(None, 1)[0].isdigit())

    def _parse(self, lines: _Lines) -> dict:
        """Converts the lines of a sentence to a record with the fields listed in the class docstring.

        Raises:
          ValueError: the sentence is too large, or a line has too few columns.
        """
        self.check_size(sum(len(line) for _, line in lines))
        words_and_tags = [self._word_and_tag(*numbered_line) for numbered_line in lines]
        words, tags = ([word_and_tag[i] for word_and_tag in words_and_tags] for i in (0, 1))
        return {"tokens": words, "tags": tags, "lines": [number for number, _ in lines], "text": " ".join(words)}

    def _word_and_tag(self, number: int, line: bytes) -> tuple[str, str]:
        """Returns the word and the tag of a line; raises ValueError if the line has too few columns."""
        # Bytes are split at ASCII white space only: a word may contain a no-break space.
        fields = line.rstrip(b"\r\n").split(b"\t" if self.separator == "tab" else None)
        with self.named_encoding():
            columns = [field.decode("utf-8") for field in fields]
        indices = (self.word_column, self.tag_column)
        if any(not -len(columns) <= i < len(columns) for i in indices) or len({i % len(columns) for i in indices}) < 2:
            raise ValueError(
                f"line {number} has {len(columns)} column{'s' * (len(columns) > 1)}, {self.config_path}.word_column is "
                f"{self.word_column} and tag_column {self.tag_column} (separator {self.separator!r})"
            )
        return columns[self.word_column], columns[self.tag_column]

    def _document(self, record: dict, repairs: collections.Counter) -> tuple[Document, float]:
        try:
            return super()._document(record, repairs)
        except WordError as e:
            raise ValueError(f"line {record['lines'][e.word]}, {e}") from e
