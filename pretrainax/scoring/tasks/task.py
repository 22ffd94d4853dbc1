"""Says what every kind of task is: its fields, what it reads of an example, and the figures that it gives."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.results import Estimate, ratio
from pretrainax.scoring.tasks.examples import Example

Item = TypeVar("Item", bound=tuple)  # what is asked of an example


class Figure(NamedTuple):
    """One number of a task."""

    measure: str  # "accuracy"
    estimate: Estimate  # with its standard error over the examples
    examples: int
    part: str = ""  # of the examples: "" are all
    other: Mapping[str, int] = {}  # what was done otherwise, and how often: {"prompts cut": 3}


def mean(values: Sequence[float]) -> Estimate:
    """Returns the mean, and its standard error by the deviation of the sample (with n - 1)."""
    return ratio(values, [1.0] * len(values))


@dataclasses.dataclass(kw_only=True)
class Task(Generic[Item]):
    """Base of the kinds of tasks. A description sets the fields; templates name fields of an example: "{question}"."""

    about: str = ""  # what it asks, for people
    examples: str = ""  # file, folder or glob of JSON lines, from where the description lies; "": who asks gives it

    kind: ClassVar[str]  # what a description calls it

    def problems(self) -> Iterable[str]:
        """Yields what is wrong with the fields."""
        yield from ()

    def read(self, example: Example) -> Item:
        """Returns what is asked of an example; UserError with its place where it cannot be."""
        raise NotImplementedError

    def how(self, loaded: LoadedModel) -> str:
        """Says for people how a model is asked; UserError where it cannot be."""
        raise NotImplementedError

    def figures(self, loaded: LoadedModel, asked: Sequence[Item], chosen: Sequence[int]) -> list[Figure]:
        """Returns the figures of a model, the one for all examples first.

        Args:
          asked: what `read` has returned for each example.
          chosen: the indices of those that count; the others may serve as shots.
        """
        raise NotImplementedError


class Question(NamedTuple):
    """Holds what stands before an answer, and the example as a shot shows it: with its answer."""

    prompt: str
    shot: str


@dataclasses.dataclass(kw_only=True)
class Prompted(Task[Item]):
    """Fields of the tasks that ask a question, after `shots` others with their answers."""

    prompt: str = "{prompt}"
    delimiter: str = " "  # between a prompt and its answer
    shots: int = 0  # examples before each question: the first ones of the file, without the one asked
    separator: str = "\n\n"  # between two examples

    def problems(self) -> Iterable[str]:
        if self.shots < 0:
            yield f"shots is {self.shots}, it must be at least 0"

    def shown(self, questions: Sequence[Question], index: int) -> list[str]:
        """Returns the shots before a question, then its own prompt: what the model reads, joined by the separator."""
        before = [questions[i].shot for i in range(min(self.shots + 1, len(questions))) if i != index]
        return [*before[: self.shots], questions[index].prompt]
