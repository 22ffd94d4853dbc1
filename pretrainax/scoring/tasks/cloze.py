"""Cloze tasks: predicts the last word of a text, as in LAMBADA (Paperno et al. 2016, arXiv 1606.06031)."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from pretrainax.files.json_files import JsonObject
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.results import share
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.likelihoods import continuation_check, continuations
from pretrainax.scoring.tasks.task import Task, TaskMetric, mean


class LastWord(NamedTuple):
    """A text without its last word, and the last word with the white space before it."""

    before: str
    word: str


@dataclasses.dataclass(kw_only=True)
class Cloze(Task[LastWord]):
    """Predicts the last word of a text, including attached punctuation, from all preceding text.

    `accuracy` is the fraction of words for which every token is the model's most likely token. `perplexity` is per
    word, not per token: the exponential of the mean of -log p(word | text) over words.
    """

    text: str = "{text}"

    kind: ClassVar[str] = "cloze"
    measures: ClassVar[tuple[str, ...]] = ("accuracy", "perplexity")

    def read(self, example: Example) -> LastWord:
        text = example.fill(self.text).rstrip()
        words = text.split()
        if len(words) < 2:
            raise example.error(f"the text is {text!r}, it must have at least two words: the last one is predicted")
        before = text[: -len(words[-1])].rstrip()
        return LastWord(before, text[len(before) :])

    def how(self, loaded: LoadedModel) -> str:
        return f"{self.kind}: the last word of a text; its perplexity is of words"

    def transcripts(self, loaded: LoadedModel, asked: Sequence[LastWord], chosen: Sequence[int]) -> list[JsonObject]:
        fits = continuation_check(loaded)
        texts = {index: asked[index] for index in chosen if fits(*asked[index])}
        scores = dict(zip(texts, continuations(loaded, texts.values()), strict=True))
        return [
            {"prompt": asked[index].before, "target": asked[index].word, "asked": index in scores}
            | (
                {"log_likelihood": score.log_likelihood, "correct": score.is_best}
                if (score := scores.get(index))
                else {}
            )
            for index in chosen
        ]

    def metrics(self, transcripts: Sequence[JsonObject]) -> list[TaskMetric]:
        estimates = {
            "accuracy": share([transcript["correct"] for transcript in transcripts]),
            "perplexity": mean([-transcript["log_likelihood"] for transcript in transcripts]).exp(),
        }
        return [TaskMetric(measure, estimate, len(transcripts)) for measure, estimate in estimates.items()]
