"""Cloze tasks: predicts the last word of a text, as in LAMBADA (Paperno et al. 2016, arXiv 1606.06031)."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.likelihoods import continuations
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

    def read(self, example: Example) -> LastWord:
        text = example.fill(self.text).rstrip()
        words = text.split()
        if len(words) < 2:
            raise example.error(f"the text is {text!r}, it must have at least two words: the last one is predicted")
        before = text[: -len(words[-1])].rstrip()
        return LastWord(before, text[len(before) :])

    def how(self, loaded: LoadedModel) -> str:
        return f"{self.kind}: the last word of a text; its perplexity is of words"

    def metrics(self, loaded: LoadedModel, asked: Sequence[LastWord], chosen: Sequence[int]) -> list[TaskMetric]:
        words = continuations(loaded, [asked[i] for i in chosen])
        nats = mean([-word.log_likelihood for word in words])
        perplexity = math.exp(min(nats.value, 700.0))  # float64 overflows above exp(709)
        metrics = {
            "accuracy": mean([word.is_best for word in words]),
            "perplexity": nats.times(perplexity)._replace(value=perplexity),  # d exp(x) / dx = exp(x)
        }
        cut = {"texts cut": count} if (count := sum(word.is_cut for word in words)) else {}
        return [TaskMetric(measure, estimate, len(words), other=cut) for measure, estimate in metrics.items()]
