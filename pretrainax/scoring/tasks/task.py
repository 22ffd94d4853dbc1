"""What every kind of task is: fields that its description sets, examples that it reads, figures that it gives."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Optional

import numpy as np

from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.tasks.examples import Example


class Figure(NamedTuple):
    """A mean over examples."""

    value: float
    standard_error: Optional[float]  # None: of a single example there is none
    examples: int


def mean(values: Iterable[float]) -> Figure:
    """Returns the mean, and its standard error by the sample's own deviation (with n - 1)."""
    values = np.asarray(list(values), np.float64)
    n = len(values)
    return Figure(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else None, n)


@dataclasses.dataclass(kw_only=True)
class Task:
    """Base of the kinds of tasks. A description sets the fields; templates name fields of an example: "{question}"."""

    about: str = ""  # what it asks, for people
    examples: str = ""  # file, folder or glob of JSON lines, from where the description lies; "": who asks gives it

    kind: ClassVar[str]  # what a description calls it

    def problems(self) -> Iterable[str]:
        """Yields what is wrong with the fields."""
        yield from ()

    def read(self, example: Example) -> Any:
        """Returns what is asked of an example; UserError with its place where it cannot be."""
        raise NotImplementedError

    def score(self, loaded: LoadedModel, asked: Sequence[Any], chosen: Sequence[int]) -> Mapping[str, Figure]:
        """Returns the figures of a model.

        Args:
          asked: what `read` has returned for each example.
          chosen: the indices of those that count; the others may serve as shots.
        """
        raise NotImplementedError


class Question(NamedTuple):
    """What stands before an answer, and the example as a shot shows it: with its answer."""

    prompt: str
    shot: str


@dataclasses.dataclass(kw_only=True)
class Prompted(Task):
    """Fields of the tasks that ask a question, after `shots` others with their answers."""

    prompt: str = "{prompt}"
    delimiter: str = " "  # between a prompt and its answer
    shots: int = 0  # examples before each question: the first ones of the file, without the one asked
    separator: str = "\n\n"  # between two examples

    def problems(self) -> Iterable[str]:
        if self.shots < 0:
            yield f"shots is {self.shots}, it must be at least 0"

    def prompts(self, questions: Sequence[Question], chosen: Iterable[int]) -> list[str]:
        """Returns what the model reads for each of the chosen questions: the shots, then its own prompt."""
        first = range(self.shots + 1)
        shots = [[questions[i].shot for i in first if i != index][: self.shots] for index in chosen]
        return [
            self.separator.join([*before, questions[index].prompt])
            for before, index in zip(shots, chosen, strict=True)
        ]
