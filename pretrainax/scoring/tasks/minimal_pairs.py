"""Minimal-pair tasks: compares the likelihoods of two sentences that differ in few words.

The published files of BLiMP (Warstadt et al. 2020, arXiv 1912.00582) have this format, so they work unchanged.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.likelihoods import sentence_log_likelihoods, sentence_score_name
from pretrainax.scoring.tasks.task import Task, TaskMetric, mean


class Pair(NamedTuple):
    """A grammatical sentence, which should be more likely, and an ungrammatical sentence."""

    good: str
    bad: str
    group: str  # name of the group, for metrics per group


@dataclasses.dataclass(kw_only=True)
class MinimalPairs(Task[Pair]):
    """Compares the likelihoods of two whole sentences.

    `accuracy` is the fraction of pairs whose good sentence is more likely. Equal likelihoods count as wrong.
    """

    good: str = "{sentence_good}"
    bad: str = "{sentence_bad}"
    group: str = "{UID}"  # template of the group; accuracy is also computed per group; "": no groups

    kind: ClassVar[str] = "minimal_pairs"

    def read(self, example: Example) -> Pair:
        pair = Pair(*map(example.fill, (self.good, self.bad, self.group)))
        if not (pair.good.strip() and pair.bad.strip()):
            raise example.error("a sentence of the pair is empty")
        return pair

    def how(self, loaded: LoadedModel) -> str:
        return f"{self.kind}: how often the good sentence is the more likely, {sentence_score_name(loaded)}"

    def metrics(self, loaded: LoadedModel, asked: Sequence[Pair], chosen: Sequence[int]) -> list[TaskMetric]:
        pairs = [asked[i] for i in chosen]
        scores = sentence_log_likelihoods(loaded, [sentence for pair in pairs for sentence in (pair.good, pair.bad)])
        is_correct, group_of = scores[0::2] > scores[1::2], np.array([pair.group for pair in pairs])
        rows_of_group = {"": np.ones(len(pairs), bool)} | {
            group: group_of == group for group in sorted({*group_of} - {""})
        }
        return [
            TaskMetric("accuracy", mean(is_correct[rows]), int(rows.sum()), group)
            for group, rows in rows_of_group.items()
        ]
