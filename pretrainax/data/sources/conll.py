"""Files of the shared tasks of CoNLL, and of Universal Dependencies: a word a line, a blank line between sentences."""

import codecs
import collections
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal, Optional

from pretrainax.config import Experiment
from pretrainax.data import files, line_ends
from pretrainax.data.sources.base import Document, Source, WordError
from pretrainax.data.sources.records import RecordFiles

_Lines = list[tuple[int, bytes]]  # of a sentence, each with its number in the file, from 1


@dataclasses.dataclass
class ConllFiles(RecordFiles, Source):
    """Sentences with a word and its tags a line, in columns; a blank line parts sentences; plain, .gz, .xz or .zst.

    A record has the "tokens" and the "tags" of a sentence, the "lines" that they are on, and its "text", the words with
    spaces between. `path` is a file, a folder (every .conll, .conllu, .iob, .iob2 and .bio below it) or a glob. Lines
    that begin with -DOCSTART- are left out. CoNLL-U's parts of speech are

        ConllFiles(path='en-train.conllu', conllu=True, separator='tab', word_column=1, tag_column=3)
    """

    word_column: int = 0  # the column of the word, from 0; -1: the last one
    tag_column: int = -1  # the column of its tag, the same way
    separator: Literal["whitespace", "tab"] = "whitespace"  # between columns; with tabs, words may have spaces in them
    conllu: bool = False  # comments (#), ranges of words (1-2) and empty nodes (3.1) are left out

    endings: ClassVar[tuple[str, ...]] = files.with_archives(".conll", ".conllu", ".iob", ".iob2", ".bio")
    broken: ClassVar[str] = "broken sentences"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.word_column == self.tag_column:
            yield f"{self.config_path}.word_column and tag_column are both {self.word_column}, they must differ"

    def _cuts(self, file: str) -> Iterator[tuple[int, Optional[int]]]:
        yield 0, None  # they are small

    def read(self, shard: files.Part, skipped: collections.Counter) -> Iterator[Document]:
        sentences = self._sentences(shard, skipped)
        return self.documents(sentences, self._parse, lambda line: f"{shard.place}:{line}", shard.split, skipped)

    def _sentences(self, shard: files.Part, skipped: collections.Counter) -> Iterator[tuple[int, _Lines]]:
        """Yields the lines of each sentence, with the number of the first."""
        lines: _Lines = []
        with files.opened(shard.place) as f:
            for number, line in enumerate(f, start=1):
                if number == 1 and line.startswith(codecs.BOM_UTF8):
                    skipped[line_ends.MARKS] += shard.split != "valid"  # else counted in both splits
                    line = line[len(codecs.BOM_UTF8) :]
                if line.strip():
                    if not self._is_left_out(line):
                        lines.append((number, line))
                elif lines:
                    yield lines[0][0], lines
                    lines = []
        if lines:
            yield lines[0][0], lines

    def _is_left_out(self, line: bytes) -> bool:
        if line.startswith(b"-DOCSTART-"):
            return True
        return self.conllu and (line.startswith(b"#") or not line.split(None, 1)[0].isdigit())

    def _parse(self, lines: _Lines) -> dict:
        """Returns the record of a sentence; ValueError where a line lacks a column."""
        self.check_size(sum(len(line) for _, line in lines))
        cells = [self._cells(*each) for each in lines]
        words, tags = ([of_line[i] for of_line in cells] for i in (0, 1))
        return {"tokens": words, "tags": tags, "lines": [number for number, _ in lines], "text": " ".join(words)}

    def _cells(self, number: int, line: bytes) -> tuple[str, str]:
        columns = line.decode("utf-8").rstrip("\r\n").split("\t" if self.separator == "tab" else None)
        wanted = (self.word_column, self.tag_column)
        if any(not -len(columns) <= i < len(columns) for i in wanted) or len({i % len(columns) for i in wanted}) < 2:
            raise ValueError(
                f"line {number} has {len(columns)} column{'s' * (len(columns) > 1)}, {self.config_path}.word_column is "
                f"{self.word_column} and tag_column {self.tag_column} (separator {self.separator!r})"
            )
        return columns[self.word_column], columns[self.tag_column]

    def _document(self, record: dict, found: collections.Counter) -> tuple[Document, float]:
        try:
            return super()._document(record, found)
        except WordError as e:
            raise ValueError(f"line {record['lines'][e.word]}, {e}") from e
