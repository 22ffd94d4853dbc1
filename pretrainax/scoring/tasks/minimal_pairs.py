"""Minimal-pair tasks: compares the likelihoods of two sentences that differ in few words.

The published files of BLiMP (Warstadt et al. 2020, arXiv 1912.00582) have this format, so they work unchanged.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from pretrainax.files.json_files import JsonObject
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.results import share
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.likelihoods import sentence_check, sentence_log_likelihoods, sentence_score_name
from pretrainax.scoring.tasks.task import Task, TaskMetric


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
    measures: ClassVar[tuple[str, ...]] = ("accuracy",)

    def read(self, example: Example) -> Pair:
        pair = Pair(*map(example.fill, (self.good, self.bad, self.group)))
        if not (pair.good.strip() and pair.bad.strip()):
            raise example.error("a sentence of the pair is empty")
        return pair

    def how(self, loaded: LoadedModel) -> str:
        return f"{self.kind}: how often the good sentence is the more likely, {sentence_score_name(loaded)}"

    def transcripts(self, loaded: LoadedModel, asked: Sequence[Pair], chosen: Sequence[int]) -> list[JsonObject]:
        fits = sentence_check(loaded)
        pairs = {index: asked[index] for index in chosen if fits(asked[index].good) and fits(asked[index].bad)}
        sentences = [sentence for pair in pairs.values() for sentence in (pair.good, pair.bad)]
        scores = dict(zip(pairs, sentence_log_likelihoods(loaded, sentences).reshape(-1, 2).tolist(), strict=True))
        return [
            {**asked[index]._asdict(), "asked": index in scores}
            | (
                {"log_likelihoods": scores[index], "correct": scores[index][0] > scores[index][1]}
                if index in scores
                else {}
            )
            for index in chosen
        ]

    def metrics(self, transcripts: Sequence[JsonObject]) -> list[TaskMetric]:
        groups = {"": transcripts} | {
            group: [transcript for transcript in transcripts if transcript["group"] == group]
            for group in sorted({transcript["group"] for transcript in transcripts} - {""})
        }
        return [
            TaskMetric("accuracy", share([transcript["correct"] for transcript in members]), len(members), group)
            for group, members in groups.items()
        ]
