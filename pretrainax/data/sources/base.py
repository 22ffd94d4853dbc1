"""The base of all sources."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeAlias, Union

from pretrainax.config import kinds

Shard: TypeAlias = Any  # what a source's `read` takes: a part of its documents
Document = Union[str, bytearray, tuple[str, str]]  # a text; a very long one as its UTF-8; source and target


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
