"""Defines the base class of data sources, and the types of documents and records."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, Union

from pretrainax.config import UserError, kinds
from pretrainax.files.json_files import JsonObject

Note: TypeAlias = JsonObject  # metadata of a record: all its data except its strings of text, such as labels
Shard: TypeAlias = Any  # describes a subset of a source's documents; argument of `Source.read`


@dataclasses.dataclass(frozen=True)
class Record:
    """A record of a task, for example a premise and a hypothesis with a label."""

    texts: tuple[str, ...]  # the strings to tokenize, such as premise and hypothesis; a string may be empty
    note: Note  # metadata, such as labels; JSON-serializable
    mended: Mapping[str, int] = dataclasses.field(default_factory=dict)  # kind of repair -> number of repairs


class WordError(ValueError):
    """Error in one word of a record, for example an invalid tag."""

    def __init__(self, word: int, said: str):
        """Stores the position and the message of the error.

        Args:
          word: index of the word in the record, from 0.
          said: error message, which contains the word.
        """
        super().__init__(said)
        self.word = word


# One of: a string; a very long string, as UTF-8 bytes; a pair (source, target); a record of a task.
Document = Union[str, bytearray, tuple[str, str], Record]


class Reader(Protocol):
    """Interface that tasks (pretrainax.tasks) implement: converts the entries of a file or dataset to `Record`s."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Returns the names of the fields that `read` uses; "translation.de" is a nested field."""
        ...

    def read(self, record: Mapping, /) -> Record:
        """Converts an entry (field name -> value) to a `Record`; raises ValueError if the entry is invalid."""
        ...


def texts_of(document: Document) -> tuple[Union[str, bytearray], ...]:
    """Returns the strings of a document: one for plain text, two for a pair, any number for a record."""
    if isinstance(document, Record):
        return document.texts
    return document if isinstance(document, tuple) else (document,)


def has_text(document: Document) -> bool:
    """Returns True if a document is not blank.

    A record is not blank if at least one of its strings has a character that is not white space. A pair is not blank if
    both of its strings have such a character.
    """
    filled = [bool(text) and not text.isspace() for text in texts_of(document)]
    return any(filled) if isinstance(document, Record) else all(filled)


# Mixture weights by stage of the training: (start of the stage, weights of the components). The start is a training
# progress between 0 and 1, and the first stage starts at 0.
WeightStages = Sequence[tuple[float, Sequence[float]]]


class Source(kinds.Source):
    """Base class of data sources. In all methods, `split` is "train" or "valid"."""

    pairs: ClassVar[bool] = False  # True if the documents are pairs (source, target)
    # True if the validation split is held out from the training text; False if it has separate files or a named split.
    holds_out: ClassVar[bool] = False
    config_path: ClassVar[str] = "config.data.source"  # config path of this source, for error messages

    @property
    def part(self) -> str:
        """Returns the label of the source in the metrics of a mixture, for example "source=wikipedia-en".

        After "source=", the label contains the last component of `path` that is not a glob and the name of the dataset.
        A source without path and name has the name of its class instead.
        """
        words = [word for word in getattr(self, "path", "").split("/") if word and not set(word) & set("*?[")]
        names = (words[-1] if words else "", (getattr(self, "name", None) or "").replace("/", "-"))
        return f"source={'-'.join(filter(None, names)) or type(self).__name__}"

    def components(self) -> tuple["Source", ...]:
        """Returns the sources that a mixture consists of, each with a separate corpus; (self,) for a single source."""
        return (self,)

    def reading(self, task: Reader) -> "Source":
        """Returns a copy of this source whose documents are `Record`s, converted by `task`.

        Raises:
          UserError: the source has only plain text, no fields that a task could read.
        """
        raise UserError(
            f"{self.config_path} is {type(self).__name__}, which has no records for config.objective "
            f"{type(task).__name__}: use JsonLines, Tsv, Csv, ConllFiles, SquadFiles, Parquet, ArrayRecord, "
            "HuggingFace or TFDS"
        )

    def weight_stages(self, sizes: Sequence[int]) -> WeightStages:
        """Returns the mixture weights of the components by training stage.

        Args:
          sizes: number of documents of each component.
        """
        return [(0.0, (1.0,))]

    def fingerprint(self) -> str:
        """Returns a string that changes whenever the text of the source may have changed."""
        raise NotImplementedError

    def shards(self, split: str) -> list[Shard]:
        """Returns the shards of a split."""
        raise NotImplementedError

    def read(self, shard: Shard, skipped: collections.Counter) -> Iterator[Document]:
        """Yields the documents of a shard; counts skipped items in `skipped`, by reason."""
        raise NotImplementedError
