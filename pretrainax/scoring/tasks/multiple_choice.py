"""Multiple choice by likelihood: which of some answers does a model find the most likely after a question?"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.task import Figure, Prompted, Question, mean


class Choices(NamedTuple):
    """A question, its answers and the index of the right one."""

    question: Question
    choices: tuple[str, ...]
    answer: int


@dataclasses.dataclass(kw_only=True)
class MultipleChoice(Prompted):
    """Asks which answer is the most likely: by the log-likelihood of each, and by two that are normalised.

    `accuracy` compares log p(answer | prompt), which favours short answers; `accuracy_per_byte` divides it by the bytes
    of the answer in UTF-8; `accuracy_unconditional` subtracts log p(answer | `unconditional`), the likelihood of the
    answer to no question at all (Brown et al. 2020, arXiv 2005.14165, section 2.4).
    """

    choices: str = "choices"  # the field with the list of answers
    answer: str = "answer"  # the field with the right one: its index, from 0, or its text
    unconditional: str = "Answer:"

    kind: ClassVar[str] = "multiple_choice"

    def read(self, example: Example) -> Choices:
        choices, answer = example.get(self.choices), example.get(self.answer)
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
            raise example.error(f"field {self.choices!r} is {choices!r}, it must be a list of two or more texts")
        if isinstance(answer, str) and answer in choices:
            answer = choices.index(answer)
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise example.error(
                f"field {self.answer!r} is {answer!r}, it must be the index of a choice, 0 to {len(choices) - 1}, or "
                "its text"
            )
        prompt = example.fill(self.prompt)
        return Choices(Question(prompt, prompt + self.delimiter + choices[answer]), tuple(choices), answer)

    def score(self, loaded: LoadedModel, asked: Sequence[Choices], chosen: Sequence[int]) -> Mapping[str, Figure]:
        prompts = self.prompts([choices.question for choices in asked], chosen)
        pairs = [
            (context, self.delimiter + choice)
            for prompt, index in zip(prompts, chosen, strict=True)
            for context in (prompt, self.unconditional)
            for choice in asked[index].choices
        ]
        nats = iter(said.nats for said in continuations(loaded, pairs))
        right = {"accuracy": [], "accuracy_per_byte": [], "accuracy_unconditional": []}
        for _, choices, answer in (asked[i] for i in chosen):
            given, alone = (np.array([*itertools.islice(nats, len(choices))]) for _ in range(2))
            sizes = np.array([len(choice.encode()) for choice in choices])
            for name, scores in zip(right, (given, given / sizes, given - alone), strict=True):
                right[name].append(int(scores.argmax()) == answer)
        return {name: mean(values) for name, values in right.items()}
