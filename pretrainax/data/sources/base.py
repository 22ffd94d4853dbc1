"""The base class of data sources, and the types of documents and records."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, Union

from pretrainax.config import UserError, kinds
from pretrainax.files.json_files import JsonObject

Note: TypeAlias = JsonObject  # metadata of a record, in addition to its texts
Shard: TypeAlias = Any  # the argument of `Source.read`: a subset of the documents


@dataclasses.dataclass(frozen=True)
class Record:
    """A record of a task: texts, which may be empty, and metadata that is JSON-serializable."""

    texts: tuple[str, ...]
    note: Note
    mended: Mapping[str, int] = dataclasses.field(default_factory=dict)  # numbers of repairs by kind


class WordError(ValueError):
    """Error at one word of a record."""

    def __init__(self, word: int, said: str):
        """Stores the error. word: index of the word, from 0; said: error message, which names the word."""
        super().__init__(said)
        self.word = word


# A text; a very long text as UTF-8 bytes; (source, target); a record of a task.
Document = Union[str, bytearray, tuple[str, str], Record]


class Reader(Protocol):
    """Converts entries of a file or a dataset to records: a task (pretrainax.tasks)."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Returns the fields to read; "translation.de" is a nested field."""
        ...

    def read(self, record: Mapping, /) -> Record:
        """Returns the record of a task; raises ValueError with the reason if `record` is invalid."""
        ...


def texts_of(document: Document) -> tuple[Union[str, bytearray], ...]:
    """Returns the texts of a document."""
    if isinstance(document, Record):
        return document.texts
    return document if isinstance(document, tuple) else (document,)


def has_text(document: Document) -> bool:
    """Returns True if a document has text: at least one non-blank text in a record, only non-blank texts otherwise."""
    filled = [bool(text) and not text.isspace() for text in texts_of(document)]
    return any(filled) if isinstance(document, Record) else all(filled)


# Weights by stage of the training: (start of the stage as training progress, weights); the first stage starts at 0.
WeightStages = Sequence[tuple[float, Sequence[float]]]


class Source(kinds.Source):
    """Base class of data sources. `split` is "train" or "valid"."""

    pairs: ClassVar[bool] = False  # documents are (source, target)
    holds_out: ClassVar[bool] = False  # validation uses held-out training text instead of separate text
    config_path: ClassVar[str] = "config.data.source"  # path of the fields in error messages

    @property
    def part(self) -> str:
        """Returns the label of the source in metrics of a mixture, as in "loss/source=wikipedia-en".

        The label is the last part of the path without globs and the name of the dataset, or the name of the class.
        """
        words = [word for word in getattr(self, "path", "").split("/") if word and not set(word) & set("*?[")]
        names = (words[-1] if words else "", (getattr(self, "name", None) or "").replace("/", "-"))
        return f"source={'-'.join(filter(None, names)) or type(self).__name__}"

    def components(self) -> tuple["Source", ...]:
        """Returns the sources of a mixture, each with a separate corpus."""
        return (self,)

    def reading(self, task: Reader) -> "Source":
        """Returns a copy of this source whose documents are its records, as `task` reads them.

        Raises:
          UserError: the source has no records.
        """
        raise UserError(
            f"{self.config_path} is {type(self).__name__}, which has no records for config.objective "
            f"{type(task).__name__}: use JsonLines, Tsv, Csv, ConllFiles, SquadFiles, Parquet, ArrayRecord, "
            "HuggingFace or TFDS"
        )

    def weight_stages(self, sizes: Sequence[int]) -> WeightStages:
        """Returns the weights of the components by training stage; sizes: number of documents per component."""
        return [(0.0, (1.0,))]

    def fingerprint(self) -> str:
        """Returns a string that changes whenever the text may have changed."""
        raise NotImplementedError

    def shards(self, split: str) -> list[Shard]:
        raise NotImplementedError

    def read(self, shard: Shard, skipped: collections.Counter) -> Iterator[Document]:
        """Yields the documents of a shard; counts skipped parts in `skipped`, by reason."""
        raise NotImplementedError
