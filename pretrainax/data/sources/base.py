"""What every source has."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Union

from pretrainax.config import kinds

Document = Union[str, bytearray, tuple[str, str]]  # a text; a very long one as its UTF-8; source and target


class Source(kinds.Source):
    """Base of the sources. `split` is "train" or "valid"."""

    pairs: ClassVar[bool] = False  # documents are (source, target)
    config_path: ClassVar[str] = "config.data.source"  # where error lines say that its fields are

    def components(self) -> tuple["Source", ...]:
        """The sources that a mixture is made of, each with a corpus of its own."""
        return (self,)

    def rates(self, sizes: Sequence[int]) -> list[tuple[float, tuple[float, ...]]]:
        """(from which share of the training on, weight of each component). sizes: documents of each."""
        return [(0.0, (1.0,))]

    def fingerprint(self) -> str:
        """Changes whenever the text may have changed."""
        raise NotImplementedError

    def shards(self, split: str) -> list[Any]:
        raise NotImplementedError

    def read(self, shard: Any, skipped: collections.Counter) -> Iterator[Document]:
        """The documents of a shard. Counts in `skipped`, by reason, what it leaves out."""
        raise NotImplementedError
