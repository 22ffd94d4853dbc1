"""Minimal pairs: of two sentences that differ in little, is the good one the more likely?

As in BLiMP (Warstadt et al. 2020, arXiv 1912.00582), whose files work as they are published.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.task import Figure, Task, mean


class Pair(NamedTuple):
    """Two sentences, of which a good model finds the first the more likely."""

    good: str
    bad: str
    group: str


@dataclasses.dataclass(kw_only=True)
class MinimalPairs(Task):
    """Asks which of two sentences is the more likely as a whole; equally likely ones count as wrong."""

    good: str = "{sentence_good}"
    bad: str = "{sentence_bad}"
    group: str = "{UID}"  # figures are given of each group too; "": of all alone

    kind: ClassVar[str] = "minimal_pairs"

    def read(self, example: Example) -> Pair:
        return Pair(*map(example.fill, (self.good, self.bad, self.group)))

    def score(self, loaded: LoadedModel, asked: Sequence[Pair], chosen: Sequence[int]) -> Mapping[str, Figure]:
        pairs = [asked[i] for i in chosen]
        nats = sentence_scores(loaded, [sentence for pair in pairs for sentence in (pair.good, pair.bad)])
        right = np.asarray(nats[0::2]) > np.asarray(nats[1::2])
        groups = sorted({pair.group for pair in pairs} - {""})
        of = {group: [bool(r) for r, pair in zip(right, pairs, strict=True) if pair.group == group] for group in groups}
        return {"accuracy": mean(right)} | {f"accuracy/{group}": mean(values) for group, values in of.items()}
