"""Defines the base class of data sources, and the types of documents and records."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, Union

from pretrainax.config import UserError, kinds
from pretrainax.files.json_files import JsonObject

Note: TypeAlias = JsonObject  # metadata of a record: everything except its text, for example labels
Shard: TypeAlias = Any  # describes a subset of a source's documents; argument of `Source.read`


@dataclasses.dataclass(frozen=True)
class Record:
    """A record of a task, for example a premise and a hypothesis with a label."""

    texts: tuple[str, ...]  # the strings to tokenize, for example premise and hypothesis; may be empty
    note: Note  # metadata, for example labels; JSON-serializable
    mended: Mapping[str, int] = dataclasses.field(default_factory=dict)  # kind of repair -> number of repairs


class WordError(ValueError):
    """An error in one word of a record, for example an invalid tag."""

    def __init__(self, word: int, said: str):
        """Stores the index of the word and the error message.

        Args:
          word: index of the word in the record, from 0.
          said: error message, which contains the word.
        """
        super().__init__(said)
        self.word = word


# A document is a string, a very long string as UTF-8 bytes, a pair (source, target), or a record of a task.
Document = Union[str, bytearray, tuple[str, str], Record]


class Reader(Protocol):
    """Protocol of tasks (pretrainax.tasks) that convert entries of a file or dataset to `Record`s."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Returns the names of the fields that `read` uses; a name such as "translation.de" is a nested field."""
        ...

    @property
    def optional_fields(self) -> tuple[str, ...]:
        """Returns the names in `fields` that a table or an entry may lack."""
        ...

    def read(self, record: Mapping, /) -> Record:
        """Converts an entry (field name -> value) to a `Record`; raises ValueError if the entry is invalid."""
        ...

    def group(self, record: Record) -> str:
        """Returns the text that dependent records share, such as a passage; it determines the split of a record."""
        ...


def texts_of(document: Document) -> tuple[Union[str, bytearray], ...]:
    """Returns a document's strings: one for plain text, two for a pair, and any number for a record."""
    if isinstance(document, Record):
        return document.texts
    return document if isinstance(document, tuple) else (document,)


def has_text(document: Document) -> bool:
    """Returns True if a document is not blank.

    A record is not blank if at least one of its strings has a character that is not whitespace. A pair is not blank if
    both of its strings have such a character.
    """
    are_filled = [bool(text) and not text.isspace() for text in texts_of(document)]
    return any(are_filled) if isinstance(document, Record) else all(are_filled)


# Mixture weights of each training stage: (start of the stage, weights of the components). The start is a training
# progress from 0 to 1; the first stage starts at 0.
WeightStages = Sequence[tuple[float, Sequence[float]]]


class Source(kinds.Source):
    """Base class of data sources. The `split` argument of its methods is "train" or "valid"."""

    pairs: ClassVar[bool] = False  # True if the documents are pairs (source, target)
    # True if validation data is held out from the training data; False if it has separate files or a named split.
    holds_out: ClassVar[bool] = False
    config_path: ClassVar[str] = "config.data.source"  # config path of this source, for error messages

    @property
    def part(self) -> str:
        """Returns the label of the source in the metrics of a mixture, for example "source=wikipedia-en".

        The label consists of "source=", the last component of `path` that is not a glob, and the dataset name. If the
        source has neither a path nor a name, the class name is used instead.
        """
        path_parts = [part for part in getattr(self, "path", "").split("/") if part and not set(part) & set("*?[")]
        names = (path_parts[-1] if path_parts else "", (getattr(self, "name", None) or "").replace("/", "-"))
        return f"source={'-'.join(filter(None, names)) or type(self).__name__}"

    def components(self) -> tuple["Source", ...]:
        """Returns the sources of a mixture, each of which has its own corpus, or (self,) for a single source."""
        return (self,)

    def reading(self, task: Reader) -> "Source":
        """Returns a copy of this source whose documents are `Record`s, converted by `task`.

        Raises:
          UserError: the source has only plain text, without fields that a task could read.
        """
        raise UserError(
            f"{self.config_path} is {type(self).__name__}, which has no records for config.objective "
            f"{type(task).__name__}: use JsonLines, Tsv, Csv, ConllFiles, SquadFiles, Parquet, ArrayRecord, "
            "HuggingFace or TFDS"
        )

    def weight_stages(self, sizes: Sequence[int]) -> WeightStages:
        """Returns the mixture weights of the components for each training stage.

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

    def all_shards(self) -> list[Shard]:
        """Returns the shards of both splits together, whose documents are not cut at the border of the splits."""
        return [*self.shards("train"), *self.shards("valid")]

    def read(self, shard: Shard, skipped: collections.Counter) -> Iterator[Document]:
        """Yields the documents of a shard, counting skipped items in `skipped`, by reason."""
        raise NotImplementedError
