"""The base of all sources."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, Union

from pretrainax.config import UserError, kinds
from pretrainax.files.json_files import JsonObject

Note: TypeAlias = JsonObject  # what is known of a record beside its texts
Shard: TypeAlias = Any  # what a source's `read` takes: a part of its documents


@dataclasses.dataclass(frozen=True)
class Record:
    """A record of a task: texts, of which some may be empty, and what else is known of them, which JSON can hold."""

    texts: tuple[str, ...]
    note: Note
    mended: Mapping[str, int] = dataclasses.field(default_factory=dict)  # how often what was mended, for the counts


class WordError(ValueError):
    """Says what is wrong with a record at one of its words."""

    def __init__(self, word: int, said: str):
        """word: its number from 0; said: the line, which names the word."""
        super().__init__(said)
        self.word = word


# A text; a very long one as its UTF-8; source and target; a record of a task.
Document = Union[str, bytearray, tuple[str, str], Record]


class Reader(Protocol):
    """Makes records of what a file or a data set holds: a task (pretrainax.tasks)."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Returns the fields that are read, "translation.de" for one inside of another."""
        ...

    def read(self, record: Mapping, /) -> Record:
        """Returns the record of a task; ValueError, which says what is wrong, where it is none."""
        ...


def texts_of(document: Document) -> tuple[Union[str, bytearray], ...]:
    """Returns the texts that a document consists of."""
    if isinstance(document, Record):
        return document.texts
    return document if isinstance(document, tuple) else (document,)


def has_text(document: Document) -> bool:
    """Returns True if a document is worth to be kept: a record with any text, another document with all of its own."""
    given = [bool(text) and not text.isspace() for text in texts_of(document)]
    return any(given) if isinstance(document, Record) else all(given)


# Weights of several things, by stage of the training: (from which share of it on, weight of each), the first from 0.
WeightStages = Sequence[tuple[float, Sequence[float]]]


class Source(kinds.Source):
    """Base of the sources. `split` is "train" or "valid"."""

    pairs: ClassVar[bool] = False  # documents are (source, target)
    holds_out: ClassVar[bool] = False  # validation has no text of its own: some of that for training is held out
    config_path: ClassVar[str] = "config.data.source"  # where error lines say that its fields are

    @property
    def part(self) -> str:
        """Names it in the figures of a mixture, "loss/source=wikipedia-en": by the last word of its path that is no
        glob and the name of its data set, or by its class."""
        words = [word for word in getattr(self, "path", "").split("/") if word and not set(word) & set("*?[")]
        named = (words[-1] if words else "", (getattr(self, "name", None) or "").replace("/", "-"))
        return f"source={'-'.join(filter(None, named)) or type(self).__name__}"

    def components(self) -> tuple["Source", ...]:
        """Returns the sources that a mixture is made of, each with a corpus of its own."""
        return (self,)

    def reading(self, task: Reader) -> "Source":
        """Returns this source with the records of a task in place of its own documents.

        Raises:
          UserError: it has no records.
        """
        raise UserError(
            f"{self.config_path} is {type(self).__name__}, which has no records for config.objective "
            f"{type(task).__name__}: give JsonLines, Tsv, Csv, ConllFiles, SquadFiles, Parquet, ArrayRecord, "
            "HuggingFace or TFDS"
        )

    def weight_stages(self, sizes: Sequence[int]) -> WeightStages:
        """Returns the weight of each component at each stage of the training. sizes: documents of each."""
        return [(0.0, (1.0,))]

    def fingerprint(self) -> str:
        """Changes whenever the text may have changed."""
        raise NotImplementedError

    def shards(self, split: str) -> list[Shard]:
        raise NotImplementedError

    def read(self, shard: Shard, skipped: collections.Counter) -> Iterator[Document]:
        """Yields the documents of a shard. Counts in `skipped`, by reason, what it leaves out."""
        raise NotImplementedError
