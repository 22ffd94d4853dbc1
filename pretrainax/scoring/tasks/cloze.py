"""Cloze: does a model know the last word of a text, as in LAMBADA (Paperno et al. 2016, arXiv 1606.06031)?"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.tasks.asking import continuations
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.task import Figure, Task, mean


class LastWord(NamedTuple):
    """A text without its last word, and that word with the white space before it."""

    before: str
    word: str


@dataclasses.dataclass(kw_only=True)
class Cloze(Task[LastWord]):
    """Asks for the last word of a text, with what is attached to it, given all before.

    `accuracy`: how often each token of it is the most likely one; `perplexity` is that of the words, exp of the mean of
    -log p(word | text), not divided by the number of tokens.
    """

    text: str = "{text}"

    kind: ClassVar[str] = "cloze"

    def read(self, example: Example) -> LastWord:
        text = example.fill(self.text).rstrip()
        words = text.split()
        if len(words) < 2:
            raise example.error(f"the text is {text!r}, it must have two words or more: the last one is asked for")
        before = text[: -len(words[-1])].rstrip()
        return LastWord(before, text[len(before) :])

    def how(self, loaded: LoadedModel) -> str:
        return f"{self.kind}: the last word of a text; its perplexity is of words"

    def figures(self, loaded: LoadedModel, asked: Sequence[LastWord], chosen: Sequence[int]) -> list[Figure]:
        said = continuations(loaded, [asked[i] for i in chosen])
        nats = mean([-word.log_likelihood for word in said])
        perplexity = math.exp(min(nats.value, 700.0))  # the largest whose exponential a float64 holds is 709
        of = {
            "accuracy": mean([word.is_best for word in said]),
            "perplexity": nats.times(perplexity)._replace(value=perplexity),  # its slope is itself
        }
        cut = {"texts cut": count} if (count := sum(word.is_cut for word in said)) else {}
        return [Figure(measure, estimate, len(said), other=cut) for measure, estimate in of.items()]
