"""Minimal pairs: of two sentences that differ in little, is the good one the more likely?

As in BLiMP (Warstadt et al. 2020, arXiv 1912.00582), whose files work as they are published.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.tasks.asking import manner, sentence_log_likelihoods
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.task import Figure, Task, mean


class Pair(NamedTuple):
    """Two sentences, of which a good model finds the first the more likely."""

    good: str
    bad: str
    group: str


@dataclasses.dataclass(kw_only=True)
class MinimalPairs(Task[Pair]):
    """Asks which of two sentences is the more likely as a whole; equally likely ones count as wrong."""

    good: str = "{sentence_good}"
    bad: str = "{sentence_bad}"
    group: str = "{UID}"  # figures are given of each group too; "": of all alone

    kind: ClassVar[str] = "minimal_pairs"

    def read(self, example: Example) -> Pair:
        pair = Pair(*map(example.fill, (self.good, self.bad, self.group)))
        if not (pair.good.strip() and pair.bad.strip()):
            raise example.error("a sentence of the pair is empty")
        return pair

    def how(self, loaded: LoadedModel) -> str:
        return f"{self.kind}: how often the good sentence is the more likely, {manner(loaded)}"

    def figures(self, loaded: LoadedModel, asked: Sequence[Pair], chosen: Sequence[int]) -> list[Figure]:
        pairs = [asked[i] for i in chosen]
        found = sentence_log_likelihoods(loaded, [sentence for pair in pairs for sentence in (pair.good, pair.bad)])
        right, group_of = found[0::2] > found[1::2], np.array([pair.group for pair in pairs])
        groups = {"": np.ones(len(pairs), bool)} | {group: group_of == group for group in sorted({*group_of} - {""})}
        return [Figure("accuracy", mean(right[of]), int(of.sum()), group) for group, of in groups.items()]
